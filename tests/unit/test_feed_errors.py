"""What a save leaves when a worker, a file or a value fails: nothing but the first error."""

from __future__ import annotations

import errno
import itertools
import logging
import select
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from mpwriter import MPFsspecWriter, _feed
from mpwriter._types import (
    AbortJob,
    Ack,
    EndJob,
    ErrorRecord,
    JobDone,
    JobFailed,
    Message,
    StartJob,
)
from mpwriter._worker import ABORTED
from mpwriter.errors import (
    StagingError,
    StorageError,
    WorkerDiedError,
    WorkerTimeoutError,
)
from tests.fakes import FaultPlan
from tests.inline_workers import FakePool, InlineWorker, fake_pool
from tests.saves import assert_holds, failure_in_save, failure_of, names_in, save, small_state


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePool]:
    with fake_pool(monkeypatch) as fake:
        yield fake


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "plan")


def fail_file_one(plan: FaultPlan) -> None:
    """A permanent error when file 1 gets its name."""
    plan.add("mv", "__0_1.*", errno=errno.ENOSPC)


def test_feed_gives_workers_back_when_they_have_answered_the_abort(
    pool: FakePool, plan: FaultPlan, checkpoint_dir: Path
) -> None:
    """C02: usable, after they have let go of their files."""
    fail_file_one(plan)
    failure = failure_in_save(f"fault://{checkpoint_dir}", small_state(1), **plan.options)
    assert isinstance(failure, StorageError) and failure.errno == errno.ENOSPC
    assert failure.worker in (0, 1) and failure.worker_traceback
    assert names_in(checkpoint_dir) == []
    assert sorted(pool.given_back) == [(0, True), (1, True)]


def test_feed_kills_a_worker_when_it_does_not_answer_the_abort(
    pool: FakePool, plan: FaultPlan, checkpoint_dir: Path
) -> None:
    def mute(worker: InlineWorker, message: Message) -> None:
        if isinstance(message, (StartJob, EndJob)):
            worker.serve(message)
            worker.replies.clear()

    fail_file_one(plan)
    pool.script = [mute, InlineWorker.serve]
    failure = failure_in_save(f"fault://{checkpoint_dir}", small_state(1), **plan.options)
    assert isinstance(failure, StorageError)
    assert (0, False) in pool.given_back and (1, True) in pool.given_back
    # It had published its file all the same, without a word.
    assert names_in(checkpoint_dir) == []


def test_feed_removes_a_file_when_its_worker_was_done_just_before_the_abort(
    pool: FakePool, plan: FaultPlan, checkpoint_dir: Path
) -> None:
    def late(worker: InlineWorker, message: Message) -> None:
        # What it has to say of its file comes together with the answer to the abort.
        kept, worker.replies[:] = worker.replies[:], []
        worker.serve(message)
        said = worker.replies[:]
        worker.replies[:] = kept
        held = worker.__dict__.setdefault("held", [])
        held += said
        if isinstance(message, AbortJob):
            worker.replies += held

    fail_file_one(plan)
    pool.script = [late, InlineWorker.serve]
    failure_in_save(f"fault://{checkpoint_dir}", small_state(1), **plan.options)
    said = [type(message) for message in vars(pool.made[0])["held"]]
    assert JobDone in said and said.index(JobDone) < len(said) - 1
    assert names_in(checkpoint_dir) == []
    assert (0, True) in pool.given_back


