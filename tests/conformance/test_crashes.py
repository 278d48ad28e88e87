"""A save that dies half way leaves the checkpoint before it as it was, on every store."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

from mpwriter import MPFsspecWriter
from mpwriter.errors import WorkerDiedError
from tests.saves import failure_of, small_state, worker_pids
from tests.servers import S3Store, Store
from tests.states import save_with
from tests.stores import NO_MEMORY, assert_holds, on, save, shards
from tests.trainers import Trainer, all_gone

State = dict[str, Any]

# Far more than the window that is copied ahead: near the end of it most of it has been written.
_NUM_TENSORS = 12
_WINDOW_BYTES = 1 << 20


def large_state() -> State:
    """24 MiB: several parts of a file where a store has parts."""
    return {f"layer{n}": torch.full((512, 1024), n / 16) for n in range(_NUM_TENSORS)}


class Interrupted(DefaultSavePlanner):
    """Does something when the last tensor but one is asked for."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self._act = act
        self._num_asked = 0

    def resolve_data(self, write_item: WriteItem) -> Any:
        self._num_asked += 1
        if self._num_asked == _NUM_TENSORS - 1:
            self._act()
        return super().resolve_data(write_item)


def kill_workers() -> None:
    """Idle ones of other tests, too: dead for sure when the next save looks for one."""
    pids = worker_pids()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def give_up() -> None:
    raise ArithmeticError("no more")


def interrupted_save(store: Store, url: str, act: Callable[[], None]) -> BaseException:
    """Save a large state until `act`; what the rank raises."""
    writer = MPFsspecWriter(
        url, num_workers=1, per_worker_copy_ahead=_WINDOW_BYTES, **store.options
    )
    with pytest.raises(CheckpointException) as caught:
        save_with(writer, large_state(), Interrupted(act))
    return failure_of(caught.value)


def assert_only_old(store: Store, url: str, before: list[str]) -> None:
    """The old checkpoint loads, and no file but its own has the name of one of a checkpoint."""
    found = store.names(url)
    assert [name for name in found if not _is_temporary(name)] == before
    assert_holds(store, url, small_state(1))


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")


def assert_next_save_works(store: Store, url: str) -> None:
    save(store, url, small_state(3), num_workers=1)
    assert_holds(store, url, small_state(3))
    assert len([name for name in shards(store, url) if not _is_temporary(name)]) == 1
    if isinstance(store, S3Store):
        assert store.uploads(url) == []


@on(*NO_MEMORY)
def test_save_leaves_the_old_checkpoint_when_its_worker_is_killed(store: Store, url: str) -> None:
    """C01, C02; invariants 3 and 4."""
    save(store, url, small_state(1))
    before = store.names(url)
    error = interrupted_save(store, url, kill_workers)
    assert isinstance(error, WorkerDiedError) and error.signal_name == "SIGKILL"
    assert_only_old(store, url, before)
    assert_next_save_works(store, url)


def test_save_leaves_the_old_checkpoint_when_it_raises(store: Store, url: str) -> None:
    """Invariants 3 and 4; nothing at all is left."""
    save(store, url, small_state(1))
    before = store.names(url)
    error = interrupted_save(store, url, give_up)
    assert "no more" in str(error)
    assert store.names(url) == before
    assert_only_old(store, url, before)
    if isinstance(store, S3Store):
        assert store.uploads(url) == []
    assert_next_save_works(store, url)


@on(*NO_MEMORY)
def test_save_leaves_nothing_that_loads_when_the_first_one_is_killed(
    store: Store, url: str
) -> None:
    """B02."""
    interrupted_save(store, url, kill_workers)
    assert [name for name in store.names(url) if not _is_temporary(name)] == []
    assert_next_save_works(store, url)


_KILLED_TRAINER = """
import json, os, signal, sys
from mpwriter import MPFsspecWriter
from tests.conformance.test_crashes import _WINDOW_BYTES, Interrupted, large_state
from tests.saves import worker_pids
from tests.states import save_with

def end():
    print(json.dumps(worker_pids()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

url, options = sys.argv[1], json.loads(sys.argv[2])
writer = MPFsspecWriter(url, num_workers=1, per_worker_copy_ahead=_WINDOW_BYTES, **options)
save_with(writer, large_state(), Interrupted(end))
"""


@on(*NO_MEMORY)
def test_save_leaves_the_old_checkpoint_when_the_trainer_is_killed(
    store: Store, url: str, start_trainer: Callable[..., Trainer]
) -> None:
    """B10: workers that are left alone publish nothing, and are gone in time."""
    save(store, url, small_state(1))
    before = store.names(url)
    trainer = start_trainer(_KILLED_TRAINER)
    assert trainer.ended() == -signal.SIGKILL, trainer.stderr
    workers = [int(pid) for pid in trainer.stdout.strip("[]\n").split(",")]
    assert len(workers) == 1 and all_gone(workers, within_s=5.0)
    assert_only_old(store, url, before)
    assert_next_save_works(store, url)
