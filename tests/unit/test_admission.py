"""Where leases go and what has to go for them; no memory is claimed here."""

from __future__ import annotations

import pytest

from mpwriter._admission import Ledger, Plan, plan_staged, plan_window
from mpwriter._allocator import slot_bytes
from mpwriter._holdings import Holdings
from mpwriter._memory import Headroom
from mpwriter._types import Extent

MIB = 1 << 20
PLENTY = 1 << 40


class Books:
    """Holdings whose plans are carried out at once, with segments of no memory."""

    def __init__(self, budget: int, available: int = PLENTY) -> None:
        self.budget = budget
        self.available = available
        self.holdings = Holdings()

    def ledger(self) -> Ledger:
        return self.holdings.ledger(self.budget, lambda: Headroom(self.available, "a test"))

    def carry_out(self, plan: Plan) -> list[Extent]:
        self.holdings.book(plan)
        self.holdings.dropped(plan.victims)
        if plan.new is not None:
            self.holdings.install(plan.new)
        return plan.extents

    def staged(self, *sizes: int) -> list[Extent] | None:
        plan = plan_staged(sizes, [slot_bytes(n) for n in sizes], self.ledger())
        return None if plan is None else self.carry_out(plan)

    def window(self, nbytes: int, least: int = MIB, *, frugal: bool = False) -> Extent:
        plan = plan_window(nbytes, least, self.ledger(), frugal=frugal, grow=True)
        return self.carry_out(plan)[0]

    def segments(self) -> list[tuple[str, int]]:
        """(kind, MiB) of each; those above the budget are called "over"."""
        living = self.holdings.segments.values()
        return sorted(("over" if s.over_budget else s.kind, s.nbytes // MIB) for s in living)

    def release(self, *extents: Extent) -> None:
        self.holdings.remove(self.holdings.release(extents))


def only(extents: list[Extent] | None) -> Extent:
    assert extents is not None
    assert len(extents) == 1
    return extents[0]


def test_staged_leases_share_a_segment_when_there_is_none_yet() -> None:
    books = Books(64 * MIB)
    extents = books.staged(3 * MIB, 100, 0, 5 * MIB)
    assert extents is not None
    assert [extent.nbytes for extent in extents] == [3 * MIB, 100, 0, 5 * MIB]
    assert len({extent.segment for extent in extents}) == 1
    assert all(extent.offset % 64 == 0 for extent in extents)
    assert books.segments() == [("staged", 10)]


def test_staged_leases_need_nothing_new_when_the_last_ones_were_released() -> None:
    books = Books(64 * MIB)
    first = books.staged(3 * MIB, 100, 5 * MIB)
    assert first is not None
    books.release(*first)
    assert books.staged(3 * MIB, 100, 5 * MIB) == first


def test_new_segment_is_not_rounded_up_when_the_budget_ends() -> None:
    books = Books(5 * MIB + 640)
    assert books.staged(5 * MIB + 600) is not None
    assert books.holdings.charged_bytes == 5 * MIB + 640


def test_staged_lease_has_to_wait_when_the_budget_is_leased() -> None:
    books = Books(8 * MIB)
    first = only(books.staged(6 * MIB))
    assert books.staged(4 * MIB) is None
    books.release(first)
    assert books.staged(4 * MIB) is not None
    assert books.segments() == [("staged", 6)]


def test_idle_segments_are_replaced_by_a_large_one_when_it_would_not_fit_beside_them() -> None:
    books = Books(10 * MIB)
    books.release(*[only(books.staged(n * MIB)) for n in (2, 6)])
    assert only(books.staged(9 * MIB)).nbytes == 9 * MIB
    assert books.holdings.charged_bytes <= 10 * MIB


def test_idle_windows_go_first_when_a_staged_lease_needs_the_budget() -> None:
    books = Books(16 * MIB)
    books.release(only(books.staged(6 * MIB)))
    books.release(books.window(4 * MIB))
    assert books.staged(6 * MIB, 8 * MIB) is not None
    assert ("window", 4) not in books.segments()
    assert books.holdings.charged_bytes <= 16 * MIB


def test_smaller_idle_segments_are_merged_when_a_new_one_is_opened() -> None:
    """D08."""
    books = Books(1024 * MIB)
    books.release(only(books.staged(10 * MIB)))
    extent = only(books.staged(200 * MIB))
    assert books.segments() == [("staged", 200)]
    books.release(extent)
    books.release(only(books.staged(MIB)))
    assert books.segments() == [("staged", 200)]


def test_number_of_segments_stays_small_when_the_state_grows_with_every_save() -> None:
    books = Books(PLENTY)
    for size in range(100, 600, 4):
        books.release(*(books.staged(*[MIB] * size) or []))
        assert len(books.segments()) <= 8
        assert books.holdings.claimed_bytes <= (size + 4) * MIB


def test_staged_lease_has_to_wait_when_the_system_has_no_memory() -> None:
    books = Books(PLENTY, available=100 * MIB)
    assert books.staged(200 * MIB) is None
    assert books.staged(90 * MIB) is None  # leaves no margin
    assert books.staged(60 * MIB) is not None


def test_idle_segment_is_dropped_when_the_system_has_no_memory_beside_it() -> None:
    books = Books(PLENTY, available=300 * MIB)
    books.release(only(books.staged(200 * MIB)))
    books.available = 100 * MIB
    assert books.staged(240 * MIB) is not None
    assert books.segments() == [("staged", 240)]


def test_staged_lease_shrinks_the_arena_when_its_budget_is_smaller_than_the_last_one() -> None:
    books = Books(100 * MIB)
    books.release(only(books.staged(80 * MIB)))
    books.budget = 20 * MIB
    assert books.staged(10 * MIB) is not None
    assert books.holdings.charged_bytes <= 20 * MIB


def test_staged_lease_has_to_wait_when_larger_budgets_hold_more_than_its_own() -> None:
    books = Books(100 * MIB)
    large = only(books.staged(80 * MIB))
    books.budget = 20 * MIB
    assert books.staged(10 * MIB) is None
    books.release(large)
    assert books.staged(10 * MIB) is not None


def test_window_is_warm_when_one_of_its_size_was_released() -> None:
    books = Books(100 * MIB)
    first = books.window(8 * MIB)
    books.release(first)
    assert books.window(8 * MIB) == first


def test_windows_are_apart_from_staged_extents_when_the_budget_has_room() -> None:
    books = Books(100 * MIB)
    books.release(only(books.staged(20 * MIB)))
    books.window(8 * MIB)
    assert books.segments() == [("staged", 20), ("window", 8)]


def test_small_windows_share_a_segment_when_they_fit() -> None:
    books = Books(100 * MIB)
    windows = [books.window(64 * 1024) for _ in range(8)]
    assert len({window.offset for window in windows}) == 8
    assert books.segments() == [("window", 2)]


def test_window_lies_in_a_warm_staged_segment_when_the_budget_has_no_room_beside_it() -> None:
    books = Books(24 * MIB)
    books.release(only(books.staged(20 * MIB)))
    window = books.window(8 * MIB)
    assert window.nbytes == 8 * MIB
    assert books.segments() == [("staged", 20)]


def test_window_gets_less_when_the_budget_leaves_less() -> None:
    books = Books(24 * MIB)
    books.staged(20 * MIB)
    window = books.window(64 * MIB, least=MIB)
    assert MIB <= window.nbytes <= 4 * MIB
    assert books.holdings.charged_bytes <= 24 * MIB


def test_window_gets_the_minimum_when_staged_leases_hold_the_whole_budget() -> None:
    books = Books(24 * MIB)
    books.staged(24 * MIB)
    windows = [books.window(64 * MIB, least=MIB) for _ in range(3)]
    assert [window.nbytes for window in windows] == [MIB] * 3
    assert books.holdings.charged_bytes == 24 * MIB
    books.release(*windows)
    assert books.segments() == [("staged", 24)]  # what is above the budget is not kept


def test_window_gets_the_minimum_when_the_budget_is_a_byte() -> None:
    books = Books(1)
    assert books.window(64 * MIB, least=4096).nbytes == 4096
    assert books.window(100, least=4096).nbytes == 100


def test_window_takes_nothing_of_the_budget_when_a_staged_lease_waits() -> None:
    books = Books(24 * MIB)
    books.release(books.window(8 * MIB))
    window = books.window(8 * MIB, least=MIB, frugal=True)
    assert window.nbytes == MIB
    assert books.staged(24 * MIB) is not None


def test_window_is_larger_than_the_last_one_when_asked_for_more() -> None:
    books = Books(100 * MIB)
    books.release(books.window(8 * MIB))
    assert books.window(32 * MIB).nbytes == 32 * MIB
    assert books.segments() == [("window", 32)]


def test_window_drops_idle_memory_when_its_budget_is_smaller_than_the_last_one() -> None:
    books = Books(100 * MIB)
    books.release(only(books.staged(80 * MIB)))
    books.budget = 20 * MIB
    assert books.window(8 * MIB).nbytes == 8 * MIB
    assert books.holdings.charged_bytes <= 20 * MIB


def test_release_is_refused_as_a_whole_when_one_extent_is_not_leased() -> None:
    books = Books(24 * MIB)
    extents = books.staged(100, 200, 300)
    assert extents is not None
    number = extents[0].segment
    for wrong in (Extent(number, 64, 1), Extent(number, 6400, 100), Extent(10**9, 0, 64)):
        with pytest.raises(ValueError, match="not leased"):
            books.release(*extents, wrong)
    with pytest.raises(ValueError, match="not leased"):
        books.release(extents[0], extents[0])
    books.release(*extents)
    assert books.holdings.leased_bytes == 0
    with pytest.raises(ValueError, match="not leased"):
        books.release(extents[0])


@pytest.mark.parametrize("step", ["take", "new", "lease"])
def test_undo_restores_the_books_when_a_plan_was_entered_in_part(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    books = Books(64 * MIB)
    kept, released = books.staged(2 * MIB, 4 * MIB) or []
    books.release(released)
    plan = plan_staged([4 * MIB, 8 * MIB], [4 * MIB, 8 * MIB], books.ledger())
    assert plan is not None
    assert plan.taken
    assert plan.new is not None
    with monkeypatch.context() as patch:
        if step == "take":
            patch.setattr(Holdings, "_book_new", _interrupt)
        elif step == "new":
            plan.extents.append(Extent(-1, 0, 0))
        else:
            patch.setattr(Holdings, "remove", _interrupt)
        with pytest.raises((KeyboardInterrupt, KeyError)):
            books.holdings.book(plan)
    books.holdings.undo(plan)
    holdings = books.holdings
    assert holdings.stats()[:2] == (6 * MIB, 2 * MIB)
    assert (holdings.charged_bytes, holdings.leased_bytes) == (6 * MIB, 2 * MIB)
    books.release(kept)
    (segment,) = holdings.segments.values()
    assert segment.free.ranges() == [(0, 6 * MIB)]


def _interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def test_segment_numbers_never_recur_when_books_are_made_anew() -> None:
    numbers = [only(Books(MIB).staged(64)).segment for _ in range(3)]
    assert sorted(set(numbers)) == numbers
