"""Somebody who may do only what the README says is enough."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from mpwriter import FsspecReader
from mpwriter.errors import IncompleteCheckpointError, StorageError
from tests.fakes.plan import FaultPlan
from tests.fakes.planned_s3 import planned
from tests.saves import failure_in_save, failure_of, small_state
from tests.servers import S3Store
from tests.states import assert_same, blank, load_into
from tests.stores import assert_holds, save, shards

MIB = 1 << 20


def large_state(number: int) -> dict[str, Any]:
    """Two files of three parts each."""
    return {f"layer{n}": torch.full((MIB // 2,), n / 16 + number) for n in range(16)}


def failure_in_load(url: str, **options: Any) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        load_into(blank(small_state()), FsspecReader(url, **options))
    return failure_of(caught.value)


@pytest.fixture(scope="module")
def writer_only(start_store: Callable[[Sequence[str]], S3Store]) -> S3Store:
    """A server whose second identity may read and write, and list nothing.

    SeaweedFS has no finer words: "Write" is PutObject, DeleteObject and all of the uploads.
    """
    return start_store(("Read", "Write"))


@pytest.mark.parametrize(
    "states",
    [(small_state(1), small_state(2)), (large_state(1), large_state(2))],
    ids=["small", "in parts"],
)
def test_save_and_load_work_when_nothing_may_be_listed(
    states: tuple[Any, Any], writer_only: S3Store, request: pytest.FixtureRequest
) -> None:
    """The README's permissions: first save, overwrite, load."""
    assert writer_only.of_reader is not None
    url = f"{writer_only.root}/{request.node.name.partition('[')[2].strip(']')}"
    fs = writer_only.filesystem()
    limited = type(fs)(**writer_only.of_reader, skip_instance_cache=True)
    with pytest.raises(PermissionError):
        limited.ls(writer_only.path(writer_only.root), refresh=True)
    for state in states:
        save(writer_only, url, state, **writer_only.of_reader)
        reader = FsspecReader(url, **writer_only.of_reader)
        assert_same(load_into(blank(state), reader), state)
        assert len(shards(writer_only, url)) == 2, "the old shards go"
        assert writer_only.uploads(url) == []


def test_load_says_that_there_is_none_when_nothing_may_be_listed(writer_only: S3Store) -> None:
    """B02."""
    assert writer_only.of_reader is not None
    error = failure_in_load(f"{writer_only.root}/nothing", **writer_only.of_reader)
    assert isinstance(error, IncompleteCheckpointError)
    assert "cannot be listed" in str(error)


def test_first_save_works_when_a_missing_key_is_forbidden(
    store: S3Store, url: str, plan: FaultPlan
) -> None:
    """S3 answers 403 for a key that is missing where listing is not allowed."""
    for method in ("head_object", "get_object", "list_objects_v2", "list_multipart_uploads"):
        plan.add(method, errno=errno.EACCES, text="Forbidden", times=None)
    save(store, planned(url), small_state(1), **plan.options)
    assert plan.num_acts() > 0
    assert_holds(store, url, small_state(1))


def test_save_and_load_say_forbidden_when_a_missing_key_is(
    store: S3Store, url: str, plan: FaultPlan
) -> None:
    """F18: whether there is a checkpoint cannot be known, so `overwrite=False` cannot be kept."""
    for method in ("head_object", "get_object", "list_objects_v2"):
        plan.add(method, errno=errno.EACCES, text="Forbidden")
    options = {**store.options, **plan.options}
    of_save = failure_in_save(planned(url), small_state(1), overwrite=False, **options)
    of_load = failure_in_load(planned(url), **options)
    for error in (of_save, of_load):
        assert isinstance(error, StorageError) and error.errno == errno.EACCES, repr(error)
        assert error.path is not None and "/run" in error.path
        assert "Forbidden" in str(error)
    assert store.names(url) == []


def test_shards_stay_and_are_told_of_when_they_may_not_be_deleted(
    store: S3Store, url: str, plan: FaultPlan, caplog: pytest.LogCaptureFixture
) -> None:
    """Without s3:DeleteObject an overwrite is complete, and costs the room of the old shards."""
    save(store, url, small_state(1))
    plan.add("delete_object", errno=errno.EACCES, text="Forbidden")
    save(store, planned(url), small_state(2), **plan.options)
    assert_holds(store, url, small_state(2))
    assert len(shards(store, url)) == 4
    assert plan.num_acts() > 0
    told = [r.getMessage() for r in caplog.records if "could not be removed" in r.getMessage()]
    assert len(told) == 2
