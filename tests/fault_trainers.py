"""The fault table's last place: the trainer itself dies while a save is at a given point.

Its workers (or the coordinator's one, at the swap) block there, so that the moment is exact.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests import counts, fault_table
from tests.fault_checks import (
    FAULT_TABLE,
    Before,
    assert_lasted,
    assert_quick,
    count_leaks,
)
from tests.fault_table import NUM_WORKERS, POINTS, Point
from tests.saves import State, assert_holds, names_in
from tests.trainers import Trainer, all_gone, wait_until

__all__ = [
    "TrainerCase",
    "assert_ends_with_error",
    "cases",
    "die_when_told",
    "end",
    "join_group",
    "judge",
]

# How it dies, and its exit code then.
ENDS = {"SIGKILL": -signal.SIGKILL, "os._exit": 3}

# The bound of the design for its workers, however it died.
_WORKERS_GONE_WITHIN_S = 5.0

# Longer than any watchdog: what ends a survivor is the loss of its peer.
_GROUP_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class TrainerCase:
    """One cell.

    Attributes:
        rank: that dies, of two; None where there is a single trainer.
    """

    point_name: str
    cause_name: str
    rank: int | None
    with_old: bool

    def __str__(self) -> str:
        who = "trainer" if self.rank is None else f"rank {self.rank}"
        old = "over an old one" if self.with_old else "first"
        return "-".join((self.point_name, self.cause_name, who, old))

    @property
    def point(self) -> Point:
        return POINTS[self.point_name]

    @property
    def commits(self) -> bool:
        """Whether the new checkpoint is what loads afterwards.

        At the swap a rank that only waits for it is not needed any more.
        """
        return self.point.is_swap and (self.point.published or self.rank == 1)

    @property
    def num_blocked(self) -> int:
        return 1 if self.point.is_swap or self.rank is not None else NUM_WORKERS

    @property
    def rule(self) -> dict[str, Any]:
        """For FaultPlan.add."""
        name = f"__{self.rank or 0}_*"
        if self.point.is_swap:
            name = ".metadata"
        return {**self.point.rule, "name": name, "block": True}


def cases(points: Sequence[str], *ranks: int | None) -> list[TrainerCase]:
    """Every way to die at these points, by turns over an old checkpoint and without one."""
    found = []
    turn = int(os.environ.get(fault_table.ROUND_VARIABLE, "0"))
    for row, point_name in enumerate(points):
        for column, cause_name in enumerate(ENDS):
            for rank in ranks:
                with_old = (turn + row + column + (rank or 0)) % 2 == 0
                found.append(TrainerCase(point_name, cause_name, rank, with_old))
    return found


# -- in the trainer -----------------------------------------------------------------------------


def die_when_told(order: str) -> None:
    """Wait, in a thread, for a file of this name, and leave as a crashing library would."""

    def wait() -> None:
        wait_until(Path(order).exists)
        os._exit(ENDS["os._exit"])

    threading.Thread(target=wait, daemon=True).start()


def join_group(rank: int, rendezvous: str) -> None:
    """Be one of two."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=_GROUP_TIMEOUT_S),
    )
    dist.barrier()


# -- in the test --------------------------------------------------------------------------------


def end(case: TrainerCase, trainer: Trainer, order: Path) -> None:
    """Let it die as the case says; afterwards nothing of it runs."""
    workers = trainer.workers()
    assert len(workers) == (NUM_WORKERS if case.rank is None else 1)
    counts.add(FAULT_TABLE, faults=1)
    if case.cause_name == "SIGKILL":
        trainer.kill()
    else:
        order.touch()
    assert trainer.ended() == ENDS[case.cause_name]
    assert "saved" not in trainer.stdout
    _assert_gone(workers)


def assert_ends_with_error(survivor: Trainer, workers: list[int]) -> None:
    """The other rank hears of it, and takes its workers with it."""
    begin_s = time.monotonic()
    code = survivor.ended()
    assert_quick(time.monotonic() - begin_s)
    # gloo may abort the process behind its traceback, when a peer is gone and its threads are not.
    aborted = code == -signal.SIGABRT and "terminate called without" in survivor.stderr
    assert code == 1 or aborted, survivor.stdout + survivor.stderr
    assert "saved" not in survivor.stdout
    assert "Error" in survivor.stderr or "Exception" in survivor.stderr
    _assert_gone(workers)


def _assert_gone(workers: list[int]) -> None:
    if not all_gone(workers, within_s=_WORKERS_GONE_WITHIN_S):
        count_leaks([f"one of the processes {workers}"])


def judge(case: TrainerCase, folder: Path, before: Before, *, old: State, new: State) -> None:
    """What is left in the directory is one of two checkpoints, and what no load looks at."""
    if case.commits:
        assert (folder / ".metadata").read_bytes() != before.metadata
        assert_holds(folder, new)
    else:
        assert_lasted(folder, before, old)
    # What the workers were at when they ended with their trainer.
    temporary = [name for name in names_in(folder) if name.endswith(".tmp")]
    finished = case.commits or case.point.published or case.point_name == "before open"
    assert bool(temporary) == (not finished)
