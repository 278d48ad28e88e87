"""The garbage collector waits while it is paused, and is as it was afterwards."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest

from mpwriter._collector import collector_paused


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_nothing_is_collected_while_it_is_paused() -> None:
    collections: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    gc.callbacks.append(note)
    try:
        with collector_paused():
            del collections[:]
            kept = [[number] for number in range(10 * gc.get_threshold()[0])]
            assert collections == []
        kept += [[number] for number in range(10 * gc.get_threshold()[0])]
        assert collections != []
    finally:
        gc.callbacks.remove(note)


def test_collector_goes_on_when_the_block_fails() -> None:
    with pytest.raises(ValueError, match="in the block"), collector_paused():
        raise ValueError("in the block")
    assert gc.isenabled()


def test_collector_waits_for_the_last_of_several() -> None:
    inside, leave = threading.Event(), threading.Event()

    def pause() -> None:
        with collector_paused():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=pause)
    with collector_paused():
        thread.start()
        inside.wait()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_collector_stays_off_when_the_program_has_switched_it_off() -> None:
    gc.disable()
    with collector_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()


@pytest.mark.parametrize("in_thread", [True, False])
def test_collector_runs_in_a_child_that_is_forked_meanwhile(in_thread: bool) -> None:
    """The thread that paused it is not there, or is the one that goes on."""
    inside, leave = threading.Event(), threading.Event()

    def pause() -> None:
        with collector_paused():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=pause)
    if in_thread:
        thread.start()
        inside.wait()
        child = _fork()
        leave.set()
        thread.join()
    else:
        with collector_paused():
            child = _fork()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.isenabled()


def _fork() -> int:
    child = os.fork()
    if child == 0:
        good = gc.isenabled()
        with collector_paused():
            good &= not gc.isenabled()
        os._exit(0 if good and gc.isenabled() else 1)
    return child
