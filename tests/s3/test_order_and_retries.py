"""In which order requests are made, and what comes of those that are made again."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
import torch

from mpwriter import MPFsspecWriter
from mpwriter._multipart import MultipartSink
from tests.fakes.plan import FaultPlan
from tests.fakes.planned_s3 import planned
from tests.saves import failure_in_save, small_state
from tests.servers import S3Store
from tests.states import save_with
from tests.stores import assert_holds, shards

MIB = 1 << 20
_PUTS = ("put_object", "complete_multipart_upload")


def large_state() -> dict[str, Any]:
    """Two files of three parts each."""
    return {f"layer{n}": torch.full((MIB // 2,), n / 16) for n in range(16)}


def planned_save(store: S3Store, url: str, plan: FaultPlan, state: Any, **options: Any) -> None:
    writer = MPFsspecWriter(
        planned(url), **{"num_workers": 2, **store.options, **plan.options, **options}
    )
    save_with(writer, state)


@pytest.mark.parametrize("sync_files", [True, False])
@pytest.mark.parametrize("state", [small_state(1), large_state()], ids=["small", "in parts"])
def test_save_completes_every_shard_before_it_begins_the_metadata(
    state: Any, sync_files: bool, store: S3Store, url: str, plan: FaultPlan
) -> None:
    """A06, B01; B13: no bucket and no directory is made."""
    planned_save(store, url, plan, state, sync_files=sync_files)
    completed = [c for m in _PUTS for c in plan.calls(m, "__0_*.distcp")]
    (metadata,) = plan.calls("put_object", ".metadata", phase="begin")
    assert len(completed) == 2 and all(call.result == "ok" for call in completed)
    assert max(call.at_s for call in completed) < metadata.at_s
    assert plan.calls("create_bucket") == []
    assert all(not call.path.endswith("/") for m in _PUTS for call in plan.calls(m))
    assert_holds(store, url, state)


@pytest.mark.parametrize(
    ("method", "nth"),
    [
        ("create_multipart_upload", None),
        ("upload_part", 1),
        ("upload_part", 3),
        ("complete_multipart_upload", None),
        ("put_object", None),
    ],
)
def test_save_leaves_one_object_a_file_when_it_was_throttled(
    method: str, nth: int | None, store: S3Store, url: str, plan: FaultPlan
) -> None:
    """F06, F12: the first two tries are told to slow down; s3fs says EBUSY for it."""
    plan.add(method, nth=nth, times=2, errno=errno.EBUSY, text="SlowDown")
    planned_save(store, url, plan, large_state(), num_workers=1)
    assert plan.num_acts() == 2
    assert len(shards(store, url)) == 1
    assert store.uploads(url) == []
    assert_holds(store, url, large_state())


def test_save_fails_cleanly_when_it_may_not_try_again(
    store: S3Store, url: str, plan: FaultPlan
) -> None:
    """F12."""
    plan.add("upload_part", nth=2, times=1, errno=errno.EBUSY, text="SlowDown")
    options = {**store.options, **plan.options, "num_workers": 1, "retries": 0}
    error = failure_in_save(planned(url), large_state(), **options)
    assert "SlowDown" in str(error)
    assert store.names(url) == [] and store.uploads(url) == []


def test_error_names_the_option_when_a_file_has_more_parts_than_s3_takes(
    store: S3Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F03: as if S3 took three; nothing is left of what was sent."""
    monkeypatch.setattr("mpwriter._multipart._MAX_PARTS", 3)
    fs = S3Store.filesystem(store)
    fs.storage_options["block_size"] = 5 * MIB
    sink = MultipartSink(fs, f"{store.path(url)}/__0_0.0123abcd.distcp")
    with pytest.raises(OSError, match="default_block_size") as caught:
        for _ in range(4):
            sink.write(os.urandom(5 * MIB))
    assert caught.value.errno == errno.EFBIG
    assert len(store.uploads(url)) == 1
    sink.discard()
    assert store.uploads(url) == [] and store.names(url) == []


def test_error_of_the_store_names_the_option_when_it_counts_the_parts(
    store: S3Store, url: str, plan: FaultPlan
) -> None:
    """F03: a store that takes fewer than S3 does."""
    text = "InvalidArgument: Part number must be an integer between 1 and 2, inclusive"
    plan.add("upload_part", nth=3, raises="OSError", text=text)
    options = {**store.options, **plan.options, "num_workers": 1}
    options["default_block_size"] = 5 * MIB
    error = failure_in_save(planned(url), large_state(), **options)
    assert "default_block_size" in str(error) and "__0_0." in str(error)
    assert store.names(url) == [] and store.uploads(url) == []
