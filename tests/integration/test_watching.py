"""Other processes look at a checkpoint while it is written, or take its directory away."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.checkpoint.api import CheckpointException

import mpwriter
from mpwriter import MPFsspecWriter
from mpwriter.errors import StorageError, WorkerTimeoutError
from tests.fakes import FaultPlan
from tests.saves import (
    assert_holds,
    failure_in_save,
    failure_of,
    names_in,
    save,
    small_state,
    worker_pids,
)
from tests.trainers import WATCHDOG_S, Trainer, wait_until

_SAVES_SLOWLY = """
import sys
import tests.fakes
from tests.saves import *
folder, plan = sys.argv[1:]
for number in range(4):
    state = small_state(number, num_tensors=8, numel=100_000)
    save(f"fault://{folder}/{number}", state, plan=plan, single_file_per_rank=number % 2 == 0)
"""


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "plan")


def test_checkpoint_is_whole_when_its_metadata_appears(
    start_trainer: Callable[..., Trainer], plan: FaultPlan, tmp_path: Path
) -> None:
    """B01: looked at every few milliseconds by another process, which loads it at that instant."""
    for op in ("write", "flush", "mv"):
        plan.add(op, "__0_*", sleep_s=0.03)
    trainer = start_trainer(_SAVES_SLOWLY, tmp_path, plan.folder)
    seen: dict[int, dict[str, int]] = {}
    for number in range(4):
        folder = tmp_path / str(number)
        wait_until((folder / ".metadata").exists, lambda: trainer.stderr)
        sizes = {path.name: path.stat().st_size for path in folder.glob("__*")}
        assert_holds(folder, small_state(number, num_tensors=8, numel=100_000))
        assert len(sizes) == (2 if number % 2 == 0 else 9)
        seen[number] = sizes
    trainer.assert_succeeded()
    for number, sizes in seen.items():
        found = {path.name: path.stat().st_size for path in (tmp_path / str(number)).glob("__*")}
        assert found == sizes


def test_save_leaves_its_own_files_only_when_it_has_fewer_than_the_one_before(
    checkpoint_dir: Path,
) -> None:
    """B06: four workers, then one and a smaller model; one file per tensor, then one in all."""
    save(checkpoint_dir, small_state(1, num_tensors=9, numel=50_000), num_workers=4)
    assert len(names_in(checkpoint_dir)) == 5
    save(checkpoint_dir, small_state(2), num_workers=1)
    assert len(names_in(checkpoint_dir)) == 2
    assert_holds(checkpoint_dir, small_state(2))
    save(checkpoint_dir, small_state(3, num_tensors=9), single_file_per_rank=False)
    assert len(names_in(checkpoint_dir)) == 11
    save(checkpoint_dir, {}, num_workers=4)
    assert names_in(checkpoint_dir) == [".metadata"]
    save(checkpoint_dir, small_state(4), num_workers=1)
    assert len(names_in(checkpoint_dir)) == 2
    assert_holds(checkpoint_dir, small_state(4))


# -- the directory goes -------------------------------------------------------------------------


@pytest.mark.parametrize("auto_mkdir", [False, True])
@pytest.mark.parametrize("op", ["open", "write", "mv"])
def test_save_raises_when_the_directory_is_removed_in_a_worker_s_call(
    op: str, auto_mkdir: bool, checkpoint_dir: Path, plan: FaultPlan
) -> None:
    """B07: really removed, with the files in it; also where fsspec would make it again."""
    plan.add(op, "__0_1.*", block=True)
    errors: list[BaseException] = []
    options: dict[str, Any] = {**plan.options, "auto_mkdir": auto_mkdir}

    def run() -> None:
        errors.append(failure_in_save(f"fault://{checkpoint_dir}", small_state(1), **options))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: plan.calls(op, "__0_1.*", phase="begin") and plan.calls("mv", "__0_0.*"))
        shutil.rmtree(checkpoint_dir)
    finally:
        plan.release()
        thread.join(WATCHDOG_S)
    (error,) = errors
    assert isinstance(error, StorageError) and error.errno == errno.ENOENT
    assert str(checkpoint_dir) in str(error)
    assert names_in(checkpoint_dir) == []
    plan.clear()
    save(f"fault://{checkpoint_dir}", small_state(2), **options)
    assert_holds(checkpoint_dir, small_state(2))


@pytest.mark.parametrize("what", ["directory", "one shard"])
@pytest.mark.parametrize("auto_mkdir", [False, True])
def test_save_raises_when_its_shards_are_removed_before_the_commit(
    auto_mkdir: bool, what: str, checkpoint_dir: Path
) -> None:
    """B07: a checkpoint that cannot be loaded is none, and is not said to be one."""

    def remove(event: Any) -> None:
        if event.name == "shards_written":
            if what == "directory":
                shutil.rmtree(checkpoint_dir)
            else:
                next(checkpoint_dir.glob("__0_1.*")).unlink()

    error = failure_in_save(
        checkpoint_dir, small_state(1), event_handler=remove, auto_mkdir=auto_mkdir
    )
    assert isinstance(error, StorageError) and error.errno == errno.ENOENT
    assert str(checkpoint_dir) in str(error)
    assert names_in(checkpoint_dir) == []
    save(checkpoint_dir, small_state(2))
    assert_holds(checkpoint_dir, small_state(2))


# -- the user goes ------------------------------------------------------------------------------


def test_close_and_shutdown_return_when_a_save_is_stuck(
    checkpoint_dir: Path, plan: FaultPlan
) -> None:
    """C19: at once and within their timeout; the save itself ends by `timeout_s`."""
    mpwriter.shutdown()
    plan.add("write", "__0_*", block=True)
    writer = MPFsspecWriter(
        f"fault://{checkpoint_dir}", num_workers=2, timeout_s=1.0, **plan.options
    )
    errors: list[BaseException] = []

    def run() -> None:
        try:
            save_with(writer)
        except CheckpointException as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: len(plan.calls("write", phase="begin")) == 2)
        stuck = worker_pids()
        begin_s = time.monotonic()
        writer.close()
        mpwriter.shutdown(timeout_s=0.2)
        assert time.monotonic() - begin_s < 30, "they wait for nothing"
        thread.join(WATCHDOG_S)
        assert not thread.is_alive()
    finally:
        plan.release()
        thread.join(WATCHDOG_S)
    assert isinstance(failure_of(errors[0]), WorkerTimeoutError)
    assert not [pid for pid in stuck if psutil.pid_exists(pid)]
    assert names_in(checkpoint_dir) == []


def save_with(writer: MPFsspecWriter) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(small_state(1), storage_writer=writer, no_dist=True)
