"""A file that is written again is there once, whatever the storage and whichever step failed."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from mpwriter import _feed
from mpwriter.errors import StorageError
from tests.fakes import FaultPlan
from tests.fault.test_retries import shards, state_of
from tests.saves import assert_holds, failure_in_save, names_in, save

_STEPS = {
    "fault": ("open", "write", "flush", "close", "mv"),
    "objectlike": ("open", "create_upload", "upload_part", "commit", "close", "cp"),
    "commitlike": ("open", "create_upload", "upload_part", "close", "commit"),
    "closelike": ("open", "create_upload", "upload_part", "commit", "close"),
}
_CASES = [(protocol, op) for protocol, ops in _STEPS.items() for op in ops]

# Several parts a file.
_BLOCK_BYTES = 256 << 10


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_feed, "_RETRY_PAUSE_S", 0.01)


def options_of(plan: FaultPlan, protocol: str) -> dict[str, Any]:
    block = {} if protocol == "fault" else {"block_size": _BLOCK_BYTES}
    return {**plan.options, **block}


@pytest.mark.parametrize("after", [False, True], ids=["before the step", "after the step"])
@pytest.mark.parametrize(("protocol", "op"), _CASES)
def test_save_leaves_one_good_object_when_a_step_fails_for_a_while(
    protocol: str, op: str, after: bool, checkpoint_dir: Path, plan: FaultPlan
) -> None:
    """F12: the step is not carried out, or it is and only the word of it is lost; twice each, of a
    shard and of `.metadata`.
    """
    for name in ("__0_1.*", ".metadata"):
        plan.add(op, name, after=after, errno=errno.ETIMEDOUT, times=2)
    url = f"{protocol}://{checkpoint_dir}"
    for number in (1, 2):  # into a new directory, then over the first
        save(url, state_of(number), retries=4, **options_of(plan, protocol))
        assert_holds(checkpoint_dir, state_of(number))
        assert shards(checkpoint_dir) == ["__0_0.distcp", "__0_1.distcp"]
        assert names_in(checkpoint_dir)[0] == ".metadata"
    num_failures = sum(call.result == "TimeoutError" for call in plan.calls(op))
    # What is small goes to a store at once, without parts.
    assert num_failures in ({4} if op not in ("create_upload", "upload_part") else {2, 4})


_PERMANENT = {
    "no permission": errno.EACCES,
    "no such bucket": errno.ENOENT,
    "no space": errno.ENOSPC,
    "no quota": errno.EDQUOT,
    "read-only": errno.EROFS,
}


@pytest.mark.parametrize("number", _PERMANENT.values(), ids=_PERMANENT)
@pytest.mark.parametrize(
    ("protocol", "op"), [("commitlike", "open"), ("commitlike", "commit"), ("closelike", "close")]
)
def test_save_fails_at_once_when_a_store_refuses(
    protocol: str, op: str, number: int, checkpoint_dir: Path, plan: FaultPlan
) -> None:
    """F12: with retries left, at the first step of an upload as at its last."""
    plan.add(op, "__0_1.*", errno=number)
    error = failure_in_save(
        f"{protocol}://{checkpoint_dir}", state_of(1), retries=9, **options_of(plan, protocol)
    )
    assert isinstance(error, StorageError) and error.errno == number
    assert len(plan.calls("open", "__0_1.*")) == 1
    assert names_in(checkpoint_dir) == []
