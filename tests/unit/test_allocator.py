"""Free ranges and packing: pure bookkeeping."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpwriter._allocator import FreeRanges, merge_ranges, pack, slot_bytes

SLOTS = st.integers(1, 30).map(lambda n: n * 64)


@pytest.mark.parametrize(
    ("nbytes", "slot"), [(0, 64), (1, 64), (64, 64), (65, 128), (128, 128), (4097, 4160)]
)
def test_slot_bytes_is_the_next_multiple_of_64_when_rounded(nbytes: int, slot: int) -> None:
    assert slot_bytes(nbytes) == slot


def test_take_splits_a_range_when_it_is_inside_of_it() -> None:
    free = FreeRanges(1000)  # 960: the rest is no whole slot
    free.take(128, 256)
    assert free.ranges() == [(0, 128), (256, 960)]
    assert free.free_bytes == 832
    assert free.largest_bytes() == 704


def test_give_joins_both_neighbours_when_they_are_free() -> None:
    free = FreeRanges(640)
    free.take(0, 640)
    for start, end in [(0, 64), (128, 192), (576, 640), (64, 128)]:
        free.give(start, end)
    assert free.ranges() == [(0, 192), (576, 640)]


@pytest.mark.parametrize(("start", "end"), [(0, 640), (64, 192), (192, 256), (0, 0), (600, 700)])
def test_take_is_refused_when_not_all_of_it_is_free(start: int, end: int) -> None:
    free = FreeRanges(640)
    free.take(128, 256)
    with pytest.raises(ValueError, match="not free"):
        free.take(start, end)


@pytest.mark.parametrize(("start", "end"), [(0, 64), (64, 192), (192, 320), (704, 768), (192, 192)])
def test_give_is_refused_when_it_was_not_taken(start: int, end: int) -> None:
    free = FreeRanges(640)
    free.take(128, 256)
    with pytest.raises(ValueError, match="not taken"):
        free.give(start, end)


def test_best_fit_is_the_tightest_range_when_several_fit() -> None:
    free = FreeRanges(64 * 20)
    free.take(64 * 5, 64 * 6)
    free.take(64 * 9, 64 * 10)
    assert free.best_fit(64 * 3) == (64 * 6, 64 * 9)
    assert free.best_fit(64 * 4) == (0, 64 * 5)
    assert free.best_fit(64 * 11) is None


@given(st.lists(SLOTS, max_size=60), st.integers(0, 2**32))
def test_free_ranges_are_whole_again_when_all_was_given_back(slots: list[int], seed: int) -> None:
    free = FreeRanges(64 * 500)
    taken: list[tuple[int, int]] = []
    for slot in slots:
        found = free.best_fit(slot)
        if found is not None:
            free.take(found[0], found[0] + slot)
            assert all(end <= found[0] or found[0] + slot <= start for start, end in taken)
            taken.append((found[0], found[0] + slot))
    assert free.free_bytes + sum(end - start for start, end in taken) == free.capacity_bytes
    random.Random(seed).shuffle(taken)
    for start, end in taken:
        free.give(start, end)
    assert free.ranges() == [(0, 64 * 500)]


@given(st.lists(SLOTS, max_size=80), st.lists(SLOTS, max_size=10))
def test_pack_places_each_slot_once_when_ranges_are_given(
    slots: list[int], lengths: list[int]
) -> None:
    ranges = [(i * 10_048, i * 10_048 + length) for i, length in enumerate(lengths)]
    packing = pack(slots, ranges)
    places: dict[int, tuple[int, int, int]] = {}
    for target, start, slot, indices in packing.runs:
        for position, index in enumerate(indices):
            assert index not in places
            assert slots[index] == slot
            places[index] = (target, start + position * slot, start + (position + 1) * slot)
    assert sorted(places) == list(range(len(slots)))
    bounds = [*ranges, (0, packing.shortfall_bytes)]
    ordered = sorted(places.values())
    for (target, start, end), following in zip(ordered, [*ordered[1:], None]):
        assert bounds[target][0] <= start < end <= bounds[target][1]
        assert following is None or following[0] > target or following[1] >= end
    assert packing.shortfall_bytes == sum(e - s for t, s, e in ordered if t == len(ranges))
    for target, start, end in packing.taken:
        assert start == ranges[target][0]
        assert end == max(e for t, _, e in ordered if t == target)


@given(st.lists(SLOTS, max_size=40), st.lists(SLOTS, min_size=1, max_size=6))
def test_pack_leaves_nothing_over_when_a_range_holds_it(
    slots: list[int], lengths: list[int]
) -> None:
    ranges = [(0, sum(slots) or 64), *((10**6 + i, 10**6 + i + n) for i, n in enumerate(lengths))]
    packing = pack(slots, ranges)
    assert packing.shortfall_bytes == 0
    assert len({run.target for run in packing.runs}) <= 1


def test_pack_is_the_same_again_when_asked_again() -> None:
    slots = [64, 128, 64, 640, 128] * 5
    assert pack(slots, [(0, 640), (1280, 1920)]) == pack(slots, [(0, 640), (1280, 1920)])


@given(st.lists(st.tuples(st.booleans(), SLOTS), max_size=30))
def test_merge_ranges_joins_what_touches_when_sorted(steps: list[tuple[bool, int]]) -> None:
    ranges, at = [], 0
    for gap, length in steps:
        at += 64 * gap
        ranges.append((at, at + length))
        at += length
    merged = merge_ranges(ranges)
    assert sum(e - s for s, e in merged) == sum(e - s for s, e in ranges)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(merged))
