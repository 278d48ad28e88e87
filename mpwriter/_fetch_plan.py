"""What has to be read of which file, for one load plan. Pure.

Runs in: trainer.

    ReadItem*  --same place-->  StoredItem*  --rows only-->  StoredItem*  --close together-->
    ByteRange*   for each file

One item of a file is read and decoded once, whoever asks for it: several slices of it, or several
keys that were tied when they were saved. Where a load needs less than most of a large item, and
that lies in one piece, only the piece is read. No CRC covers it: `mpwriter verify` reads all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from mpwriter._container import ELEMENT_BYTES, frame
from mpwriter._leftovers import is_shard_of_save
from mpwriter.errors import CorruptCheckpointError

__all__ = [
    "MAX_GAP_BYTES",
    "MAX_RANGE_BYTES",
    "SAFETENSORS_SUFFIX",
    "ByteRange",
    "StoredItem",
    "chunk_of",
    "payload_of",
    "plan_reads",
]

SAFETENSORS_SUFFIX = ".safetensors"

# Two items this close are read together. Source: max_gap of fsspec.parquet. Locally, 64 KiB take as
# long to read from the page cache (at 8 GiB/s) as a second seek and read take in Python.
MAX_GAP_BYTES = 64 * 2**10
# Neighbours are not joined beyond this. Source: range_size_limit of Arrow's CacheOptions.
MAX_RANGE_BYTES = 32 * 2**20

# Of a smaller item all is read: a range of its own costs as much as these bytes.
_MIN_CUT_BYTES = 4 * MAX_GAP_BYTES
# Of an item of which more is needed, all is read: its CRC is worth the rest.
_MAX_CUT_SHARE = 0.75


class StoredItem(NamedTuple):
    """`length` bytes at `offset` of a file, and all reads that they serve.

    Attributes:
        descriptors: of the stream transforms that the bytes went through.
        elements: the bytes are a part of a tensor's payload, of this dtype, and each read's whole.
    """

    offset: int
    length: int
    descriptors: tuple[str, ...]
    reads: list[ReadItem]
    elements: torch.dtype | None = None

    @property
    def key(self) -> str:
        return self.reads[0].storage_index.fqn

    @property
    def stop(self) -> int:
        return self.offset + self.length


class ByteRange(NamedTuple):
    """A half-open range of one file, with the items in it by offset."""

    start: int
    stop: int
    items: list[StoredItem]


def plan_reads(
    reads: Iterable[ReadItem],
    places: Mapping[MetadataIndex, Any],
    entries: Mapping[str, Any] | None = None,
    *,
    max_range_bytes: int = MAX_RANGE_BYTES,
    alone_bytes: int | None = None,
) -> dict[str, list[ByteRange]]:
    """Find out what has to be read of which file.

    Args:
        reads: the items of a load plan.
        places: Metadata.storage_data.
        entries: Metadata.state_dict_metadata; without it items are read as a whole.
        max_range_bytes: neighbours are not joined beyond this.
        alone_bytes: an item of this length or more is not joined to any; None: none is.

    Returns:
        By the file's name as the metadata has it: ranges by offset. They do not overlap, unless
        the items do.

    Raises:
        CorruptCheckpointError: the metadata does not say where an item is.

    Thread safety: any thread.
    """
    files: dict[str, dict[tuple[int, int, tuple[str, ...]], StoredItem]] = {}
    for read in reads:
        place = places.get(read.storage_index)
        if place is None or not _is_range(place.offset, place.length):
            index = read.storage_index
            raise CorruptCheckpointError(
                f"{index.fqn}: the metadata does not say where it is stored (index "
                f"{index.offset}): {place}",
                key=index.fqn,
            )
        # torch before 2.7 writes no transform_descriptors.
        descriptors = tuple(getattr(place, "transform_descriptors", None) or ())
        spot = (place.offset, place.length, descriptors)
        items = files.setdefault(place.relative_path, {})
        item = items.get(spot)
        if item is None:
            items[spot] = StoredItem(*spot, [read])
        else:
            item.reads.append(read)
    return {
        name: _coalesce(_cut(name, items.values(), entries or {}), max_range_bytes, alone_bytes)
        for name, items in files.items()
    }


def chunk_of(entry: Any, index: MetadataIndex) -> ChunkStorageMetadata | None:
    """The chunk of a tensor's metadata that `index` means; None where there is none."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    hint = index.index
    if hint is not None and hint < len(entry.chunks):
        if index.offset is None or entry.chunks[hint].offsets == index.offset:
            return entry.chunks[hint]
    for chunk in entry.chunks:
        if index.offset is None or chunk.offsets == index.offset:
            return chunk
    return None


