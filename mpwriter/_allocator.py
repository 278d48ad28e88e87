"""Bookkeeping of byte ranges: which are free, and where many sizes go.

Runs in: trainer. Pure: no memory is touched here, no locks are taken, torch is not imported.

Every range starts and ends at a multiple of 64 bytes, the alignment that torch gives its own CPU
tensors and that payloads have in the files.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["ALIGNMENT", "FreeRanges", "Packing", "Run", "merge_ranges", "pack", "slot_bytes"]

# Source: c10::gAlignment, what torch aligns CPU tensors to.
ALIGNMENT = 64


def slot_bytes(nbytes: int) -> int:
    """Bytes that an extent of `nbytes` occupies; an empty one takes a slot too, to be unique."""
    return (nbytes + 63) & ~63 or ALIGNMENT


class FreeRanges:
    """The free half-open ranges of one segment: sorted, apart from each other, aligned.

    Thread safety: none, the arena's lock is held around it.
    """

    __slots__ = ("_ends", "_starts", "capacity_bytes", "free_bytes")

    def __init__(self, nbytes: int) -> None:
        self.capacity_bytes = nbytes & ~63
        self.free_bytes = self.capacity_bytes
        self._starts = [0] if self.capacity_bytes else []
        self._ends = [self.capacity_bytes] if self.capacity_bytes else []

    def ranges(self) -> list[tuple[int, int]]:
        """(start, end) of every free range, by address."""
        return list(zip(self._starts, self._ends))

    def best_fit(self, nbytes: int) -> tuple[int, int] | None:
        """(start, end) of the smallest range of at least `nbytes`, None if there is none."""
        fitting = [(end - start, start) for start, end in self.ranges() if end - start >= nbytes]
        if not fitting:
            return None
        length, start = min(fitting)
        return start, start + length

    def largest_bytes(self) -> int:
        """Length of the longest free range."""
        return max((end - start for start, end in self.ranges()), default=0)

    def take(self, start: int, end: int) -> None:
        """Take a range away.

        Raises:
            ValueError: not all of it is free.
        """
        at = bisect_right(self._starts, start) - 1
        if at < 0 or start >= end or end > self._ends[at]:
            raise ValueError(f"bytes {start} to {end} are not free")
        left, right = self._starts[at], self._ends[at]
        self._starts[at : at + 1] = [left] * (left < start) + [end] * (end < right)
        self._ends[at : at + 1] = [start] * (left < start) + [right] * (end < right)
        self.free_bytes -= end - start

    def give(self, start: int, end: int) -> None:
        """Give a range back and join it with its free neighbours.

        Raises:
            ValueError: some of it is free already, or outside of the segment.
        """
        at = bisect_left(self._starts, start)
        overlaps_left = at > 0 and self._ends[at - 1] > start
        overlaps_right = at < len(self._starts) and self._starts[at] < end
        if overlaps_left or overlaps_right or not 0 <= start < end <= self.capacity_bytes:
            raise ValueError(f"bytes {start} to {end} were not taken")
        joins_left = at > 0 and self._ends[at - 1] == start
        joins_right = at < len(self._starts) and self._starts[at] == end
        first, last = at - joins_left, at + joins_right
        self._starts[first:last] = [self._starts[first] if joins_left else start]
        self._ends[first:last] = [self._ends[last - 1] if joins_right else end]
        self.free_bytes += end - start


class Run(NamedTuple):
    """Slots of one size, one after the other from `start`: those of `indices`, in that order."""

    target: int  # index of the range; the number of ranges for what fits in none of them
    start: int
    slot: int
    indices: list[int]


class Packing(NamedTuple):
    runs: list[Run]
    taken: list[tuple[int, int, int]]  # (index of the range, start, end)
    shortfall_bytes: int  # what fits in none of the ranges


def pack(slots: Sequence[int], ranges: Sequence[tuple[int, int]]) -> Packing:
    """Lay `slots` (multiples of 64) into free `ranges`, taken in the given order.

    First fit decreasing: each range gets, from its start, the largest slots that still fit. What is
    left over forms runs behind the last range, from offset 0, as a new segment would hold them.
    The same slots and ranges give the same places, so a repeated save touches the same pages.

    Costs about 0.1 us a slot where sizes recur, plus about 1 us a distinct size and a range.
    """
    by_size: dict[int, list[int]] = {}
    for index, slot in enumerate(slots):
        if slot in by_size:
            by_size[slot].append(index)
        else:
            by_size[slot] = [index]
    sizes = sorted(by_size)
    runs: list[Run] = []
    taken: list[tuple[int, int, int]] = []
    for target, (start, end) in enumerate(ranges):
        if not sizes:
            break
        filled = _fill(target, start, end, sizes, by_size, runs)
        if filled > start:
            taken.append((target, start, filled))
    total = sum(size * len(by_size[size]) for size in sizes)
    _fill(len(ranges), 0, total, sizes, by_size, runs)
    return Packing(runs, taken, total)


def _fill(
    target: int,
    start: int,
    end: int,
    sizes: list[int],
    by_size: dict[int, list[int]],
    runs: list[Run],
) -> int:
    """Fill one range; takes from `sizes` and `by_size`, adds to `runs`, returns the new start."""
    while sizes:
        at = bisect_right(sizes, end - start) - 1
        if at < 0:
            break
        size = sizes[at]
        waiting = by_size[size]
        num_slots = min(len(waiting), (end - start) // size)
        # From the end: cutting the front off would copy the rest once for every range.
        runs.append(Run(target, start, size, waiting[-num_slots:]))
        del waiting[-num_slots:]
        start += num_slots * size
        if not waiting:
            del sizes[at]
    return start


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that touch; `ranges` come sorted and do not overlap."""
    merged: list[tuple[int, int]] = []
    left = right = -1
    for start, end in ranges:
        if start == right:
            right = end
            continue
        if right > left:
            merged.append((left, right))
        left, right = start, end
    if right > left:
        merged.append((left, right))
    return merged
