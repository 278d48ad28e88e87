"""The arena's books: which segments there are, what of them is leased, what that adds up to.

Runs in: trainer. No locks and no memory: the arena holds its lock around every call here, and
opens and drops segments itself.

    opening --install--> segments --remove--> dropping --> (gone)
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import NamedTuple

from mpwriter._admission import Ledger, Plan
from mpwriter._allocator import FreeRanges, merge_ranges, slot_bytes
from mpwriter._memory import Headroom
from mpwriter._segment import AdoptedSegment, Segment
from mpwriter._types import Extent

__all__ = ["ArenaStats", "Holdings"]

# Shared by all arenas: workers know segments by their number alone.
_numbers = itertools.count(1)


class ArenaStats(NamedTuple):
    """A moment's figures; bytes are those of shared memory.

    `leased_bytes` counts extents as what they occupy, multiples of 64. `num_opened` counts segments
    from the start on: it stands still while saves find warm memory.
    """

    claimed_bytes: int
    leased_bytes: int
    peak_claimed_bytes: int
    num_segments: int
    num_leases: int
    num_opened: int


class Holdings:
    """See the module.

    Attributes:
        segments: those that leases can use, by number; opening, dropping: on their way.
        charged_bytes: size of those within the budget, opening ones included.
        leased_bytes: what is leased of those.
        claimed_bytes: size of all, opening ones included.
        forgotten: numbers of segments that went while leased; releasing in them does nothing.
    """

    def __init__(self, forgotten: Iterable[int] = ()) -> None:
        self.segments: dict[int, Segment] = {}
        self.opening: set[Segment] = set()
        self.dropping: set[Segment] = set()
        self.charged_bytes = 0
        self.leased_bytes = 0
        self.claimed_bytes = 0
        self.forgotten: set[int] = set(forgotten)
        self._peak_bytes = 0
        self._num_opened = 0
        self._by_address: tuple[list[int], list[Segment]] = ([], [])

    def ledger(self, budget_bytes: int, look: Callable[[], Headroom]) -> Ledger:
        """What the planner needs to know."""
        segments = list(self.segments.values())
        return Ledger(segments, self.charged_bytes, budget_bytes, look, _numbers)

    # -- leases ------------------------------------------------------------------------------

    def book(self, plan: Plan) -> None:
        """Enter a plan. Interrupted anywhere in here, `undo` puts it right."""
        self.remove(plan.victims)
        leased: dict[int, dict[int, int]] = {}
        for segment, start, end in plan.taken:
            segment.free.take(start, end)
            leased[segment.number] = segment.leased
            self.leased_bytes += 0 if segment.over_budget else end - start
        if plan.new is not None:
            self._book_new(plan.new, plan.new_used)
            leased[plan.new.number] = plan.new.leased
        for number, offset, nbytes in plan.extents:
            leased[number][offset] = nbytes

    def _book_new(self, segment: Segment, used: int) -> None:
        segment.free.take(0, used)
        self.opening.add(segment)
        self.claimed_bytes += segment.nbytes
        self._peak_bytes = max(self._peak_bytes, self.claimed_bytes)
        if not segment.over_budget:
            self.charged_bytes += segment.nbytes
            self.leased_bytes += used

    def undo(self, plan: Plan) -> None:
        """Take back a plan that was entered in part or in whole. Its victims stay removed."""
        self.remove(plan.victims)
        if plan.new is not None:
            self.opening.discard(plan.new)
            self.segments.pop(plan.new.number, None)
        for number, offset, _ in plan.extents:
            segment = self.segments.get(number)
            if segment is not None:
                segment.leased.pop(offset, None)
        self._recount()

    def release(self, extents: Iterable[Extent]) -> list[Segment]:
        """Take extents off their leases and join their ranges.

        Returns:
            Segments above the budget that have become idle by it.

        Raises:
            ValueError: one is not leased; then all of them still are.
        """
        ranges: dict[int, list[tuple[int, int]]] = {}
        released: list[Extent] = []
        for extent in extents:
            number, offset, nbytes = extent
            segment = self.segments.get(number)
            if segment is None and number in self.forgotten:
                continue
            if segment is None or segment.leased.get(offset) != nbytes:
                self._lease_again(released)
                raise ValueError(f"{extent} is not leased")
            del segment.leased[offset]
            released.append(extent)
            if number not in ranges:
                ranges[number] = []
            ranges[number].append((offset, offset + slot_bytes(nbytes)))
        for number, freed in ranges.items():
            self._give(self.segments[number], freed)
        touched = [self.segments[number] for number in ranges]
        return [segment for segment in touched if segment.over_budget and segment.idle]

    def _lease_again(self, extents: list[Extent]) -> None:
        for number, offset, nbytes in extents:
            self.segments[number].leased[offset] = nbytes

    def _give(self, segment: Segment, freed: list[tuple[int, int]]) -> None:
        freed.sort()
        for start, end in merge_ranges(freed):
            segment.free.give(start, end)
            self.leased_bytes -= 0 if segment.over_budget else end - start

    # -- segments ----------------------------------------------------------------------------

    def install(self, segment: Segment) -> None:
        """An opening segment is open."""
        self.opening.discard(segment)
        self.segments[segment.number] = segment
        self._num_opened += 1
        self._index()

    def adopt(self, segment: AdoptedSegment) -> None:
        """Enter another process's segment; it counts against nothing here."""
        self.segments[segment.number] = segment
        self._index()

    def let_go(self, segment: AdoptedSegment) -> None:
        """Take an adopted segment out of the books."""
        self.segments.pop(segment.number, None)
        self._index()

    def next_number(self) -> int:
        """For a segment that is made elsewhere."""
        return next(_numbers)

    def remove(self, victims: Iterable[Segment]) -> None:
        """Segments are about to be dropped. Those that are removed already are left alone."""
        for segment in victims:
            if self.segments.pop(segment.number, None) is None:
                continue
            self.dropping.add(segment)
            self.claimed_bytes -= segment.nbytes
            if not segment.over_budget:
                self.charged_bytes -= segment.nbytes
                self.leased_bytes -= segment.free.capacity_bytes - segment.free.free_bytes
            if not segment.idle:
                self.forgotten.add(segment.number)
        self._index()

    def idle_beyond(self, keep_bytes: int) -> list[Segment]:
        """Idle segments, the largest first, without which at most `keep_bytes` are claimed."""
        victims: list[Segment] = []
        left = self.claimed_bytes
        for segment in sorted(self.segments.values(), key=lambda segment: -segment.nbytes):
            if segment.idle and left > keep_bytes:
                victims.append(segment)
                left -= segment.nbytes
        return victims

    def held_bytes(self) -> int:
        """All that could be had back from here: what is claimed, and what is being dropped."""
        return self.claimed_bytes + sum(segment.nbytes for segment in self.dropping)

    def dropped(self, victims: Iterable[Segment]) -> None:
        """Removed segments have given their memory back."""
        self.dropping.difference_update(victims)

    def all_segments(self) -> list[Segment]:
        """Every segment that may hold memory."""
        return [*self.segments.values(), *self.opening, *self.dropping]

    def lookup(self, address: int) -> tuple[int, int] | None:
        """(segment, offset) of an address. May be called without the lock."""
        starts, segments = self._by_address
        at = bisect_right(starts, address) - 1
        if at < 0 or address - starts[at] >= segments[at].nbytes:
            return None
        return segments[at].number, address - starts[at]

    def stats(self) -> ArenaStats:
        segments = [*self.segments.values(), *self.opening]
        return ArenaStats(
            self.claimed_bytes,
            sum(segment.free.capacity_bytes - segment.free.free_bytes for segment in segments),
            self._peak_bytes,
            len(segments),
            sum(len(segment.leased) for segment in segments),
            self._num_opened,
        )

    def _index(self) -> None:
        segments = sorted(self.segments.values(), key=lambda segment: segment.address)
        # One assignment: `lookup` reads it without the lock.
        self._by_address = [segment.address for segment in segments], segments

    def _recount(self) -> None:
        """Work everything out anew from the tables of leases."""
        self.charged_bytes = self.leased_bytes = self.claimed_bytes = 0
        for segment in [*self.segments.values(), *self.opening]:
            if isinstance(segment, AdoptedSegment):
                continue
            self.claimed_bytes += segment.nbytes
            slots = [(start, start + slot_bytes(n)) for start, n in segment.leased.items()]
            segment.free = FreeRanges(segment.nbytes)
            for start, end in merge_ranges(sorted(slots)):
                segment.free.take(start, end)
            if not segment.over_budget:
                self.charged_bytes += segment.nbytes
                self.leased_bytes += segment.free.capacity_bytes - segment.free.free_bytes
        self._index()
