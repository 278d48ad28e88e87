"""Errors of a filesystem, at every step of every file: none is lost, nothing half made is left."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from mpwriter.errors import StorageError
from tests.fakes import FaultPlan
from tests.saves import assert_holds, failure_of, names_in, open_fds, save, worker_pids

NUM_WORKERS = 2

# Where a file can fail. Each has several writes of 512 KiB and one of some gathered small items.
STEPS: dict[str, dict[str, Any]] = {
    "open": {"op": "open"},
    "first write": {"op": "write", "nth": 1},
    "mid-write": {"op": "write", "after_bytes": 900_000},
    "flush": {"op": "flush"},
    "close": {"op": "close"},
    "rename": {"op": "mv"},
}


def state_of(number: int) -> dict[str, Any]:
    large = {f"large{n}": torch.full((1 << 17,), 10.0 * number + n) for n in range(8)}
    small = {f"small{n}": torch.full((n,), 10.0 * number) for n in range(20)}
    return {**large, **small, "step": number}


def assert_save_fails(place: str, state: dict[str, Any], **options: Any) -> StorageError:
    with pytest.raises(CheckpointException) as caught:
        save(place, state, num_workers=NUM_WORKERS, **options)
    error = failure_of(caught.value)
    assert isinstance(error, StorageError), repr(error)
    assert isinstance(error, OSError)
    assert str(error) in str(caught.value)
    return error


@pytest.mark.parametrize("worker", range(NUM_WORKERS))
@pytest.mark.parametrize("step", STEPS)
def test_save_raises_when_the_disk_is_full(
    checkpoint_dir: Path, place: str, plan: FaultPlan, step: str, worker: int
) -> None:
    """A05: with no checkpoint before and with one; and the next save of the same workers works."""
    rule = {**STEPS[step], "name": f"__0_{worker}.*", "errno": errno.ENOSPC}
    plan.add(**rule)
    for number, kept in ((1, None), (3, 2)):
        before = names_in(checkpoint_dir)
        error = assert_save_fails(place, state_of(number), **plan.options)
        assert error.errno == errno.ENOSPC
        assert error.original_type == "OSError"
        assert "No space left on device" in str(error)
        assert re.search(rf"{re.escape(str(checkpoint_dir))}/__0_{worker}\.\w+\.distcp", str(error))
        assert error.path is not None and f"/__0_{worker}." in error.path
        assert error.worker_traceback and "Traceback" in str(error)
        # Neither shards nor temporary files nor a .metadata.
        assert names_in(checkpoint_dir) == before
        if kept is not None:
            assert_holds(checkpoint_dir, state_of(kept))
            break
        workers = worker_pids()
        plan.clear()
        save(place, state_of(2), num_workers=NUM_WORKERS, **plan.options)
        assert_holds(checkpoint_dir, state_of(2))
        assert worker_pids() == workers, "a full disk is no reason to start new workers"
        plan.add(**rule)
    plan.clear()
    save(place, state_of(4), num_workers=NUM_WORKERS, **plan.options)
    assert_holds(checkpoint_dir, state_of(4))


@pytest.mark.parametrize("step", ["open", "first write", "flush", "close", "rename"])
def test_save_raises_when_the_metadata_cannot_be_written(
    checkpoint_dir: Path, place: str, plan: FaultPlan, step: str
) -> None:
    """A05: the last file of all; the shards go too, and the checkpoint before is still there."""
    rule = {**STEPS[step], "name": ".metadata", "where": "worker", "errno": errno.EDQUOT}
    plan.add(**rule)
    for kept in (None, 2):
        before = names_in(checkpoint_dir)
        error = assert_save_fails(place, state_of(1), **plan.options)
        assert error.errno == errno.EDQUOT
        assert f"{checkpoint_dir}/.metadata" in str(error)
        assert names_in(checkpoint_dir) == before
        if kept is None:
            plan.clear()
            save(place, state_of(2), **plan.options)
            plan.add(**rule)
        else:
            assert_holds(checkpoint_dir, state_of(kept))


def test_save_keeps_the_shards_when_only_the_word_of_the_metadata_was_lost(
    checkpoint_dir: Path, place: str, plan: FaultPlan
) -> None:
    """The rename of `.metadata` was carried out, then an error came: the checkpoint stays whole."""
    plan.add("mv", ".metadata", errno=errno.EIO, after=True)
    assert_save_fails(place, state_of(1), **plan.options)
    assert_holds(checkpoint_dir, state_of(1))


def test_save_raises_for_each_file_when_every_tensor_has_its_own(
    checkpoint_dir: Path, place: str, plan: FaultPlan
) -> None:
    """A05: with single_file_per_rank=False, files that are done by then are removed too."""
    plan.add("close", "__0_17.*", errno=errno.ENOSPC)
    error = assert_save_fails(place, state_of(1), single_file_per_rank=False, **plan.options)
    assert error.errno == errno.ENOSPC
    assert names_in(checkpoint_dir) == []
    published = {call.name for call in plan.calls("mv")}
    assert published, "the failure came after other files had got their names"
    assert published <= {call.name for call in plan.calls("rm")}


def test_save_reports_the_first_error_when_cleaning_up_fails_too(
    checkpoint_dir: Path, place: str, plan: FaultPlan
) -> None:
    """A clean-up error never hides the first one (invariant 5)."""
    plan.add("write", "__0_0.*", nth=2, errno=errno.ENOSPC)
    # Of that file only: of another one it could well be the first error.
    for op in ("close", "rm"):
        plan.add(op, "__0_0.*", errno=errno.EIO)
    error = assert_save_fails(place, state_of(1), **plan.options)
    assert error.errno == errno.ENOSPC
    assert ".metadata" not in names_in(checkpoint_dir)


@pytest.mark.parametrize(
    ("kind", "errno_told"),
    [("ValueError", errno.EIO), ("PermissionError", errno.EACCES), ("RuntimeError", errno.EIO)],
)
def test_save_raises_storage_error_when_the_filesystem_raises_anything(
    checkpoint_dir: Path, place: str, plan: FaultPlan, kind: str, errno_told: int
) -> None:
    """Invariant 5: the type that the filesystem raised is told, also where it is no OSError."""
    plan.add("write", "__0_1.*", raises=kind, text="the store is on strike")
    error = assert_save_fails(place, state_of(1), **plan.options)
    assert error.original_type == kind
    assert error.errno == errno_told
    assert f"{kind}: the store is on strike" in str(error)
    assert names_in(checkpoint_dir) == []


@pytest.mark.parametrize("protocol", ["objectlike", "commitlike", "closelike"])
@pytest.mark.parametrize("op", ["create_upload", "upload_part", "close", "commit", "cp"])
def test_save_leaves_no_object_when_an_upload_fails(
    checkpoint_dir: Path, plan: FaultPlan, protocol: str, op: str
) -> None:
    """A05, invariant 4: on object stores no part of a shard is ever visible."""
    plan.add(op, "__0_1.*", errno=errno.ENOSPC)
    place = f"{protocol}://{checkpoint_dir}"
    options = {**plan.options, "block_size": 1 << 20}
    reached = {"objectlike": {"commit", "cp"}, "closelike": {"commit"}, "commitlike": {"commit"}}
    always = {"create_upload", "upload_part", "close"}
    if op not in always | reached[protocol]:
        save(place, state_of(1), **options)
        assert not plan.calls(op), "this store has no such step"
        assert_holds(checkpoint_dir, state_of(1))
        return
    error = assert_save_fails(place, state_of(1), **options)
    assert error.errno == errno.ENOSPC
    assert [name for name in names_in(checkpoint_dir) if "__0_" in name] == []
    assert ".metadata" not in names_in(checkpoint_dir)
    plan.clear()
    save(place, state_of(2), **options)
    assert_holds(checkpoint_dir, state_of(2))


def test_save_does_not_tell_secrets_when_the_filesystem_quotes_them(
    checkpoint_dir: Path, place: str, plan: FaultPlan
) -> None:
    """Invariant 13: storage options may be in the text of an error; they are struck out."""
    plan.add("write", "__0_0.*", raises="ValueError", text="denied to hunter2-of-the-option")
    error = assert_save_fails(place, state_of(1), **plan.options, password="hunter2-of-the-option")
    assert "hunter2" not in str(error)
    assert "hunter2" not in (error.worker_traceback or "")
    assert "denied to" in str(error)


def test_saves_leave_nothing_when_every_other_one_fails(
    checkpoint_dir: Path, place: str, plan: FaultPlan
) -> None:
    """C02: five times in turn; descriptors and workers stay as many, values are the last ones."""
    counts = []
    for number in range(5):
        plan.add("write", "__0_1.*", nth=2, errno=errno.ENOSPC)
        assert_save_fails(place, state_of(2 * number), **plan.options)
        plan.clear()
        save(place, state_of(2 * number + 1), **plan.options)
        assert_holds(checkpoint_dir, state_of(2 * number + 1))
        counts.append((open_fds(), [open_fds(pid) for pid in worker_pids()]))
    assert counts[1:] == counts[1:2] * 4
