"""Python's cyclic garbage collector waits where a save or load makes many objects at once.

Runs in: trainer. Imports no torch.

It goes through every object of the process when the young ones that it has seen survive are a
quarter of the old ones: with torch and a state of 20,000 tensors for a quarter of a second, all
threads waiting, up to once a save. Most of what a save makes is gone when it is over, without any
collection. A program that has switched its collector off, to call it when it likes, sees nothing
of this.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]

_lock = threading.Lock()
_num_pausing = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect nothing meanwhile, in any thread.

    For stretches that end by themselves: a program that waits, for a store or for another thread,
    would pile up what it throws away.
    """
    _pause()
    try:
        yield
    finally:
        _resume()


def _pause() -> None:
    global _num_pausing, _was_enabled
    with _lock:
        if _num_pausing == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_pausing += 1


def _resume() -> None:
    global _num_pausing
    with _lock:
        _num_pausing = max(0, _num_pausing - 1)  # 0 already in a child that was forked meanwhile
        if _num_pausing == 0 and _was_enabled:
            gc.enable()


def _after_fork() -> None:
    # The threads that pause it are not in the child.
    global _lock, _num_pausing
    _lock = threading.Lock()
    if _num_pausing and _was_enabled:
        gc.enable()
    _num_pausing = 0


os.register_at_fork(after_in_child=_after_fork)
