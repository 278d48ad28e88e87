"""Decides where a lease goes, what has to go for it, and whether it has to wait.

Runs in: trainer. Plans only: nothing is claimed, dropped or taken here. The arena holds its lock
while it plans and carries the plan out.

Two kinds of leases share one budget. `staged` ones hold a rank's state for a whole asynchronous
save: few requests, each of many extents, which wait for the saves before them. `window` ones are
the copy-ahead of one file: they never wait, but are content with less. They live in segments of
their own, so that a small lease never keeps a large segment from becoming free.

    staged   free ranges of staged segments; for the rest one new segment. What is idle and stands
             in the way of the budget is dropped: windows first, then the smallest segments. Idle
             ones smaller than the new one are merged into it, so their number stays logarithmic.
    window   a free range of a window segment; a new segment; a free range of a staged segment;
             the largest of these that is at least the minimum; the minimum above the budget. Only
             the last one while a staged lease waits: windows must not starve it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from mpwriter._allocator import ALIGNMENT, Packing, pack, slot_bytes
from mpwriter._memory import Headroom
from mpwriter._segment import Segment, margin_bytes
from mpwriter._types import Extent

__all__ = ["Ledger", "Plan", "plan_staged", "plan_window"]

# New segments are multiples of this where the budget allows, so that small leases share them.
_GRANULE_BYTES = 2 << 20


@dataclass
class Plan:
    """How to serve one request.

    Attributes:
        extents: in the order of the request.
        taken: (segment, start, end) of free ranges that are used up.
        victims: idle segments to drop first.
        new: a segment to open, of which the first `new_used` bytes are used up.
    """

    extents: list[Extent]
    taken: list[tuple[Segment, int, int]] = field(default_factory=list)
    victims: list[Segment] = field(default_factory=list)
    new: Segment | None = None
    new_used: int = 0


class Ledger:
    """What there is, as the planner sees it.

    Args:
        segments: the living ones.
        charged_bytes: size of all segments within the budget, those being opened included.
        budget_bytes: what they may come to.
        look: tells what the system can still give; asked once, and only if needed.
        numbers: where the number of a new segment comes from, if there is one.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        charged_bytes: int,
        budget_bytes: int,
        look: Callable[[], Headroom],
        numbers: Iterator[int],
    ) -> None:
        self.segments = segments
        self.charged_bytes = charged_bytes
        self.budget_bytes = budget_bytes
        self._look = functools.cache(look)
        self._number = functools.cache(lambda: next(numbers))

    @property
    def number(self) -> int:
        """The number of the new segment."""
        return self._number()

    def room_bytes(self, victims: Iterable[Segment]) -> int:
        """The largest segment that could be opened once `victims` are dropped; may be negative."""
        freed = charged_freed = 0
        for segment in victims:
            freed += segment.nbytes
            charged_freed += 0 if segment.over_budget else segment.nbytes
        room = self.budget_bytes - self.charged_bytes + charged_freed
        return room if room <= 0 else min(room, self.system_room_bytes(freed))

    def system_room_bytes(self, freed_bytes: int) -> int:
        """The largest segment that the system has memory for once `freed_bytes` are given back."""
        left = self._look().nbytes + freed_bytes
        return max(0, left - margin_bytes(left))

    def of_kind(self, kind: str) -> list[Segment]:
        """Segments of one kind within the budget."""
        return [s for s in self.segments if s.kind == kind and not s.over_budget]


# -- staged leases ---------------------------------------------------------------------------


def plan_staged(sizes: Sequence[int], slots: Sequence[int], ledger: Ledger) -> Plan | None:
    """Serve `sizes` together.

    Args:
        sizes: bytes of each extent; slots: what each occupies.

    Returns:
        None where it cannot be done before something is released.
    """
    staged = ledger.of_kind("staged")
    idle = sorted((s for s in staged if s.idle), key=lambda s: (s.nbytes, s.number))
    spare = [s for s in ledger.of_kind("window") if s.idle] + idle
    victims: list[Segment] = []
    attempt = _Attempt(slots, staged, victims)
    while merged := [s for s in idle if s.nbytes <= attempt.shortfall and s not in victims]:
        victims.extend(merged)
        attempt = _Attempt(slots, staged, victims)
    for segment in spare:
        if attempt.fits(ledger, victims):
            break
        if segment not in victims:
            victims.append(segment)
            if segment.kind == "staged":
                attempt = _Attempt(slots, staged, victims)
    if not attempt.fits(ledger, victims):
        return None
    return attempt.plan(sizes, ledger, victims)


