"""The fault table: where a save can be hit, by what, in which process, and what must come of it.

    point              the call that is hit                    what loads after the error
    ----------------   -------------------------------------   --------------------------
    before open        open of a shard's temporary file        the old checkpoint, or none
    mid-write          a later write of it                     the same
    before publish     its rename                              the same
    before the reply   after its rename, before JobDone        the same
    before the swap    rename of `.metadata`                   the same
    after the swap     the same, carried out                   the new checkpoint, complete

Every cause is tried at every point where it means something, in every place. By turns there is an
old checkpoint in the directory and none; `FAULT_ROUND=1` in the environment swaps the turns.

`tests/fault_checks.py` runs and judges the cases.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from errno import EIO, ENOSPC
from typing import Any

from tests.saves import State, small_state

__all__ = [
    "CAUSES",
    "COORDINATOR",
    "NUM_WORKERS",
    "POINTS",
    "RANKS",
    "ROUND_VARIABLE",
    "WORKERS",
    "Case",
    "Cause",
    "Point",
    "cases",
    "state_of",
    "state_of_rank",
    "state_of_ranks",
]

NUM_WORKERS = 3  # of the single process: one between the first and the last

TIMEOUT_S = 1.0  # where a call blocks for ever

ROUND_VARIABLE = "FAULT_ROUND"

_TEXT = "the store is on strike"
_EXCEPTIONS = "tests.fakes.exceptions"


@dataclass(frozen=True)
class Point:
    """One row of the table above.

    Attributes:
        rule: the call, as FaultPlan.add takes it.
        write_rule: the write that a cause hits which only a write can have; None: there is none.
        is_swap: of `.metadata`, which the coordinator alone writes.
        published: whether the file has its final name by then.
    """

    rule: Mapping[str, Any]
    write_rule: Mapping[str, Any] | None = None
    is_swap: bool = False
    published: bool = False

    @property
    def commits(self) -> bool:
        """Whether the new checkpoint is what loads afterwards."""
        return self.is_swap and self.published


POINTS = {
    "before open": Point({"op": "open"}),
    "mid-write": Point({"op": "write", "nth": 2}, write_rule={"op": "write", "nth": 2}),
    "before publish": Point({"op": "mv"}),
    "before the reply": Point({"op": "mv", "after": True}, published=True),
    "before the swap": Point({"op": "mv"}, write_rule={"op": "write", "nth": 1}, is_swap=True),
    "after the swap": Point({"op": "mv", "after": True}, is_swap=True, published=True),
}


@dataclass(frozen=True)
class Cause:
    """What happens there, and what the trainer has to raise.

    Attributes:
        action: of FaultPlan.
        kinds: classes that the error must have.
        fields: of it; `text` is a part of its message.
        heals: the save succeeds instead.
        deadly: the worker is gone afterwards.
        of_writes: means something where bytes are written only.
        options: of the writer.
    """

    action: Mapping[str, Any]
    kinds: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    heals: bool = False
    deadly: bool = False
    of_writes: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def _dies(text: str, *, code: int, signal_name: str | None = None, **action: Any) -> Cause:
    return Cause(
        action,
        kinds=("WorkerDiedError",),
        fields={"exit_code": code, "signal_name": signal_name},
        text=text,
        deadly=True,
    )


def _killed(number: signal.Signals) -> Cause:
    return _dies(number.name, code=-number, signal_name=number.name, signal=int(number))


def _raises(name: str, text: str = _TEXT) -> Cause:
    return Cause(
        {"raises": name, "text": text},
        kinds=("StorageError", "OSError"),
        fields={"errno": EIO, "original_type": name},
        text=text,
    )


def _fails(number: int) -> Cause:
    return Cause(
        {"errno": number},
        kinds=("StorageError", "OSError"),
        fields={"errno": number, "original_type": "OSError"},
        text=os.strerror(number),
    )


CAUSES = {
    "SIGKILL": _killed(signal.SIGKILL),
    "SIGSEGV": _killed(signal.SIGSEGV),
    "os._exit": _dies("exit code 3", code=3, exit_code=3),
    "exception": _raises("RuntimeError"),
    "unpicklable exception": _raises(f"{_EXCEPTIONS}.Unpicklable"),
    "un-unpicklable exception": _raises(f"{_EXCEPTIONS}.Ununpicklable"),
    "50 MB message": _raises(f"{_EXCEPTIONS}.Huge"),
    "ENOSPC": _fails(ENOSPC),
    "EIO": _fails(EIO),
    "short write": Cause({"short": 100}, heals=True, of_writes=True),
    "lying write": Cause(
        {"lie": 100},
        kinds=("StorageError", "OSError"),
        fields={"errno": EIO, "original_type": "OSError"},
        text="bytes were written, the file has",
        of_writes=True,
    ),
    "blocked": Cause(
        {"block": True},
        kinds=("WorkerTimeoutError", "TimeoutError"),
        fields={"timeout_s": TIMEOUT_S},
        text="made no progress for 1 s",
        deadly=True,
        # An fsync of this machine's disk may take as long under load: it is not what blocks here.
        options={"timeout_s": TIMEOUT_S, "sync_files": False},
    ),
}

# Which files: those of which workers. One worker writes one shard, in the order of their numbers.
WORKERS = {
    "worker 0": "__0_0.*",
    "last worker": f"__0_{NUM_WORKERS - 1}.*",
    "all workers": "__0_*",
}
RANKS = {"rank 0": "__0_*", "rank 1": "__1_*"}  # of two, each with one worker
COORDINATOR = {"coordinator": ".metadata"}


@dataclass(frozen=True)
class Case:
    """One cell of the table.

    Attributes:
        with_old: whether there is a checkpoint in the directory.
    """

    point_name: str
    cause_name: str
    place: str
    with_old: bool

    def __str__(self) -> str:
        old = "over an old one" if self.with_old else "first"
        return "-".join((self.point_name, self.cause_name, self.place, old))

    @property
    def point(self) -> Point:
        return POINTS[self.point_name]

    @property
    def cause(self) -> Cause:
        return CAUSES[self.cause_name]

    @property
    def num_faults(self) -> int:
        """How many processes are hit."""
        return NUM_WORKERS if self.place == "all workers" else 1

    @property
    def failing_rank(self) -> int:
        return 1 if self.place == "rank 1" else 0

    @property
    def others(self) -> str:
        """Of the names of shards that may be left: of the rank that was not hit.

        They are complete, and no metadata names them. DCP tells that rank nothing by which it could
        know what has become of the checkpoint.
        """
        in_group = self.place in RANKS
        return f"__{1 - self.failing_rank}_0.*.distcp" if in_group else ""

    @property
    def pattern(self) -> str:
        """Of the names of the files that are hit."""
        return {**WORKERS, **RANKS, **COORDINATOR}[self.place]

    @property
    def rule(self) -> dict[str, Any]:
        """For FaultPlan.add."""
        call = self.point.write_rule if self.cause.of_writes else self.point.rule
        assert call is not None
        return {
            "name": self.pattern,
            "together": self.num_faults,
            **call,
            **self.cause.action,
        }


def cases(places: Mapping[str, str]) -> list[Case]:
    """Every cell for these places of shards, and for the coordinator's `.metadata`."""
    found = []
    turn = int(os.environ.get(ROUND_VARIABLE, "0"))
    for row, (point_name, point) in enumerate(POINTS.items()):
        for column, (cause_name, cause) in enumerate(CAUSES.items()):
            if cause.of_writes and point.write_rule is None:
                continue  # no bytes are written there
            for number, place in enumerate(COORDINATOR if point.is_swap else places):
                with_old = (turn + row + column + number) % 2 == 0
                found.append(Case(point_name, cause_name, place, with_old))
    return found


# -- states -------------------------------------------------------------------------------------


def state_of(number: int) -> State:
    """Of a single process: each worker's file takes several writes."""
    return small_state(number, num_tensors=3 * NUM_WORKERS, numel=100_000)


def state_of_rank(number: int, rank: int) -> State:
    """What one rank of two holds, in several writes."""
    tensors = small_state(number, num_tensors=3, numel=100_000)
    return {f"rank{rank}.{key}": value for key, value in tensors.items()}


def state_of_ranks(number: int) -> State:
    """What both hold."""
    return {**state_of_rank(number, 0), **state_of_rank(number, 1)}
