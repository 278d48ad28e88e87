"""Errors that pass: files are written again, or go on where they were interrupted."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from mpwriter import _feed
from mpwriter.errors import StorageError
from tests.fakes import FaultPlan
from tests.saves import assert_holds, failure_of, names_in, save, small_state


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_feed, "_RETRY_PAUSE_S", 0.01)


def state_of(number: int) -> dict[str, Any]:
    """Several writes a file; a view with strides, tied tensors and an object among them."""
    base = torch.full((512, 600), 10.0 * number)
    large = {f"large{n}": torch.full((1 << 17,), 10.0 * number + n) for n in range(6)}
    tied = torch.arange(1000.0) + number
    return {
        **large,
        "columns": base[:, ::3],
        "tied1": tied,
        "tied2": tied,
        "note": f"save {number}",
        **small_state(number),
    }


def shards(folder: Path) -> list[str]:
    """Names without the part that differs between saves; a stray file would show too."""
    return [f"{name.split('.')[0]}.distcp" for name in names_in(folder) if name != ".metadata"]


@pytest.mark.parametrize("step", ["open", "write", "flush", "close", "mv"])
@pytest.mark.parametrize("name", ["__0_1.*", ".metadata"])
def test_save_succeeds_when_a_step_fails_for_a_while(
    checkpoint_dir: Path, place: str, plan: FaultPlan, step: str, name: str
) -> None:
    """F12: the first two tries fail; with two retries there is one good file of that name."""
    nth = 2 if step == "write" and name != ".metadata" else None
    plan.add(step, name, nth=nth, errno=errno.ETIMEDOUT, times=2, where="worker")
    save(place, state_of(1), retries=2, **plan.options)
    assert_holds(checkpoint_dir, state_of(1))
    assert shards(checkpoint_dir) == ["__0_0.distcp", "__0_1.distcp"]
    assert len(plan.calls("open", name)) == 3
    assert len(plan.calls("open", "__0_0.*")) == 1, "the other file is written once"


@pytest.mark.parametrize("name", ["__0_1.*", ".metadata"])
def test_save_fails_when_a_step_fails_longer_than_the_retries(
    checkpoint_dir: Path, place: str, plan: FaultPlan, name: str
) -> None:
    """F12: without enough retries a clean failure."""
    plan.add("open", name, errno=errno.ECONNRESET, times=2)
    with pytest.raises(CheckpointException) as caught:
        save(place, state_of(1), retries=1, **plan.options)
    error = failure_of(caught.value)
    assert isinstance(error, StorageError)
    assert error.errno == errno.ECONNRESET
    assert names_in(checkpoint_dir) == []
    assert len(plan.calls("open", name)) == 2


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EROFS])
def test_save_fails_at_once_when_an_error_does_not_pass(
    checkpoint_dir: Path, place: str, plan: FaultPlan, number: int
) -> None:
    """F12: permissions and full disks are not retried."""
    plan.add("open", "__0_0.*", errno=number)
    with pytest.raises(CheckpointException) as caught:
        save(place, state_of(1), retries=5, **plan.options)
    assert failure_of(caught.value).errno == number  # type: ignore[attr-defined]
    assert len(plan.calls("open", "__0_0.*")) == 1


def test_save_succeeds_when_the_store_is_throttling(
    checkpoint_dir: Path,
    plan: FaultPlan,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """F06: "SlowDown" for the first two tries of every open; each retry is logged, no secret is."""
    caplog.set_level(logging.WARNING, logger="mpwriter")
    for name in ("__0_0.*", "__0_1.*", ".metadata"):
        plan.add("open", name, errno=errno.EBUSY, text="SlowDown", times=2)
    save(f"commitlike://{checkpoint_dir}", state_of(1), retries=2, **plan.options)
    assert_holds(checkpoint_dir, state_of(1))
    assert shards(checkpoint_dir) == ["__0_0.distcp", "__0_1.distcp"]
    assert caplog.text.count("SlowDown") == 6


def test_save_retries_in_the_trainer_too(
    checkpoint_dir: Path, plan: FaultPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F12, where no worker can serve the filesystem."""
    monkeypatch.setattr("mpwriter._save.refusal", lambda fs: "this test says so")
    plan.add("write", "__0_1.*", nth=2, errno=errno.ETIMEDOUT, times=2)
    writer = save(f"fault://{checkpoint_dir}", state_of(1), retries=2, **plan.options)
    assert writer.last_report is not None and writer.last_report.num_workers == 0
    assert_holds(checkpoint_dir, state_of(1))
    assert shards(checkpoint_dir) == ["__0_0.distcp", "__0_1.distcp"]


def test_save_is_interrupted_in_the_trainer_by_the_user(
    checkpoint_dir: Path, plan: FaultPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 19: Ctrl-C is no storage error and is not retried."""
    monkeypatch.setattr("mpwriter._save.refusal", lambda fs: "this test says so")
    plan.add("write", "__0_1.*", nth=2, raises="KeyboardInterrupt")
    with pytest.raises((KeyboardInterrupt, CheckpointException)) as caught:
        save(f"fault://{checkpoint_dir}", state_of(1), **plan.options)
    error = caught.value
    if isinstance(error, CheckpointException):
        error = failure_of(error)
    assert isinstance(error, KeyboardInterrupt)
    assert names_in(checkpoint_dir) == []
    assert len(plan.calls("open", "__0_1.*")) == 1


# -- writes that take less than all -------------------------------------------------------------


@pytest.mark.parametrize("most", [1000, 65_536])
def test_save_writes_all_when_writes_are_short(
    checkpoint_dir: Path, place: str, plan: FaultPlan, most: int
) -> None:
    """A16: every write of one file takes at most so many bytes."""
    plan.add("write", "__0_0.*", short=most)
    plan.add("write", ".metadata", short=100)
    state = small_state(1, num_tensors=4, numel=50_000)
    save(place, state, **plan.options)
    assert_holds(checkpoint_dir, state)
    calls = plan.calls("write", "__0_0.*")
    assert len(calls) >= 400_000 // most
    assert len({call.path for call in calls}) == 1, "the file was written once"


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
@pytest.mark.parametrize("op", ["write", "flush"])
def test_save_goes_on_when_a_call_is_interrupted(
    checkpoint_dir: Path, place: str, plan: FaultPlan, op: str, number: int
) -> None:
    """A16: EINTR or EAGAIN once, in the middle of each file; the file is not begun again."""
    for name in ("__0_0.*", "__0_1.*", ".metadata"):
        plan.add(op, name, errno=number, times=1)
    save(place, state_of(1), retries=0, **plan.options)
    assert_holds(checkpoint_dir, state_of(1))
    assert len(plan.calls("open")) == 3


@pytest.mark.parametrize(
    ("action", "words"),
    [({"short": 0}, "takes no more bytes"), ({"lie": 1000}, "bytes were written, the file has")],
)
def test_save_says_why_when_a_file_takes_no_more(
    checkpoint_dir: Path, place: str, plan: FaultPlan, action: dict[str, int], words: str
) -> None:
    """A16: writes of nothing, or of less than they say: never a corrupt file."""
    plan.add("write", "__0_0.*", **action)
    with pytest.raises(CheckpointException) as caught:
        save(place, state_of(1), retries=0, **plan.options)
    error = failure_of(caught.value)
    assert isinstance(error, StorageError)
    assert words in str(error)
    assert f"{checkpoint_dir}/__0_0." in str(error)
    assert names_in(checkpoint_dir) == []
