"""Items to buckets, names of shards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from mpwriter._planning import item_nbytes, shard_name, shard_rank, split_into_buckets


def tensor_item(name: str, chunk: tuple[int, ...], size: tuple[int, ...] = ()) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(torch.Size([0] * len(chunk)), torch.Size(chunk)),
            TensorProperties(dtype=torch.float32),
            torch.Size(size or chunk),
        ),
    )


def bytes_item(name: str) -> WriteItem:
    return WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)


def test_item_nbytes_counts_the_chunk_when_the_tensor_is_larger() -> None:
    assert item_nbytes(tensor_item("w", (2, 3), (200, 300))) == 24


@given(
    st.lists(st.integers(0, 5000), max_size=60),
    st.integers(0, 5),
    st.integers(1, 9),
)
def test_split_places_every_item_once_and_evenly(
    sizes: list[int], num_bytes_items: int, num_buckets: int
) -> None:
    items = [tensor_item(str(n), (size,)) for n, size in enumerate(sizes)]
    items += [bytes_item(f"b{n}") for n in range(num_bytes_items)]
    buckets = split_into_buckets(items, num_buckets)
    assert sorted(n for bucket in buckets for n in bucket) == list(range(len(items)))
    assert len(buckets) == min(num_buckets, len(items))
    assert all(buckets)
    loads = [sum(item_nbytes(items[n]) for n in bucket) for bucket in buckets]
    if loads:
        # What longest-processing-time-first guarantees: the spread is one item at most.
        assert max(loads) - min(loads) <= max(item_nbytes(item) for item in items)


def test_split_orders_a_bucket_by_size_and_equal_items_by_plan() -> None:
    items = [tensor_item("a", (9,)), tensor_item("b", (1,)), tensor_item("c", (9,))]
    assert split_into_buckets(items, 1) == [[1, 0, 2]]


def test_shard_name_differs_between_saves() -> None:
    assert shard_name(3, 1, "01234567-89ab") == "__3_1.01234567.distcp"
    assert shard_name(0, 0, "ffffffff", safetensors=True) == "__0_0.ffffffff.safetensors"


def test_shard_rank_reads_the_stock_prefix() -> None:
    assert shard_rank("__12_") == 12
    with pytest.raises(ValueError, match="__0_"):
        shard_rank("rank12")