def test_feed_raises_the_first_error_when_cleaning_up_fails_too(
    pool: FakePool, plan: FaultPlan, checkpoint_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Invariant 5."""
    fail_file_one(plan)
    plan.add("rm", "*", errno=errno.EACCES)
    with caplog.at_level(logging.WARNING):
        failure = failure_in_save(f"fault://{checkpoint_dir}", small_state(1), **plan.options)
    assert isinstance(failure, StorageError) and failure.errno == errno.ENOSPC
    assert not (checkpoint_dir / ".metadata").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, MemoryError])
def test_feed_leaves_nothing_when_a_value_cannot_be_resolved(
    error: type[BaseException], pool: FakePool, checkpoint_dir: Path
) -> None:
    """C24: also when the user gives up meanwhile; the workers stay."""

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if write_item.index.fqn == "layer2.weight":
                raise error("not now")
            return super().resolve_data(write_item)

    with pytest.raises(BaseException) as caught, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            small_state(1),
            storage_writer=MPFsspecWriter(checkpoint_dir, num_workers=2),
            planner=Planner(),
            no_dist=True,
        )
    failure = caught.value
    if not isinstance(failure, error):
        failure = failure_of(failure)
    assert isinstance(failure, StagingError if error is ValueError else error)
    assert names_in(checkpoint_dir) == []
    assert pool.given_back and all(usable for _, usable in pool.given_back)


def test_feed_raises_when_a_worker_is_silent_for_too_long(
    pool: FakePool, checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even while another one keeps talking."""
    monkeypatch.setattr(_feed, "_TICK_S", 0.01)
    ticks = itertools.count()

    def silent(worker: InlineWorker, message: Message) -> None:
        if isinstance(message, AbortJob):
            worker.replies.append(
                JobFailed(message.job, ErrorRecord(ABORTED, "", None, None, "", False))
            )

    class Talkative(InlineWorker):
        def receive(self) -> list[Message]:
            # An answer every other time, so that the feed comes to look after its lanes.
            said = super().receive()
            return said or ([Ack(-7, 0)] if next(ticks) % 2 else [])

    def never_done(worker: InlineWorker, message: Message) -> None:
        if not isinstance(message, EndJob):
            worker.serve(message)

    pool.made.append(Talkative(0, never_done))
    pool.idle.append(pool.made[0])
    pool.script = [silent]
    failure = failure_in_save(checkpoint_dir, small_state(1), timeout_s=0.3)
    assert isinstance(failure, WorkerTimeoutError) and failure.worker == 1
    assert failure.pid == 100_001 and failure.timeout_s == 0.3


def test_feed_hears_what_was_said_when_it_was_stopped_itself(
    pool: FakePool, checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspended trainer, or one in a debugger, finds the answers waiting: nobody was silent."""

    class Stopped:
        """A poll in which the process is stopped for longer than timeout_s."""

        def __init__(self) -> None:
            self._poll = select.poll()
            self.register = self._poll.register

        def poll(self, timeout_ms: float) -> Any:
            time.sleep(0.3)
            for worker in pool.made:
                worker.speak()  # type: ignore[attr-defined]
                worker.fileno()
            return self._poll.poll(timeout_ms)

    class Module:
        poll = Stopped
        POLLIN, POLLOUT = select.POLLIN, select.POLLOUT

    class Slow(InlineWorker):
        """Says what it has to say while the trainer is stopped."""

        def __init__(self, number: int) -> None:
            super().__init__(number, InlineWorker.serve)
            self._spoken = False

        def speaks(self) -> bool:
            return self._spoken and super().speaks()

        def receive(self) -> list[Message]:
            if not self._spoken:
                return []
            self._spoken = False
            return super().receive()

        def speak(self) -> None:
            self._spoken = True

    monkeypatch.setattr(_feed, "select", Module)
    pool.made += [Slow(0), Slow(1)]
    pool.idle += pool.made
    save(checkpoint_dir, small_state(1), timeout_s=0.1)
    assert_holds(checkpoint_dir, small_state(1))


@pytest.mark.parametrize("ready", [True, False])
def test_feed_raises_when_a_worker_exits_unless_it_never_was_at_work(
    ready: bool,
    pool: FakePool,
    checkpoint_dir: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C01; an interpreter that cannot run workers is no reason to fail."""

    def death(worker: InlineWorker, path: str | None = None) -> WorkerDiedError:
        worker.kill()
        return WorkerDiedError(f"worker {worker.number} ended", worker=worker.number, path=path)

    def die(worker: InlineWorker, message: Message) -> None:
        raise worker.death()

    monkeypatch.setattr(InlineWorker, "death", death)
    monkeypatch.setattr(InlineWorker, "ready_at_first", ready)
    pool.script = [die] * 9
    if ready:
        failure = failure_in_save(checkpoint_dir, small_state(1))
        assert isinstance(failure, WorkerDiedError)
        assert failure.path is not None and str(checkpoint_dir) in failure.path
        assert names_in(checkpoint_dir) == []
    else:
        report = save(checkpoint_dir, small_state(2)).last_report
        assert report is not None and report.num_workers == 0
        assert caplog.text.count("do not start here") == 1
        assert_holds(checkpoint_dir, small_state(2))
    assert (0, False) in pool.given_back
