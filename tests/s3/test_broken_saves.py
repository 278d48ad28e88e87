"""What a save leaves in the bucket that breaks at 10, 50 or 90 % of an upload in parts."""

from __future__ import annotations

import errno
import signal
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

from mpwriter import MPFsspecWriter
from mpwriter.errors import StorageError, WorkerDiedError
from scripts.wan_proxy import WanProxy
from tests.fakes.plan import FaultPlan
from tests.fakes.planned_s3 import planned
from tests.saves import failure_of, small_state
from tests.servers import S3Store
from tests.states import save_with
from tests.stores import assert_holds, save, shards

pytestmark = pytest.mark.slow  # uploads that are broken off at many points

State = dict[str, Any]

MIB = 1 << 20
# Ten parts of one file, the tensors two to a part.
_NUM_PARTS = 10
_NUM_TENSORS = 20
_OPTIONS: dict[str, Any] = {
    "num_workers": 1,
    "per_worker_copy_ahead": MIB,
    "default_block_size": 5 * MIB,
}
# One try of each layer: a network that is gone stays gone here.
_ONE_TRY = {"retries": 0, "config_kwargs": {"retries": {"max_attempts": 0}}}
SHARES = pytest.mark.parametrize("share", [0.1, 0.5, 0.9])


def large_state() -> State:
    return {f"layer{n:02d}": torch.full((5 * MIB // 8,), n / 16) for n in range(_NUM_TENSORS)}


class _GivesUp(DefaultSavePlanner):
    """Raises at a tensor."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._left = at

    def resolve_data(self, write_item: WriteItem) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ArithmeticError("no more")
        return super().resolve_data(write_item)


def broken_save(url: str, planner: DefaultSavePlanner | None = None, **options: Any) -> Any:
    """What the rank raises."""
    writer = MPFsspecWriter(url, **{**_OPTIONS, **options})
    with pytest.raises(CheckpointException) as caught:
        save_with(writer, large_state(), planner)
    return failure_of(caught.value)


def assert_next_save_works(store: S3Store, url: str) -> None:
    save(store, url, small_state(3), num_workers=1)
    assert_holds(store, url, small_state(3))
    assert len(shards(store, url)) == 1
    assert store.uploads(url) == []


@SHARES
def test_save_leaves_nothing_when_it_raises(
    share: float, store: S3Store, url: str, plan: FaultPlan
) -> None:
    """Invariants 3 and 4: no object, no upload, once the exception is there."""
    options = {**store.options, **plan.options}
    error = broken_save(planned(url), _GivesUp(round(share * _NUM_TENSORS)), **options)
    assert "no more" in str(error)
    assert plan.calls("create_multipart_upload") or share == 0.1, "the upload had not begun"
    assert store.names(url) == []
    assert store.uploads(url) == []
    assert_next_save_works(store, url)


@SHARES
def test_save_leaves_nothing_that_loads_when_its_worker_is_killed(
    share: float, store: S3Store, url: str, plan: FaultPlan
) -> None:
    """C01, C02; invariants 3 and 4: the upload is aborted by the next save there."""
    number = round(share * _NUM_PARTS)
    plan.add("upload_part", "__0_0.*", nth=number, signal=signal.SIGKILL)
    error = broken_save(planned(url), **store.options, **plan.options)
    assert isinstance(error, WorkerDiedError) and error.signal_name == "SIGKILL"
    assert store.names(url) == []
    assert len(store.uploads(url)) == 1, "the upload had not begun"
    assert_next_save_works(store, url)


@SHARES
def test_save_keeps_the_old_checkpoint_when_its_worker_is_killed(
    share: float, store: S3Store, url: str, plan: FaultPlan
) -> None:
    """Invariant 3, of an overwrite."""
    save(store, url, small_state(1))
    before = store.names(url)
    number = round(share * _NUM_PARTS)
    plan.add("upload_part", "__0_0.*", nth=number, signal=signal.SIGKILL)
    broken_save(planned(url), **store.options, **plan.options)
    assert store.names(url) == before
    assert_holds(store, url, small_state(1))
    assert_next_save_works(store, url)


@SHARES
def test_save_leaves_nothing_that_loads_when_the_connection_is_refused(
    share: float, store: S3Store, far: S3Store, proxy: WanProxy, url: str
) -> None:
    """Invariants 3 and 4: nobody can abort the upload before the network is back."""
    proxy.cut(after_bytes=round(share * _NUM_PARTS * 5 * MIB))
    error = broken_save(url, **far.options, **_ONE_TRY)
    assert isinstance(error, StorageError) and "__0_0." in str(error)
    assert store.names(url) == []
    proxy.mend()
    assert_next_save_works(far, url)
    assert_holds(store, url, small_state(3))


@pytest.mark.parametrize("part", [1, 5, 9])
def test_save_leaves_nothing_when_a_part_is_refused(
    part: int, store: S3Store, url: str, plan: FaultPlan
) -> None:
    """A05: a full quota, at any part; it is not tried again."""
    plan.add("upload_part", "__0_0.*", nth=part, errno=errno.ENOSPC)
    error = broken_save(planned(url), **store.options, **plan.options)
    assert isinstance(error, StorageError) and error.errno == errno.ENOSPC
    assert error.path is not None and "__0_0." in error.path
    assert plan.num_acts() == 1
    assert store.names(url) == []
    assert store.uploads(url) == []


@pytest.mark.parametrize(
    "method", ["create_multipart_upload", "complete_multipart_upload", "put_object"]
)
def test_save_leaves_nothing_when_a_request_is_refused(
    method: str, store: S3Store, url: str, plan: FaultPlan
) -> None:
    """A05: at the open and at the close of a file, and of the metadata."""
    plan.add(method, errno=errno.EDQUOT)
    error = broken_save(planned(url), **store.options, **plan.options)
    assert getattr(error, "errno", None) == errno.EDQUOT
    assert plan.num_acts() == 1
    assert store.names(url) == []
    assert store.uploads(url) == []
    plan.clear()
    assert_next_save_works(store, url)
