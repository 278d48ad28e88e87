"""What has to be read of which file, for one load plan. Pure.

Runs in: trainer.

    ReadItem*  --same place-->  StoredItem*  --close together-->  ByteRange*   for each file

One item of a file is read and decoded once, whoever asks for it: several slices of it, or several
keys that were tied when they were saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem

from mpwriter.errors import CorruptCheckpointError

__all__ = ["MAX_GAP_BYTES", "MAX_RANGE_BYTES", "ByteRange", "StoredItem", "plan_reads"]

# Two items this close are read together. Source: max_gap of fsspec.parquet. Locally, 64 KiB take as
# long to read from the page cache (at 8 GiB/s) as a second seek and read take in Python.
MAX_GAP_BYTES = 64 * 2**10
# Neighbours are not joined beyond this. Source: range_size_limit of Arrow's CacheOptions.
MAX_RANGE_BYTES = 32 * 2**20


class StoredItem(NamedTuple):
    """`length` bytes at `offset` of a file, and all reads that they serve."""

    offset: int
    length: int
    descriptors: tuple[str, ...]  # of the stream transforms that the bytes went through
    reads: list[ReadItem]

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
    reads: Iterable[ReadItem], places: Mapping[MetadataIndex, Any]
) -> dict[str, list[ByteRange]]:
    """Find out what has to be read of which file.

    Args:
        reads: the items of a load plan.
        places: Metadata.storage_data.

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
    return {name: _coalesce(list(items.values())) for name, items in files.items()}


def _is_range(offset: Any, length: Any) -> bool:
    return type(offset) is int and type(length) is int and offset >= 0 and length >= 0


def _coalesce(items: list[StoredItem]) -> list[ByteRange]:
    items.sort(key=lambda item: (item.offset, item.length))
    ranges: list[ByteRange] = []
    for item in items:
        last = ranges[-1] if ranges else None
        if (
            last is not None
            and item.offset - last.stop <= MAX_GAP_BYTES
            and item.stop - last.start <= MAX_RANGE_BYTES
        ):
            last.items.append(item)
            ranges[-1] = last._replace(stop=max(last.stop, item.stop))
        else:
            ranges.append(ByteRange(item.offset, item.stop, [item]))
    return ranges