class _Attempt:
    """Where the slots go when `victims` are not there."""

    def __init__(
        self, slots: Sequence[int], segments: list[Segment], victims: list[Segment]
    ) -> None:
        ranges = [
            (end - start, segment.number, start, segment)
            for segment in segments
            if segment not in victims
            for start, end in segment.free.ranges()
        ]
        # Smallest range first: what is large and free stays so.
        ranges.sort(key=lambda found: found[:3])
        self._owners = [segment for *_, segment in ranges]
        bounds = [(start, start + length) for length, _, start, _ in ranges]
        self._packing: Packing = pack(slots, bounds)
        self.shortfall = self._packing.shortfall_bytes

    def fits(self, ledger: Ledger, victims: list[Segment]) -> bool:
        if not self.shortfall:
            freed = sum(segment.nbytes for segment in victims)
            return ledger.charged_bytes - freed <= ledger.budget_bytes
        return self.shortfall <= ledger.room_bytes(victims)

    def plan(self, sizes: Sequence[int], ledger: Ledger, victims: list[Segment]) -> Plan:
        numbers = [segment.number for segment in self._owners]
        numbers.append(ledger.number)
        places: list[Extent] = [_NOWHERE] * len(sizes)
        make = tuple.__new__  # a third of the time of calling the NamedTuple
        for target, start, slot, indices in self._packing.runs:
            number = numbers[target]
            for index in indices:
                places[index] = make(Extent, (number, start, sizes[index]))
                start += slot
        owners = self._owners
        plan = Plan(places, [(owners[t], start, end) for t, start, end in self._packing.taken])
        plan.victims = victims
        if self.shortfall:
            plan.new_used = self.shortfall
            plan.new = _new_segment(self.shortfall, "staged", ledger, victims)
        return plan


_NOWHERE = Extent(0, 0, 0)


# -- windows ---------------------------------------------------------------------------------


def plan_window(nbytes: int, least: int, ledger: Ledger, *, frugal: bool, grow: bool) -> Plan:
    """Serve one window of `nbytes`, or of anything down to `least`.

    Args:
        frugal: a staged lease waits: take nothing that it could use.
        grow: whether new segments within the budget may be opened.
    """
    over = [s for s in ledger.segments if s.over_budget]
    if frugal:
        return _minimum(nbytes, least, over, ledger)
    windows, staged = ledger.of_kind("window"), ledger.of_kind("staged")
    victims = _surplus(windows, staged, ledger)
    staged = [s for s in staged if s not in victims]
    windows = [s for s in windows if s not in victims]
    slot = slot_bytes(nbytes)
    plan = _carve(nbytes, slot, windows, victims)
    if plan is None and grow:
        plan = _grow(nbytes, slot, windows, victims, ledger)
    if plan is None:
        plan = _carve(nbytes, slot, staged, victims)
    if plan is None:
        plan = _largest(slot_bytes(least), windows, staged, victims, ledger, grow=grow)
    if plan is None:
        plan = _minimum(nbytes, least, over, ledger)
        plan.victims = victims
    return plan


def _surplus(windows: list[Segment], staged: list[Segment], ledger: Ledger) -> list[Segment]:
    """Idle segments to drop because a budget is now smaller than what an earlier one allowed."""
    victims: list[Segment] = []
    excess = ledger.charged_bytes - ledger.budget_bytes
    idle = [s for s in staged if s.idle] + [s for s in windows if s.idle]
    for segment in sorted(idle, key=lambda s: (s.kind != "staged", -s.nbytes)):
        if excess > 0:
            victims.append(segment)
            excess -= segment.nbytes
    return victims


def _carve(nbytes: int, slot: int, segments: list[Segment], victims: list[Segment]) -> Plan | None:
    """Take the tightest free range that holds `slot` bytes."""
    fitting = [
        (found[1] - found[0], segment.number, found[0], segment)
        for segment in segments
        if (found := segment.free.best_fit(slot))
    ]
    if not fitting:
        return None
    _, number, start, segment = min(fitting, key=lambda found: found[:3])
    plan = Plan([Extent(number, start, nbytes)], [(segment, start, start + slot)])
    plan.victims = victims
    return plan


def _grow(
    nbytes: int, slot: int, windows: list[Segment], victims: list[Segment], ledger: Ledger
) -> Plan | None:
    """Open a segment; idle windows too small for the request go for it."""
    too_small = [s for s in windows if s.idle and s.nbytes < slot]
    doomed = victims + too_small
    if slot > ledger.room_bytes(doomed):
        return None
    new = _new_segment(slot, "window", ledger, doomed)
    return Plan([Extent(new.number, 0, nbytes)], [], doomed, new, slot)


def _largest(
    least: int,
    windows: list[Segment],
    staged: list[Segment],
    victims: list[Segment],
    ledger: Ledger,
    *,
    grow: bool,
) -> Plan | None:
    """The longest stretch to be had anywhere, if it has at least `least` bytes."""
    room = ledger.room_bytes(victims) if grow else 0
    found = max((s.free.largest_bytes() for s in windows + staged), default=0)
    longest = max(room, found) & -ALIGNMENT
    if longest < least:
        return None
    if longest > found:
        return _grow(longest, longest, [], victims, ledger)
    return _carve(longest, longest, windows + staged, victims)


def _minimum(nbytes: int, least: int, over: list[Segment], ledger: Ledger) -> Plan:
    """The least that will do, beside the budget."""
    least = min(nbytes, least)
    slot = slot_bytes(least)
    plan = _carve(least, slot, over, [])
    if plan is not None:
        return plan
    new = Segment(ledger.number, slot, "window", over_budget=True)
    return Plan([Extent(new.number, 0, least)], [], [], new, slot)


def _new_segment(used: int, kind: str, ledger: Ledger, victims: list[Segment]) -> Segment:
    rounded = -(-used // _GRANULE_BYTES) * _GRANULE_BYTES
    nbytes = max(used, min(rounded, ledger.room_bytes(victims)))
    return Segment(ledger.number, nbytes, kind)