def payload_of(
    name: str, item: StoredItem, entry: Any, chunk: ChunkStorageMetadata
) -> tuple[int, int] | None:
    """Where in a shard file of ours a tensor's elements lie, without a look at the file.

    Returns:
        Offset in the file and length, in bytes; None for any other file.
    """
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    if dtype not in ELEMENT_BYTES or not is_shard_of_save(name) or item.descriptors:
        return None
    shape = tuple(chunk.sizes)
    nbytes = math.prod(shape) * ELEMENT_BYTES[dtype]
    if name.endswith(SAFETENSORS_SUFFIX):
        return (item.offset, nbytes) if item.length == nbytes else None
    around = frame(dtype, shape, nbytes, item.offset)
    return (item.offset + len(around.prefix), nbytes) if around.length == item.length else None


def _cut(name: str, items: Iterable[StoredItem], entries: Mapping[str, Any]) -> list[StoredItem]:
    """Put the parts that are needed in the place of the items of which little is needed."""
    cut: list[StoredItem] = []
    for item in items:
        cut += _parts(name, item, entries) if item.length >= _MIN_CUT_BYTES else (item,)
    return cut


def _parts(name: str, item: StoredItem, entries: Mapping[str, Any]) -> Sequence[StoredItem]:
    """What is needed of an item; the item itself where that is most of it, or in many pieces."""
    parts: dict[tuple[int, int], StoredItem] = {}
    for read in item.reads:
        index = read.storage_index
        entry: Any = entries.get(index.fqn)
        chunk = chunk_of(entry, index)
        if chunk is None or read.type != LoadItemType.TENSOR:
            return (item,)
        span = _piece(tuple(chunk.sizes), tuple(read.storage_offsets), tuple(read.lengths))
        payload = payload_of(name, item, entry, chunk) if span else None
        if span is None or payload is None:
            return (item,)
        dtype = entry.properties.dtype
        start, length = payload[0] + span[0] * dtype.itemsize, span[1] * dtype.itemsize
        new = StoredItem(start, length, (), [], dtype)
        parts.setdefault((start, length), new).reads.append(read)
    if sum(part.length for part in parts.values()) > _MAX_CUT_SHARE * item.length:
        return (item,)
    return list(parts.values())


def _piece(
    sizes: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...]
) -> tuple[int, int] | None:
    """First element and number of elements of a box in a contiguous tensor, if it is one piece."""
    if not len(sizes) == len(offsets) == len(lengths) or 0 in lengths:
        return None
    if any(o < 0 or o + n > size for size, o, n in zip(sizes, offsets, lengths, strict=True)):
        return None
    first, whole, in_one_piece = 0, 1, True
    for size, offset, length in zip(
        reversed(sizes), reversed(offsets), reversed(lengths), strict=True
    ):
        if not in_one_piece and length != 1:
            return None
        in_one_piece = in_one_piece and length == size
        first += offset * whole
        whole *= size
    return first, math.prod(lengths)


def _is_range(offset: Any, length: Any) -> bool:
    return type(offset) is int and type(length) is int and offset >= 0 and length >= 0


def _coalesce(
    items: list[StoredItem], max_range_bytes: int, alone_bytes: int | None
) -> list[ByteRange]:
    items.sort(key=lambda item: (item.offset, item.length))
    ranges: list[ByteRange] = []
    for item in items:
        is_large = alone_bytes is not None and item.length >= alone_bytes
        # A range of a large item is closed to those behind it.
        last = ranges[-1] if ranges and not is_large else None
        if last is not None and alone_bytes is not None and last.items[-1].length >= alone_bytes:
            last = None
        if (
            last is not None
            and item.offset - last.stop <= MAX_GAP_BYTES
            and item.stop - last.start <= max_range_bytes
        ):
            last.items.append(item)
            ranges[-1] = last._replace(stop=max(last.stop, item.stop))
        else:
            ranges.append(ByteRange(item.offset, item.stop, [item]))
    return ranges
