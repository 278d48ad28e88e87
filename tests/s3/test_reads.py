"""How many requests a load makes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import s3fs
import torch

from mpwriter import FsspecReader
from tests.saves import small_state
from tests.servers import S3Store
from tests.states import assert_same, blank, load_into
from tests.stores import save, shards

MIB = 1 << 20
_NUM_SHARDS = 4


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file was asked for; loads run in this process."""
    found: Counter[str] = Counter()
    call = s3fs.S3FileSystem._call_s3

    async def counted(self: Any, method: str, *args: Any, **options: Any) -> Any:
        if method == "get_object":
            found[options["Key"].rpartition("/")[2]] += 1
        return await call(self, method, *args, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", counted)
    return found


def load(store: S3Store, url: str, state: dict[str, Any]) -> None:
    assert_same(load_into(blank(state), FsspecReader(url, **store.options)), state)


def test_load_asks_for_few_ranges_when_items_are_small(
    store: S3Store, url: str, ranges: Counter[str]
) -> None:
    """F15: 500 tensors in 4 files."""
    state = small_state(1, num_tensors=500, numel=100)
    save(store, url, state, num_workers=_NUM_SHARDS)
    ranges.clear()
    load(store, url, state)
    assert ranges.pop(".metadata") == 1
    assert sorted(ranges) == shards(store, url)
    assert max(ranges.values()) == 1, "what lies together is read together"


def test_load_asks_for_no_byte_twice_when_items_are_large(
    store: S3Store, url: str, ranges: Counter[str]
) -> None:
    """F15: 96 MiB in 4 files, in ranges of 8 MiB."""
    state = {f"layer{n}": torch.full((6 * MIB // 4,), n / 16) for n in range(16)}
    save(store, url, state, num_workers=_NUM_SHARDS)
    ranges.clear()
    load(store, url, state)
    assert ranges.pop(".metadata") == 1
    # Not more than one of 8 MiB and one for a rest, for each tensor.
    assert sum(ranges.values()) <= 2 * len(state)
    assert len(ranges) == _NUM_SHARDS


def test_load_asks_for_one_file_when_one_key_is_wanted(
    store: S3Store, url: str, ranges: Counter[str]
) -> None:
    """F16."""
    state = small_state(1, num_tensors=100)
    save(store, url, state, num_workers=_NUM_SHARDS)
    ranges.clear()
    load(store, url, {"layer7.weight": state["layer7.weight"]})
    assert ranges.pop(".metadata") == 1
    assert len(ranges) == 1 and sum(ranges.values()) == 1
