"""The arena as its users see it: leases, waiting, warm memory, forks, threads."""

from __future__ import annotations

import itertools
import os
import random
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mpwriter import _arena
from mpwriter._allocator import slot_bytes
from mpwriter._arena import Arena, arena_unavailable_reason, get_arena
from mpwriter._memory import Headroom
from mpwriter._types import Extent
from mpwriter.errors import StagingMemoryError
from tests.unit.test_segment import FakePinner, in_fork, mapped_segments, open_fds

MIB = 1 << 20
PATIENCE_S = 30.0  # for what happens at once


def plenty() -> Headroom:
    return Headroom(1 << 40, "a test")


@pytest.fixture
def arena() -> Iterator[Arena]:
    """An arena of 16 MiB, of which nothing may be left."""
    fds, segments = open_fds(), mapped_segments()
    found = Arena(16 * MIB, look=plenty)
    yield found
    found.close()
    assert open_fds() <= fds  # a client of another test may close a connection meanwhile
    assert mapped_segments() == segments


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Start `work`; its result, or what it raised, ends up in the list."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as exc:
            outcome.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def is_waiting(arena: Arena, num_leases: int = 1) -> Callable[[], bool]:
    return lambda: len(arena._queue) == num_leases


# -- memory behind extents ---------------------------------------------------------------------


def test_lease_gives_zeroed_or_used_memory_of_the_right_size_when_there_is_room(
    arena: Arena,
) -> None:
    for nbytes in (0, 1, 63, 64, 65, 4096, 3 * MIB + 1):
        extent = arena.lease(nbytes)
        assert extent.nbytes == nbytes
        assert extent.offset % 64 == 0
        assert arena.tensor(extent).data_ptr() % 64 == 0
        assert arena.tensor(extent).numel() == len(arena.buffer(extent)) == nbytes


def test_extents_keep_their_bytes_when_many_lie_side_by_side(arena: Arena) -> None:
    """E01: misaligned sizes side by side."""
    sizes = [n % 257 for n in range(5000)]
    extents = arena.lease_many(sizes)
    for number, extent in enumerate(extents):
        arena.tensor(extent).fill_(number % 251)
    for number, extent in enumerate(extents):
        assert bytes(arena.buffer(extent)) == bytes([number % 251]) * sizes[number]


def test_num_fds_is_that_of_one_segment_when_many_extents_are_leased(arena: Arena) -> None:
    """D03."""
    before = len(open_fds())
    for _ in range(10):
        arena.release_many(arena.lease_many([100] * 5000))
    assert len(open_fds()) <= before + 2  # the memfd, and torch's own copy of it


def test_lease_many_of_nothing_gives_nothing_when_asked(arena: Arena) -> None:
    assert arena.lease_many([]) == []
    arena.release_many([])
    assert arena.stats().claimed_bytes == 0


def test_second_save_touches_no_new_pages_when_the_first_was_released(arena: Arena) -> None:
    sizes = [random.Random(1).randrange(1, 10_000) for _ in range(1500)]
    first = arena.lease_many(sizes)
    for extent in first:
        arena.tensor(extent).fill_(1)
    arena.release_many(random.Random(2).sample(first, len(first)))
    second = arena.lease_many(sizes)
    assert second == first
    views = [arena.tensor(extent) for extent in second]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for view in views:
        view.fill_(2)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 200  # of 1800 pages
    assert arena.stats().num_opened == 1


