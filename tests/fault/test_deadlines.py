"""What is slow but gets on is waited for; what does not get on is given up, however often tried."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from mpwriter import _feed, _worker
from mpwriter._types import Ack, Progress
from mpwriter.errors import StorageError, WorkerTimeoutError
from tests.asyncs import async_save, settled
from tests.fakes import FaultPlan
from tests.saves import assert_holds, failure_in_save, failure_of, names_in, save
from tests.unit.test_worker import Setup, put_of, setup, start_of

__all__ = ["setup"]

# Of at least this size a payload is a write call of its own, below it many make one.
_OWN_WRITE_BYTES = 256 << 10

# Of the staged ones, all in one message: nothing is acknowledged before the last is written.
_NUM_WRITES = 8

# Longer than a write and than the time between two words of a worker; much shorter than all.
_TIMEOUT_S = 1.5
_WRITE_S = 0.35


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_feed, "_RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(_feed, "_MAX_RETRY_PAUSE_S", 0.05)
    monkeypatch.setattr(_feed, "_ABORT_GRACE_S", 0.2)


# -- silence ------------------------------------------------------------------------------------


def state_of_large(number: float) -> dict[str, Any]:
    numel = _OWN_WRITE_BYTES // 4 + 1000
    return {f"w{n}": torch.full((numel,), number + n) for n in range(_NUM_WRITES)}


def test_save_waits_when_one_message_takes_longer_than_the_timeout(
    checkpoint_dir: Path, place: str, plan: FaultPlan
) -> None:
    """Issue 4, timeouts: each write is quick enough, and the worker says that it gets on."""
    plan.add("write", "__0_*", sleep_s=_WRITE_S)
    state = state_of_large(1.0)
    future = async_save(state, place, num_workers=1, timeout_s=_TIMEOUT_S, **plan.options)
    assert settled(future) is None
    writes = plan.calls("write", "__0_*")
    assert len(writes) > _NUM_WRITES and writes[-1].at_s - writes[0].at_s > _TIMEOUT_S
    assert len({call.path for call in writes}) == 1, "the file was written once"
    assert_holds(checkpoint_dir, state)


def test_save_gives_a_worker_up_when_it_gets_stuck_after_it_got_on(
    checkpoint_dir: Path, place: str, plan: FaultPlan
) -> None:
    """The other side: what was said before does not count for ever."""
    plan.add("write", "__0_*", nth=6, block=True)
    plan.add("write", "__0_*", sleep_s=_WRITE_S)
    future = async_save(
        state_of_large(1.0), place, num_workers=1, timeout_s=_TIMEOUT_S, **plan.options
    )
    error = settled(future)
    assert error is not None
    stuck = failure_of(error)
    assert isinstance(stuck, WorkerTimeoutError)
    assert stuck.pid is not None and not psutil.pid_exists(stuck.pid)
    assert len(plan.calls("write", "__0_*", phase="begin")) == 6
    assert names_in(checkpoint_dir) == []


def test_worker_tells_of_every_write_when_they_are_far_between(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the messages of a job, under its number; not where a message is quick."""
    small = 1024
    monkeypatch.setattr("mpwriter._job._GATHER_BYTES", small)
    setup.send(start_of(1, tmp_path / "file"))
    assert setup.send(put_of(1, 0)) == [Ack(1, 0)]
    monkeypatch.setattr(_worker, "_PROGRESS_S", -1.0)
    *told, last = setup.send(put_of(1, 1))
    assert last == Ack(1, 1) and told and set(told) == {Progress(1)}


# -- tries --------------------------------------------------------------------------------------

# Bytes of the file between the points at which tries fail: more than one gathered write.
_STEP_BYTES = 320_000
_NUM_STEPS = 5


def state_of_small(number: float) -> dict[str, Any]:
    """One file of 2 MB; acknowledged every 32 KiB, written every 256 KiB."""
    return {f"w{n}": torch.full((32_000,), number + n) for n in range(16)}


def _options(plan: FaultPlan, **more: Any) -> dict[str, Any]:
    return {"num_workers": 1, "per_worker_copy_ahead": 256 << 10, **plan.options, **more}


def test_save_is_completed_when_every_try_gets_further(
    checkpoint_dir: Path, place: str, plan: FaultPlan
) -> None:
    """Issue 4, retries: together they take much longer than the deadline, which each puts off."""
    for step in range(_NUM_STEPS):
        plan.add("write", "__0_*", after_bytes=step * _STEP_BYTES, times=1, errno=errno.ECONNRESET)
    plan.add("open", "__0_*", sleep_s=0.4)
    save(place, state_of_small(1.0), **_options(plan, retries=_NUM_STEPS, timeout_s=1.0))
    opens = plan.calls("open", "__0_*")
    assert len(opens) == _NUM_STEPS + 1
    assert opens[-1].at_s - opens[0].at_s > 1.5
    assert_holds(checkpoint_dir, state_of_small(1.0))
    assert len(names_in(checkpoint_dir)) == 2


def test_save_tries_again_when_the_first_try_was_longer_than_the_deadline(
    checkpoint_dir: Path, place: str, plan: FaultPlan
) -> None:
    """It got on until the end: the deadline counts from there."""
    plan.add("write", "__0_*", after_bytes=5 * _STEP_BYTES, times=1, errno=errno.ETIMEDOUT)
    plan.add("write", "__0_*", times=6, sleep_s=0.3)
    save(place, state_of_small(2.0), **_options(plan, retries=1, timeout_s=1.0))
    opens = plan.calls("open", "__0_*")
    assert len(opens) == 2 and opens[1].at_s - opens[0].at_s > 1.0
    assert_holds(checkpoint_dir, state_of_small(2.0))


_AT_ONE_POINT: dict[str, dict[str, Any]] = {
    "open": {"op": "open", "name": "__0_*"},
    "write": {"op": "write", "name": "__0_*", "after_bytes": _STEP_BYTES},
    "rename": {"op": "mv", "name": "__0_*"},
    "metadata": {"op": "flush", "name": ".metadata"},
}


@pytest.mark.parametrize("in_trainer", [False, True])
@pytest.mark.parametrize("rule", _AT_ONE_POINT.values(), ids=_AT_ONE_POINT)
def test_save_fails_when_no_try_gets_further_within_the_timeout(
    rule: dict[str, Any],
    in_trainer: bool,
    checkpoint_dir: Path,
    place: str,
    plan: FaultPlan,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Issue 4, retries: 10,000 are allowed, which would take minutes; the trainer gives up as well.

    The checkpoint before is as it was.
    """
    if in_trainer:
        monkeypatch.setattr("mpwriter._save.refusal", lambda fs: "this test says so")
    save(place, state_of_small(1.0), **_options(plan))
    before = names_in(checkpoint_dir)
    num_before = len(plan.calls("open", rule["name"]))
    plan.add(**rule, errno=errno.ETIMEDOUT)
    error = failure_in_save(
        place, state_of_small(2.0), **_options(plan, retries=10_000, timeout_s=0.5)
    )
    assert isinstance(error, StorageError) and error.errno == errno.ETIMEDOUT
    assert 2 <= len(plan.calls("open", rule["name"])) - num_before < 200
    assert names_in(checkpoint_dir) == before
    plan.clear()
    assert_holds(checkpoint_dir, state_of_small(1.0))
