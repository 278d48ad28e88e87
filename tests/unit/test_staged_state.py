"""The lease under a staged state: it ends once, and in every case."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mpwriter._arena import Arena, get_arena
from mpwriter._staged_state import Claim, StagedLease, StagedState, claim_of_this_thread
from tests.stagings import leased_bytes, stage

KIB = 1 << 10


@pytest.fixture(autouse=True)
def _nothing_stays_leased() -> Iterator[None]:
    get_arena().trim()
    yield
    assert leased_bytes() == 0
    get_arena().trim()


def staged_state() -> StagedState:
    return stage({"a": torch.arange(16 * KIB), "b": {"c": 1}})


def in_thread(action: Any) -> Any:
    """What an action gives in a thread that ends with it."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(action()))
    thread.start()
    thread.join()
    return found[0] if found else None


def begin(state: StagedState) -> Claim:
    """What `dcp.save` and the writer do first."""
    assert dict(state.items())
    claim = claim_of_this_thread()
    assert claim is not None
    return claim


def test_lease_ends_with_the_save() -> None:
    """Although the state is still referred to, as by the frames of an exception."""
    state = staged_state()
    claim = begin(state)
    assert leased_bytes() == 128 * KIB
    claim.end()
    assert leased_bytes() == 0
    claim.end()
    assert state["b"] == {"c": 1}


def test_save_is_refused_when_the_lease_has_ended() -> None:
    state = staged_state()
    begin(state).end()
    with pytest.raises(RuntimeError, match="saved before and its memory was given back: stage ag"):
        state.items()
    assert claim_of_this_thread() is None


def test_lease_ends_with_the_last_reference_when_nothing_is_saved() -> None:
    state = staged_state()
    assert leased_bytes() == 128 * KIB
    del state
    assert leased_bytes() == 0


def test_lease_ends_with_the_thread_when_the_save_is_dropped() -> None:
    """A planner that raises: the claim is left in a variable of the thread."""
    state = staged_state()
    in_thread(lambda: dict(state.items()))
    assert leased_bytes() == 0
    assert claim_of_this_thread() is None


def test_lease_lasts_while_the_thread_saves() -> None:
    """The thread that staged may have let go of the state."""
    states = [staged_state()]
    begun, go_on = threading.Event(), threading.Event()

    def save() -> None:
        tensors = dict(states.pop().items())
        claim = claim_of_this_thread()
        begun.set()
        go_on.wait(30)
        assert tensors["a"][3] == 3
        assert claim is not None
        claim.end()

    thread = threading.Thread(target=save)
    thread.start()
    begun.wait(30)
    assert leased_bytes() == 128 * KIB
    go_on.set()
    thread.join()
    assert leased_bytes() == 0


def test_claim_is_that_of_one_thread_and_taken_once() -> None:
    state = staged_state()
    state.path = "somewhere"
    dict(state.items())
    assert in_thread(claim_of_this_thread) is None
    claim = claim_of_this_thread()
    assert claim is not None and claim.path == "somewhere"
    assert claim_of_this_thread() is None
    del claim
    assert leased_bytes() == 0


def test_lease_ends_with_the_last_of_several_saves() -> None:
    """Two at the same time of one state: the first to end takes nothing from the other."""
    state = staged_state()
    first, second = begin(state), begin(state)
    first.end()
    assert leased_bytes() == 128 * KIB
    assert begin(state).end() is None
    assert leased_bytes() == 128 * KIB
    second.end()
    assert leased_bytes() == 0


def test_reading_a_staged_state_claims_nothing() -> None:
    """Only `items` is what a save begins with."""
    state = staged_state()
    assert len(state) == 2 and list(state) == ["a", "b"] and "a" in state
    assert list(state.keys()) == ["a", "b"] and state.get("b") == {"c": 1}
    plain = [copy.copy(state), copy.deepcopy(state), dict(state.__copy__())]
    assert {type(value) for value in plain} == {dict}
    assert plain[0]["a"] is state["a"]
    assert plain[1]["a"].data_ptr() != state["a"].data_ptr()
    assert torch.equal(plain[1]["a"], state["a"])
    assert claim_of_this_thread() is None
    state.items()
    state.items()
    assert claim_of_this_thread() is not None
    assert leased_bytes() == 0


def test_lease_gives_back_once_when_many_threads_end_it() -> None:
    """Extents that are given back twice are an error of the arena."""
    for _ in range(20):
        state = staged_state()
        assert state.lease is not None
        threads = [threading.Thread(target=state.lease.release) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert leased_bytes() == 0


def _garbage(arena: Arena, nbytes: int = KIB) -> None:
    """Leave a lease to the garbage collector."""
    circle: list[Any] = [StagedLease(arena, arena.lease_many([nbytes]))]
    circle.append(circle)


def test_lease_can_be_collected_while_the_arena_is_locked() -> None:
    """A collection may start anywhere, in a thread that holds the arena's lock as well."""
    arena = Arena(64 * KIB)
    gc.disable()
    try:
        for _ in range(3):
            _garbage(arena)
            assert arena.stats().leased_bytes == KIB
            with arena._changed:
                assert gc.collect()
            # Whatever is done next with the arena finds the memory given back.
            arena.release(arena.lease(64 * KIB, timeout_s=0))
            assert arena.stats().leased_bytes == 0
    finally:
        gc.enable()
        arena.close()


def test_waiting_lease_is_served_when_the_collector_frees_memory() -> None:
    """The same while another lease waits: within the tick, not at its timeout."""
    arena = Arena(64 * KIB)
    gc.disable()
    try:
        _garbage(arena, 40 * KIB)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(arena.lease(40 * KIB, timeout_s=30)))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        with arena._changed:
            gc.collect()  # the lock is held: it cannot be given back now
        thread.join(10)
        assert found
        arena.release(found[0])
    finally:
        gc.enable()
        arena.close()
