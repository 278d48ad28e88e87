"""How the jobs of a save are fed to its workers, and what their answers bring."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mpwriter import _feed
from mpwriter._types import (
    Ack,
    EndJob,
    ErrorRecord,
    JobDone,
    JobFailed,
    JobRefused,
    Message,
)
from mpwriter.errors import (
    StorageError,
    WorkerStartError,
)
from tests.fakes import FaultPlan
from tests.inline_workers import FakePool, InlineWorker, fake_pool
from tests.saves import assert_holds, failure_in_save, names_in, save, small_state


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePool]:
    with fake_pool(monkeypatch) as fake:
        yield fake


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "plan")


# -- workers and lanes --------------------------------------------------------------------------


def test_feed_gives_each_worker_a_file(pool: FakePool, checkpoint_dir: Path) -> None:
    save(checkpoint_dir, small_state(1), num_workers=3)
    assert len(pool.made) == 3
    assert all(usable for _, usable in pool.given_back)
    assert_holds(checkpoint_dir, small_state(1))


def test_feed_goes_on_with_what_it_has_when_the_pool_gives_no_more(
    pool: FakePool, checkpoint_dir: Path
) -> None:
    pool.script = [InlineWorker.serve, None, None, None, None, None]
    report = save(checkpoint_dir, small_state(1), num_workers=3).last_report
    assert report is not None and report.num_workers == 1 and report.files == 3
    assert len(pool.made) == 1 and len(pool.made[0].attempts) >= 3
    assert_holds(checkpoint_dir, small_state(1))


def test_feed_goes_on_with_what_it_has_when_no_more_start(
    pool: FakePool, checkpoint_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool.script = [InlineWorker.serve, *(WorkerStartError("no more") for _ in range(9))]
    report = save(checkpoint_dir, small_state(1), num_workers=3).last_report
    assert report is not None and report.num_workers == 1 and report.files == 3
    assert "no more" not in caplog.text


def test_feed_writes_in_the_trainer_when_none_starts(
    pool: FakePool, checkpoint_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool.script = [WorkerStartError("none at all") for _ in range(9)]
    report = save(checkpoint_dir, small_state(1), num_workers=3).last_report
    assert report is not None and report.num_workers == 0 and report.files == 3
    assert caplog.text.count("none at all") == 1
    assert_holds(checkpoint_dir, small_state(1))


def test_feed_writes_in_the_trainer_what_workers_refuse(
    pool: FakePool, checkpoint_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each file once, also when the refusal comes after many messages."""

    def refuse_at_the_end(worker: InlineWorker, message: Message) -> None:
        if isinstance(message, EndJob):
            worker.replies.append(JobRefused(message.job, "no module of that name"))

    pool.script = [refuse_at_the_end, refuse_at_the_end]
    state = small_state(1, num_tensors=6, numel=100_000)
    report = save(checkpoint_dir, state, num_workers=2).last_report
    assert report is not None and report.num_workers == 0 and report.files == 2
    assert caplog.text.count("no module of that name") == 1
    assert all(usable for _, usable in pool.given_back)  # the workers are none the worse
    assert len(names_in(checkpoint_dir)) == 3
    assert_holds(checkpoint_dir, state)


def test_feed_opens_no_file_when_every_item_of_it_is_tied_to_another(
    pool: FakePool, checkpoint_dir: Path
) -> None:
    shared = torch.arange(1000.0)
    save(checkpoint_dir, {"one": shared, "two": shared}, num_workers=2)
    assert len([name for name in names_in(checkpoint_dir) if name.endswith("distcp")]) == 1
    assert all(usable for _, usable in pool.given_back)
    assert_holds(checkpoint_dir, {"one": shared, "two": shared})


# -- answers ------------------------------------------------------------------------------------


def test_feed_ignores_the_last_words_of_an_attempt_that_is_over(
    pool: FakePool, checkpoint_dir: Path
) -> None:
    """Attempt numbers never recur, so they are told apart."""
    error = ErrorRecord("builtins.OSError", "long ago", errno.ENOSPC, "/there", "", False)

    def haunted(worker: InlineWorker, message: Message) -> None:
        worker.serve(message)
        old = min(worker.attempts, default=0) - 1
        ghosts: list[Message] = [
            Ack(old, 99),
            JobFailed(old, error),
            JobDone(old, [], [], 0, 0.0, 0.0, 0.0, 0.0),
            JobRefused(old, "long ago"),
        ]
        worker.replies[:] = [*ghosts, *worker.replies, *ghosts]

    pool.script = [haunted, haunted]
    state = small_state(1, num_tensors=6, numel=300_000)
    report = save(checkpoint_dir, state, per_worker_copy_ahead=1 << 20).last_report
    assert report is not None and report.files == 2 and report.num_workers == 2
    assert_holds(checkpoint_dir, state)
    attempts = [attempt for worker in pool.made for attempt in worker.attempts]
    assert len(set(attempts)) == len(attempts)


def test_feed_writes_a_file_anew_when_the_error_is_transient(
    pool: FakePool, plan: FaultPlan, checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a new attempt number, after a growing pause, `retries` times at most."""
    monkeypatch.setattr(_feed, "_RETRY_PAUSE_S", 0.001)
    plan.add("write", "__0_1.*", errno=errno.ECONNRESET, times=2)
    url = f"fault://{checkpoint_dir}"
    save(url, small_state(1), retries=2, **plan.options)
    assert_holds(checkpoint_dir, small_state(1))
    assert sorted(len(worker.attempts) for worker in pool.made)[-1] >= 3
    plan.add("write", "__0_1.*", errno=errno.ECONNRESET, times=3)
    failure = failure_in_save(url, small_state(2), retries=2, **plan.options)
    assert isinstance(failure, StorageError) and failure.errno == errno.ECONNRESET
    assert_holds(checkpoint_dir, small_state(1))
