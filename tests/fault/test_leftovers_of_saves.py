"""The files of killed trainers go with the next save; those of a save under way stay."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from mpwriter import MPFsspecWriter
from mpwriter._compat import HAS_RANK_METADATA
from mpwriter._publish import is_temporary_name
from tests.fakes import FaultPlan
from tests.saves import assert_holds, names_in, save, small_state
from tests.trainers import Trainer, all_gone, wait_until

_TRAINER = """
import sys
from tests.saves import *
place, plan, number = sys.argv[1:]
save(place, small_state(int(number)), plan=plan)
print("saved")
"""


def temporary_in(folder: Path) -> list[str]:
    return [name for name in names_in(folder) if is_temporary_name(name)]


def held(plan: FaultPlan, name: str) -> int:
    """How many calls a `block` rule holds."""
    return len(plan.calls("flush", name, phase="begin")) - len(plan.calls("flush", name))


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(("name", "number"), [("__0_*", 2), (".metadata", 1)])
def test_next_save_removes_what_a_killed_trainer_has_left(
    start_trainer: Callable[..., Trainer],
    checkpoint_dir: Path,
    place: str,
    plan: FaultPlan,
    name: str,
    number: int,
    old: bool,
) -> None:
    """B10, B15: SIGKILL between the first byte and the name, of shards and of the metadata."""
    checkpoint_dir.mkdir()
    (checkpoint_dir / ".notes.deadbeef.tmp").write_bytes(b"the user's")
    if old:
        save(checkpoint_dir, small_state(1))
    plan.add("flush", name, block=True)
    trainer = start_trainer(_TRAINER, place, plan.folder, 2)
    wait_until(lambda: held(plan, name) == number)
    workers = trainer.workers()
    assert len(workers) == 2
    trainer.kill()
    trainer.ended()
    assert all_gone(workers, within_s=10)

    left = temporary_in(checkpoint_dir)
    assert len(left) == number + 1, "and the user's"
    assert (".metadata" in names_in(checkpoint_dir)) == old
    if old:
        assert_holds(checkpoint_dir, small_state(1))

    save(checkpoint_dir, small_state(3))
    assert temporary_in(checkpoint_dir) == [".notes.deadbeef.tmp"]
    assert_holds(checkpoint_dir, small_state(3))


class SaveInThread(threading.Thread):
    """A save beside others; `finish` waits for it and raises what it has raised."""

    def __init__(self, place: str, number: int, **options: Any) -> None:
        super().__init__(daemon=True)
        self._arguments = place, small_state(number), options
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        place, state, options = self._arguments
        try:
            save(place, state, **options)
        except BaseException as exc:
            self._error = exc

    def finish(self) -> None:
        self.join(40)
        assert not self.is_alive(), "the save hangs"
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("sync_files", [True, False])
@pytest.mark.parametrize(("name", "number"), [("__0_*", 2), ("__0_1.*", 1), (".metadata", 1)])
def test_saves_leave_each_other_s_files_when_they_overlap(
    checkpoint_dir: Path, place: str, plan: FaultPlan, name: str, number: int, sync_files: bool
) -> None:
    """B01: both end well; what was committed last is what loads."""
    save(checkpoint_dir, small_state(1))
    plan.add("flush", name, block=True)
    slow = SaveInThread(place, 2, sync_files=sync_files, **plan.options)
    try:
        wait_until(lambda: held(plan, name) == number)
        wait_until(lambda: len(temporary_in(checkpoint_dir)) == number)
        left = temporary_in(checkpoint_dir)
        for other in (3, 4):
            save(checkpoint_dir, small_state(other))
            assert_holds(checkpoint_dir, small_state(other))
            assert temporary_in(checkpoint_dir) == left
    finally:
        plan.release()
        slow.finish()
    assert_holds(checkpoint_dir, small_state(2))
    assert temporary_in(checkpoint_dir) == []


def test_saves_all_end_well_when_many_overlap(
    checkpoint_dir: Path, place: str, plan: FaultPlan
) -> None:
    """B01: each sweeps while the others write; one of them is what loads, whole."""
    plan.add("write", sleep_s=0.01)
    plan.add("mv", sleep_s=0.01)
    saves = [SaveInThread(place, number, num_workers=1, **plan.options) for number in range(4)]
    for other in saves:
        other.finish()
    swaps = [call for call in plan.calls("mv", ".metadata") if call.result == "ok"]
    assert len(swaps) == 4
    holding = [number for number in range(4) if _holds(checkpoint_dir, number)]
    assert len(holding) == 1
    assert temporary_in(checkpoint_dir) == []
    save(checkpoint_dir, small_state(9))
    assert_holds(checkpoint_dir, small_state(9))


def _holds(folder: Path, number: int) -> bool:
    try:
        assert_holds(folder, small_state(number))
    except AssertionError:
        return False
    return True


if HAS_RANK_METADATA:

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    def test_save_of_one_rank_removes_only_its_own_files(checkpoint_dir: Path) -> None:
        """Invariant 17: the other ranks end when they end."""
        checkpoint_dir.mkdir()
        own = [".__0_0.deadbeef.distcp.deadbeef.tmp", ".__0.metadata.deadbeef.tmp"]
        others = [".__1_0.deadbeef.distcp.deadbeef.tmp", ".__1.metadata.deadbeef.tmp"]
        for name in [*own, *others]:
            (checkpoint_dir / name).touch()
        writer = MPFsspecWriter(checkpoint_dir, num_workers=2)
        dcp.save(small_state(1), storage_writer=writer, no_dist=True, use_collectives=False)
        assert temporary_in(checkpoint_dir) == sorted(others)
        assert_holds(checkpoint_dir, small_state(1))


def test_two_trainers_leave_each_other_s_files_when_their_saves_overlap(
    start_trainer: Callable[..., Trainer], checkpoint_dir: Path, place: str, plan: FaultPlan
) -> None:
    """B01: locks of other processes' workers count, too."""
    plan.add("flush", "__0_*", block=True, times=2)
    slow = start_trainer(_TRAINER, place, plan.folder, 1)
    wait_until(lambda: held(plan, "__0_*") == 2)
    left = temporary_in(checkpoint_dir)
    quick = start_trainer(_TRAINER, place, plan.folder, 2)
    quick.assert_succeeded()
    assert_holds(checkpoint_dir, small_state(2))
    assert temporary_in(checkpoint_dir) == left
    assert len(left) == 2
    plan.release()
    slow.assert_succeeded()
    assert_holds(checkpoint_dir, small_state(1))
    assert temporary_in(checkpoint_dir) == []