def test_memory_follows_the_state_when_its_size_changes_between_saves() -> None:
    """D08."""
    arena = Arena(64 * MIB, look=plenty)
    claimed = []
    for size in (MIB, 20 * MIB, MIB // 10, 0, 20 * MIB, 5 * MIB, 20 * MIB):
        extents = arena.lease_many([size // 7] * 7)
        for number, extent in enumerate(extents):
            arena.tensor(extent).fill_(number)
        for number, extent in enumerate(extents):
            assert bytes(arena.buffer(extent)[-3:]) == bytes([number] * min(3, size // 7))
        arena.release_many(extents)
        claimed.append(arena.stats().claimed_bytes)
    assert max(claimed) <= 22 * MIB
    assert arena.stats().num_opened == 2
    arena.close()


def test_nothing_lies_in_dev_shm_when_memory_is_leased(arena: Arena) -> None:
    """D01: the size of /dev/shm does not matter."""
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    arena.lease(4 * MIB)
    assert arena_unavailable_reason() is None
    assert (set(os.listdir("/dev/shm")) if before else set()) <= before


def test_reserve_leaves_warm_memory_when_it_fits(arena: Arena) -> None:
    arena.reserve(5 * MIB)
    extents = arena.lease_many([MIB] * 5)
    assert arena.stats().num_opened == 1
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for extent in extents:
        arena.tensor(extent).fill_(1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 200


# -- addresses ---------------------------------------------------------------------------------


def test_find_gives_the_extent_when_the_tensor_lies_in_the_arena(arena: Arena) -> None:
    arena.lease(100)
    window = arena.lease(MIB, kind="window")
    staged = arena.lease(4096)
    typed = torch.empty(0, dtype=torch.float32).set_(
        arena.storage(staged.segment), staged.offset // 4, (32, 32), (32, 1)
    )
    assert arena.find(typed) == staged
    assert arena.find(typed[1]) == Extent(staged.segment, staged.offset + 128, 128)
    assert arena.find(arena.tensor(window)) == window
    assert arena.lookup(typed.data_ptr() + 5) == (staged.segment, staged.offset + 5)


def test_find_gives_nothing_when_the_tensor_has_no_bytes_of_its_own_there(arena: Arena) -> None:
    extent = arena.lease(4096)
    memory = arena.tensor(extent)
    square = memory.view(64, 64)
    outside = [
        torch.zeros(5),
        torch.empty(0),
        memory[:0],
        square.t(),
        square[:, :5],
        torch.empty(3, device="meta"),
        torch.eye(3).to_sparse(),
    ]
    assert [arena.find(tensor) for tensor in outside] == [None] * len(outside)
    arena.release(extent)
    arena.trim()
    assert arena.find(memory) is None
    assert arena.lookup(memory.data_ptr()) is None
    assert arena.lookup(0) is None


def test_segment_questions_are_refused_when_it_is_gone(arena: Arena) -> None:
    extent = arena.lease(100)
    assert arena.live_segments() == {extent.segment}
    assert arena.segment_nbytes(extent.segment) >= 100
    assert os.fstat(arena.segment_fd(extent.segment)).st_size >= 100
    arena.release(extent)
    assert arena.trim() >= 100
    assert arena.live_segments() == frozenset()
    for ask in (arena.segment_fd, arena.segment_nbytes, arena.storage, arena.pin):
        with pytest.raises(ValueError, match="no segment"):
            ask(extent.segment)


# -- the budget --------------------------------------------------------------------------------


def test_error_has_both_figures_when_the_budget_cannot_hold_the_state(arena: Arena) -> None:
    with pytest.raises(StagingMemoryError, match="staging_budget_bytes") as caught:
        arena.lease_many([10 * MIB, 7 * MIB], timeout_s=PATIENCE_S)
    assert caught.value.needed_bytes == 17 * MIB
    assert caught.value.budget_bytes == 16 * MIB
    assert caught.value.available_bytes == 1 << 40
    assert arena.stats().peak_claimed_bytes == 0
    arena.lease_many([10 * MIB, 7 * MIB], budget_bytes=17 * MIB)


def test_error_names_the_limit_when_the_system_has_no_memory() -> None:
    """D12."""
    arena = Arena(1 << 40, look=lambda: Headroom(50 * MIB, "/sys/fs/cgroup/job/memory.max"))
    with pytest.raises(StagingMemoryError, match=r"/sys/fs/cgroup/job/memory\.max") as caught:
        arena.lease(100 * MIB)
    assert caught.value.available_bytes == 50 * MIB
    assert "staging_budget_bytes" in str(caught.value)
    assert arena.stats().peak_claimed_bytes == 0
    with pytest.raises(StagingMemoryError, match=r"memory\.max"):
        Arena(1 << 40, look=lambda: Headroom(50, "memory.max")).lease(64, kind="window")


def test_arena_is_as_before_when_claiming_fails_in_the_middle(arena: Arena) -> None:
    kept = arena.lease(4 * MIB)
    arena.release(arena.lease(2 * MIB))
    looks = iter([Headroom(1 << 40, "x"), Headroom(5, "a group that others fill")])
    arena._look = lambda: next(looks)
    with pytest.raises(StagingMemoryError, match="that others fill") as caught:
        arena.lease_many([2 * MIB, 8 * MIB])
    assert caught.value.available_bytes == 5
    assert arena.stats().leased_bytes == 4 * MIB
    arena._look = plenty
    assert arena.lease(12 * MIB).nbytes == 12 * MIB
    arena.release(kept)


def test_window_uses_what_is_there_when_the_system_has_no_memory(arena: Arena) -> None:
    arena.release(arena.lease(4 * MIB))
    looks = iter([Headroom(1 << 40, "x"), Headroom(5, "y"), Headroom(5, "z")])
    arena._look = lambda: next(looks)
    window = arena.lease(8 * MIB, kind="window")
    assert window.nbytes == 4 * MIB


def test_interrupt_leaves_nothing_leased_when_it_hits_a_claim(arena: Arena) -> None:
    def interrupt() -> Headroom:
        raise KeyboardInterrupt

    for kind in ("staged", "window"):
        arena._look = interrupt
        with pytest.raises(KeyboardInterrupt):
            arena.lease(MIB, kind=kind)  # type: ignore[arg-type]
    arena._look = plenty
    assert arena.stats()[:2] == (0, 0)
    assert arena.lease(16 * MIB).nbytes == 16 * MIB


def test_windows_and_staged_extents_do_not_starve_each_other_when_both_are_leased(
    arena: Arena,
) -> None:
    staged = arena.lease(16 * MIB)
    window = arena.lease(8 * MIB, kind="window", min_nbytes=4096)
    assert window.nbytes == 4096
    assert window.segment != staged.segment
    arena.release_many([window, staged])
    assert arena.stats().claimed_bytes == 16 * MIB
    wide = arena.lease(8 * MIB, kind="window")
    assert wide.nbytes == 8 * MIB
    arena.release(wide)
    assert arena.lease(16 * MIB, timeout_s=0).nbytes == 16 * MIB


def test_default_budget_is_asked_when_none_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpwriter._leasing.default_budget_bytes", lambda held: 3 * MIB + held)
    arena = Arena(look=plenty)
    arena.release(arena.lease(2 * MIB))
    arena.release(arena.lease(5 * MIB))
    with pytest.raises(StagingMemoryError, match=str(8 * MIB)):
        arena.lease(9 * MIB)
    arena.close()


# -- waiting -----------------------------------------------------------------------------------


def test_lease_wakes_when_another_save_releases(arena: Arena) -> None:
    first = arena.lease_many([4 * MIB] * 4)
    thread, outcome = in_thread(lambda: arena.lease(12 * MIB, timeout_s=PATIENCE_S))
    wait_until(is_waiting(arena))
    arena.release(first[0])
    arena.release_many(first[1:3])
    assert not outcome
    arena.release(first[3])
    thread.join(PATIENCE_S)
    assert isinstance(outcome[0], Extent)


def test_lease_gives_up_when_nobody_releases_in_time(arena: Arena) -> None:
    arena.lease(10 * MIB)
    with pytest.raises(StagingMemoryError, match=r"not released within 0\.01 s") as caught:
        arena.lease(8 * MIB, timeout_s=0.01)
    assert caught.value.needed_bytes == 8 * MIB
    assert "staging_budget_bytes is 16777216" in str(caught.value)
    with pytest.raises(StagingMemoryError, match="leased to other saves"):
        arena.lease(8 * MIB, timeout_s=0)
    assert not arena._queue


def test_earlier_lease_is_served_first_when_several_wait(arena: Arena) -> None:
    held = arena.lease(16 * MIB)
    served: list[str] = []

    def lease(name: str, nbytes: int) -> None:
        extent = arena.lease(nbytes, timeout_s=PATIENCE_S)
        served.append(name)
        arena.release(extent)

    large, _ = in_thread(lambda: lease("large", 16 * MIB))
    wait_until(is_waiting(arena, 1))
    middle, _ = in_thread(lambda: lease("middle", 8 * MIB))
    wait_until(is_waiting(arena, 2))
    arena.release(held)
    large.join(PATIENCE_S)
    middle.join(PATIENCE_S)
    assert served == ["large", "middle"]


def test_small_lease_passes_when_a_large_one_waits(arena: Arena) -> None:
    held = arena.lease(15 * MIB)
    thread, outcome = in_thread(lambda: arena.lease(16 * MIB, timeout_s=PATIENCE_S))
    wait_until(is_waiting(arena))
    small = arena.lease(MIB // 2, timeout_s=PATIENCE_S)
    arena.release_many([held, small])
    thread.join(PATIENCE_S)
    assert isinstance(outcome[0], Extent)


def test_windows_cannot_starve_a_staged_lease_when_one_follows_the_other(arena: Arena) -> None:
    window = arena.lease(8 * MIB, kind="window")
    thread, outcome = in_thread(lambda: arena.lease(16 * MIB, timeout_s=PATIENCE_S))
    wait_until(is_waiting(arena))
    following = arena.lease(8 * MIB, kind="window", min_nbytes=4096)
    assert following.nbytes == 4096
    arena.release(window)
    thread.join(PATIENCE_S)
    assert isinstance(outcome[0], Extent)
    arena.release(following)


def test_lease_waits_for_memory_on_its_way_back_when_a_drop_is_slow(arena: Arena) -> None:
    first = arena.lease(4 * MIB)
    (segment,) = arena._holdings.segments.values()
    started, go_on = threading.Event(), threading.Event()
    drop = segment.drop

    def slow_drop() -> None:
        started.set()
        go_on.wait(PATIENCE_S)
        drop()

    segment.drop = slow_drop  # type: ignore[method-assign]
    arena.release(first)
    trimming, _ = in_thread(arena.trim)
    started.wait(PATIENCE_S)
    free = [40 * MIB]
    arena._look = lambda: Headroom(free[0], "a test")
    thread, outcome = in_thread(lambda: arena.lease(10 * MIB, timeout_s=PATIENCE_S))
    wait_until(is_waiting(arena))
    free[0] = 1 << 40
    go_on.set()
    trimming.join(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert isinstance(outcome[0], Extent)


def test_leases_are_apart_when_several_threads_save_at_a_time(arena: Arena) -> None:
    """Each fills what it has leased and finds it unchanged a moment later."""
    errors: list[BaseException] = []

    def save(number: int) -> None:
        choose = random.Random(number)
        try:
            for _ in range(40):
                kind = choose.choice(["staged", "staged", "window"])
                if kind == "window":
                    extents = [arena.lease(2 * MIB, kind="window", min_nbytes=64 * 1024)]
                else:
                    sizes = [choose.randrange(100_000) for _ in range(choose.randrange(1, 60))]
                    extents = arena.lease_many(sizes, timeout_s=PATIENCE_S)
                for extent in extents:
                    arena.tensor(extent).fill_(number)
                time.sleep(choose.random() / 1000)
                for extent in extents:
                    assert bytes(arena.buffer(extent)).count(number) == extent.nbytes
                arena.release_many(extents)
                if choose.random() < 0.1:
                    arena.trim(4 * MIB)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not errors
    assert arena.stats().leased_bytes == 0
    assert arena.stats().claimed_bytes <= 16 * MIB


# -- the end of segments -----------------------------------------------------------------------


def test_trim_drops_idle_segments_only_when_others_are_leased(arena: Arena) -> None:
    kept = arena.lease(4 * MIB)
    arena.release(arena.lease(8 * MIB))
    arena.tensor(kept).fill_(9)
    assert arena.trim(keep_bytes=12 * MIB) == 0
    assert arena.trim() == 8 * MIB
    assert arena.trim() == 0
    assert int(arena.tensor(kept)[-1]) == 9


def test_close_leaves_views_alone_when_extents_are_still_leased(arena: Arena) -> None:
    extent = arena.lease(MIB)
    view = arena.tensor(extent).fill_(5)
    arena.close()
    assert int(view.sum()) == 5 * MIB
    arena.release(extent)  # belongs to a save that ends after shutdown
    assert arena.stats()[:2] == (0, 0)
    again = arena.lease(MIB)
    assert again.segment != extent.segment
    with pytest.raises(ValueError, match="not leased"):
        arena.release(Extent(10**9, 0, 64))


def test_listeners_hear_of_dropped_segments_when_they_go(arena: Arena) -> None:
    heard: list[list[int]] = []

    def listen(numbers: list[int]) -> None:
        heard.append(numbers)
        arena.stats()  # the lock is free

    def fail(numbers: list[int]) -> None:
        raise OSError("a worker is gone")

    arena.add_listener(fail)
    arena.add_listener(listen)
    first, second = arena.lease(8 * MIB), arena.lease(6 * MIB)
    arena.release_many([first, second])
    arena.lease(15 * MIB)
    numbers = [number for numbers in heard for number in numbers]
    assert sorted(numbers) == sorted([first.segment, second.segment])


def test_segments_are_page_locked_once_when_leases_come_and_go() -> None:
    """D11, without an accelerator."""
    pinner = FakePinner()
    arena = Arena(16 * MIB, look=plenty, pinner=pinner)
    for _ in range(3):
        extent = arena.lease(MIB)
        assert arena.pin(extent.segment)
        arena.release(extent)
    arena.close()
    assert [call for call, _ in pinner.calls] == ["register", "unregister"]


def test_cuda_is_left_alone_when_the_program_does_not_use_it(arena: Arena) -> None:
    assert not arena.pin(arena.lease(64).segment)
    assert not torch.cuda.is_initialized()


# -- forks -------------------------------------------------------------------------------------


def test_child_finds_an_empty_arena_when_the_trainer_forks(arena: Arena) -> None:
    pinner = FakePinner()
    arena._pinner = pinner
    extents = arena.lease_many([MIB, 100])
    for extent in extents:
        arena.tensor(extent).fill_(3)
    assert arena.pin(extents[0].segment)

    def check() -> str:
        assert not any("memfd" in os.readlink(f"/proc/self/fd/{fd}") for fd in _memfds())
        assert mapped_segments() == 0
        assert arena.stats()[:2] == (0, 0)
        arena.release_many(extents)
        arena.close()
        mine = arena.lease(2 * MIB)
        arena.buffer(mine)[:5] = b"child"  # torch's own threads do not survive a fork
        assert mine.segment not in {extent.segment for extent in extents}
        arena.release(mine)
        return f"fine, {len(pinner.calls)} calls"

    assert in_fork(check) == "fine, 1 calls"
    for extent in extents:
        assert bytes(arena.buffer(extent)) == b"\x03" * extent.nbytes
    arena.release_many(extents)


def _memfds() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]


def test_child_can_lease_when_the_fork_came_while_the_lock_was_held(arena: Arena) -> None:
    locked, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with arena._changed, _arena._arena_lock:
            locked.set()
            go_on.wait(PATIENCE_S)

    thread, _ = in_thread(hold)
    locked.wait(PATIENCE_S)
    try:
        answer = in_fork(lambda: str(arena.lease(100).nbytes + get_arena().stats().num_leases))
    finally:
        go_on.set()
        thread.join(PATIENCE_S)
    assert answer == "100"


# -- the process's own -------------------------------------------------------------------------


def test_get_arena_is_the_same_when_asked_from_several_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_arena, "_arena", None)
    found: list[Arena] = []
    threads = [threading.Thread(target=lambda: found.append(get_arena())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len({id(arena) for arena in found}) == 1


def test_arena_is_freed_without_the_cyclic_collector_when_nobody_refers_to_it() -> None:
    arena = Arena(MIB, look=plenty)
    arena.lease(100)
    died = weakref.ref(arena)
    before = mapped_segments(), len(open_fds())
    del arena
    assert died() is None
    assert (mapped_segments(), len(open_fds())) == (before[0] - 1, before[1] - 2)


def test_fds_and_mappings_are_flat_when_saves_repeat(arena: Arena) -> None:
    seen = set()
    for number in range(30):
        window = arena.lease(2 * MIB, kind="window")
        extents = arena.lease_many([1000 + number] * 100)
        arena.release_many([*extents, window])
        if number % 10 == 9:
            arena.trim()
        if number > 2 and number % 10 == 8:
            seen.add((len(open_fds()), mapped_segments()))
    assert len(seen) == 1


# -- any sequence of leases and releases ---------------------------------------------------------


class Leases(RuleBasedStateMachine):
    """Extents never overlap, keep their bytes and stay in the budget; all of it comes back."""

    BUDGET = MIB

    @initialize()
    def begin(self) -> None:
        self.arena = Arena(self.BUDGET, look=plenty)
        self.leased: list[tuple[Extent, int]] = []
        self.mark = 0

    def keep(self, extents: list[Extent]) -> None:
        for extent in extents:
            self.mark = self.mark % 255 + 1
            self.arena.tensor(extent).fill_(self.mark)
            self.leased.append((extent, self.mark))

    @rule(sizes=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 400_000)), max_size=12))
    def lease_many(self, sizes: list[int]) -> None:
        total = sum(map(slot_bytes, sizes))
        try:
            extents = self.arena.lease_many(sizes, timeout_s=0)
        except StagingMemoryError:
            assert total > self.BUDGET or self.leased
            return
        assert [extent.nbytes for extent in extents] == sizes
        self.keep(extents)

    @rule(nbytes=st.integers(0, 700_000), least=st.integers(1, 5000))
    def lease_window(self, nbytes: int, least: int) -> None:
        extent = self.arena.lease(nbytes, kind="window", min_nbytes=least)
        assert min(nbytes, least) <= extent.nbytes <= nbytes
        self.keep([extent])

    @rule(choose=st.randoms(use_true_random=False), one=st.booleans())
    def release(self, choose: random.Random, one: bool) -> None:
        choose.shuffle(self.leased)
        count = min(1, len(self.leased)) if one else len(self.leased) // 2
        freed, self.leased = self.leased[:count], self.leased[count:]
        for extent, mark in freed:
            assert bytes(self.arena.buffer(extent)) == bytes([mark]) * extent.nbytes
        self.arena.release_many(extent for extent, _ in freed)

    @rule(keep_bytes=st.integers(0, MIB))
    def trim(self, keep_bytes: int) -> None:
        self.arena.trim(keep_bytes)

    @invariant()
    def books_are_right(self) -> None:
        holdings = self.arena._holdings
        within = [s for s in holdings.segments.values() if not s.over_budget]
        assert holdings.charged_bytes == sum(s.nbytes for s in within) <= self.BUDGET
        assert holdings.claimed_bytes == sum(s.nbytes for s in holdings.segments.values())
        assert all(s.leased for s in holdings.segments.values() if s.over_budget)
        ranges = sorted((e.segment, e.offset, slot_bytes(e.nbytes)) for e, _ in self.leased)
        for left, right in itertools.pairwise(ranges):
            assert left[0] < right[0] or left[1] + left[2] <= right[1]
        for extent, _ in self.leased:
            assert extent.offset % 64 == 0
            assert extent.offset + extent.nbytes <= self.arena.segment_nbytes(extent.segment)
        assert self.arena.stats().leased_bytes == sum(n for _, _, n in ranges)

    def teardown(self) -> None:
        if not hasattr(self, "arena"):
            return
        for extent, mark in self.leased:
            assert bytes(self.arena.buffer(extent)) == bytes([mark]) * extent.nbytes
        self.arena.release_many(extent for extent, _ in self.leased)
        for segment in self.arena._holdings.segments.values():
            assert segment.free.ranges() == [(0, segment.free.capacity_bytes)]
        assert self.arena._holdings.leased_bytes == 0
        self.arena.close()


Leases.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestLeases = Leases.TestCase


def test_maps_hold_nothing_of_the_arena_when_all_is_closed(arena: Arena) -> None:
    arena.lease_many([MIB] * 3)
    assert "memfd:mpwriter" in Path("/proc/self/smaps").read_text()
    arena.close()
    assert "memfd:mpwriter" not in Path("/proc/self/smaps").read_text()
