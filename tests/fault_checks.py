"""Runs cells of the fault table and judges what came of them.

    attempt = attempt_to(save, ...)          in the process that saves; tells in plain values
    judge(case, plan, answers, ...)         in the test's process: counts, then asserts

The counts are those of `tests.counts` under FAULT_TABLE. Whatever is counted fails the test, too.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from torch.distributed.checkpoint.api import CheckpointException

from mpwriter import _feed
from mpwriter._arena import get_arena
from mpwriter._faults import stale_shard_names
from tests import counts, leaks
from tests.fakes import FaultPlan
from tests.fault_table import Case
from tests.saves import State, assert_holds, names_in, worker_pids

__all__ = [
    "ENDS_WITHIN_S",
    "FAULT_TABLE",
    "Attempt",
    "Before",
    "Told",
    "assert_gone",
    "assert_lasted",
    "assert_next_save_works",
    "assert_quick",
    "attempt_to",
    "count_leaks",
    "judge",
]

FAULT_TABLE = "fault table"

# A generous watchdog: what takes longer is a hang.
ENDS_WITHIN_S = 30.0

# More than any text that is handed on; the message of 50 MB is not.
_MOST_TEXT_CHARS = 100_000


class Told(NamedTuple):
    """An error in values that any process can be sent."""

    kinds: tuple[str, ...]
    fields: dict[str, Any]
    text: str


class Attempt(NamedTuple):
    """What came of a save.

    Attributes:
        errors: by failed rank; None where the save returned.
        text: what the user sees of it.
        leaks: what is left in this process while the error is still held.
        workers: process ids of the workers afterwards.
    """

    errors: dict[int, Told] | None
    text: str
    took_s: float
    leaks: list[str]
    workers: list[int]


class Before(NamedTuple):
    """The directory before a save."""

    names: list[str]
    metadata: bytes | None

    @classmethod
    def of(cls, folder: Path) -> Before:
        path = folder / ".metadata"
        return cls(names_in(folder), path.read_bytes() if path.exists() else None)


# -- in the process that saves ------------------------------------------------------------------


def attempt_to(save: Callable[..., Any], *args: Any, **kwargs: Any) -> Attempt:
    """Save, and look what is left of it in this process."""
    before = leaks.snapshot()
    begin_s = time.monotonic()
    try:
        with _short_grace("timeout_s" in kwargs):
            save(*args, **kwargs)
    except (CheckpointException, Exception) as error:
        took_s = time.monotonic() - begin_s
        errors = {rank: failure[0] for rank, failure in getattr(error, "failures", {}).items()}
        told = {rank: _told(failure) for rank, failure in errors.items()}
        return Attempt(told, str(error), took_s, _left_here(before), worker_pids())
    took_s = time.monotonic() - begin_s
    return Attempt(None, "", took_s, _left_here(before), worker_pids())


@contextlib.contextmanager
def _short_grace(short: bool) -> Iterator[None]:
    """A worker that is stuck in a call does not answer; no need to wait long for it to."""
    usual = _feed._ABORT_GRACE_S
    try:
        if short:
            _feed._ABORT_GRACE_S = 0.3
        yield
    finally:
        _feed._ABORT_GRACE_S = usual


def _told(error: BaseException) -> Told:
    kinds = tuple(cls.__name__ for cls in type(error).__mro__)
    fields = {name: getattr(error, name) for name in getattr(error, "_fields", ())}
    return Told(kinds, fields, str(error))


def _left_here(before: set[leaks.Resource]) -> list[str]:
    """Leases, processes, descriptors, threads and shared memory."""
    found = leaks.left_behind(before)
    stats = get_arena().stats()
    if stats.num_leases:
        found.append(f"{stats.num_leases} leases of {stats.leased_bytes} bytes")
    memfds = [target for target in _open_files("self") if target.startswith("/memfd:")]
    if len(memfds) > 2 * stats.num_segments:  # the arena's own, and that of torch's storage
        found.append(f"{len(memfds)} memfds for {stats.num_segments} segments")
    for pid in worker_pids():
        found += [
            f"worker {pid} holds {target}"
            for target in _open_files(pid)
            if ".distcp" in target or ".metadata" in target
        ]
    return found


def _open_files(pid: int | str) -> list[str]:
    folder, found = Path(f"/proc/{pid}/fd"), []
    for number in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(folder / number))
    return found


# -- the test's side ----------------------------------------------------------------------------


def count_leaks(found: list[str]) -> None:
    """Nothing may be found."""
    if found:
        counts.add(FAULT_TABLE, leaks=len(found))
        raise AssertionError("left behind:\n  " + "\n  ".join(found))


def assert_quick(took_s: float) -> None:
    """A watchdog, not a measurement."""
    if took_s > ENDS_WITHIN_S:
        counts.add(FAULT_TABLE, hangs=1)
        raise AssertionError(f"took {took_s:.1f} s")


def assert_gone(pids: list[int]) -> None:
    """These processes have ended, and somebody has reaped them."""
    count_leaks([f"process {pid}" for pid in pids if psutil.pid_exists(pid)])


def assert_nothing_lost(folder: Path, state: State) -> None:
    """A save has returned: its checkpoint holds everything."""
    try:
        assert_holds(folder, state)
    except BaseException:
        counts.add(FAULT_TABLE, silent_losses=1)
        raise


def judge(
    case: Case,
    plan: FaultPlan,
    answers: Sequence[tuple[list[int], Attempt]],
    folder: Path,
    before: Before,
    *,
    old: State,
    new: State,
) -> None:
    """The save that was hit has ended as the table says.

    Args:
        answers: by rank, the workers beforehand and what came of the save.
        old, new: what the old checkpoint and this save's hold.
    """
    counts.add(FAULT_TABLE, faults=plan.num_acts())
    for _, attempt in answers:
        assert_quick(attempt.took_s)
    assert plan.num_acts() == case.num_faults
    for rank, (workers, attempt) in enumerate(answers):
        if attempt.errors is None:
            assert_nothing_lost(folder, new)
            assert case.cause.heals, "the save has returned as if nothing had happened"
        else:
            assert not case.cause.heals, attempt.text
            assert list(attempt.errors) == [case.failing_rank]
            _judge_error(case, attempt.errors[case.failing_rank], attempt, folder)
        count_leaks(attempt.leaks)
        if rank != case.failing_rank or not case.cause.deadly:
            assert attempt.workers == workers, "an error is no reason to start new workers"
    if case.cause.heals or case.point.commits:
        _assert_committed(folder, before, new)
    else:
        assert_kept(folder, before, old, others=case.others)


def _judge_error(case: Case, told: Told, attempt: Attempt, folder: Path) -> None:
    cause = case.cause
    assert set(cause.kinds) <= set(told.kinds), told
    assert {name: told.fields[name] for name in cause.fields} == cause.fields, told
    # Which file, on the user's screen too; which worker.
    path = Path(told.fields["path"])
    assert path.parent == folder
    assert fnmatch.fnmatchcase(path.name, case.pattern)
    assert isinstance(told.fields["worker"], int)
    for part in (cause.text, str(path), f"worker {told.fields['worker']}"):
        assert part in told.text and part in attempt.text
    assert len(attempt.text) < _MOST_TEXT_CHARS
    if "worker_traceback" in told.fields:
        # Where in the worker, also where the message is longer than all the rest.
        assert "Traceback" in told.fields["worker_traceback"]
        assert "in publish" in told.text or "in _open" in told.text or "in write" in told.text
    if cause.deadly:
        assert str(told.fields["pid"]) in told.text
        assert_gone([told.fields["pid"]])


def _assert_committed(folder: Path, before: Before, new: State) -> None:
    """The new checkpoint is there, complete, and nothing else that is new."""
    metadata = (folder / ".metadata").read_bytes()
    assert metadata != before.metadata
    assert _new_names(folder, before) == {".metadata", *stale_shard_names(metadata)}
    assert_holds(folder, new)


def assert_lasted(folder: Path, before: Before, old: State) -> None:
    """The checkpoint that was there, or none, is what a load finds."""
    assert Before.of(folder).metadata == before.metadata
    assert set(before.names) <= set(names_in(folder))
    if before.metadata is not None:
        assert_holds(folder, old)


def assert_kept(folder: Path, before: Before, old: State, *, others: str = "") -> None:
    """The directory is as it was before the save, apart from `others`."""
    left = {name for name in _new_names(folder, before) if not fnmatch.fnmatchcase(name, others)}
    count_leaks([f"file {name}" for name in sorted(left)])
    assert_lasted(folder, before, old)


def _new_names(folder: Path, before: Before) -> set[str]:
    """Names that have come since; `.metadata` where its content has."""
    new = set(names_in(folder)) - set(before.names)
    changed = Before.of(folder).metadata not in (None, before.metadata)
    return new | {".metadata"} if changed else new - {".metadata"}


def assert_next_save_works(attempt: Attempt, folder: Path, new: State, num_workers: int) -> None:
    """With the workers that are left and new ones for those that have gone."""
    assert attempt.errors is None, attempt.text
    assert_quick(attempt.took_s)
    assert_nothing_lost(folder, new)
    count_leaks(attempt.leaks)
    count_leaks([f"file {name}" for name in names_in(folder) if name.endswith(".tmp")])
    assert len(attempt.workers) == num_workers
    metadata = (folder / ".metadata").read_bytes()
    assert stale_shard_names(metadata) <= set(names_in(folder))
