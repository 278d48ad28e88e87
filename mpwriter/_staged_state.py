"""A state dict whose tensors lie in the arena, and the lease that keeps them there.

Runs in: trainer.

    stage()  -->  StagedState  -- dcp.save in some thread -->  Claim in that thread
                      |                                          |
                      |  released by whichever comes first:      |
                      +-- every reference gone                   +-- the save has written, or failed
                                                                 +-- the thread has ended

The second column is needed because an exception keeps the frames of a failed save, and with them
the state dict, alive for as long as somebody keeps the future that carries it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import ItemsView, Sequence
from typing import Any, Protocol

from mpwriter._arena import Arena
from mpwriter._types import Extent

__all__ = ["Claim", "Lease", "StagedLease", "StagedState", "claim_of_this_thread"]


class StagedLease:
    """The extents of one staged state. Released once, by `release` or with its last reference."""

    def __init__(self, arena: Arena, extents: Sequence[Extent]) -> None:
        self.arena = arena
        self._lock = threading.Lock()
        self._extents: Sequence[Extent] | None = extents

    @property
    def released(self) -> bool:
        return self._extents is None

    @property
    def extents(self) -> Sequence[Extent]:
        """Empty once released."""
        return self._extents or ()

    def release(self) -> None:
        """Give the memory back; again does nothing."""
        with self._lock:
            extents, self._extents = self._extents, None
        if extents:
            self.arena.release_many(extents)

    def __del__(self) -> None:
        self.release()


class Lease(Protocol):
    """What a staged state needs of the memory under it."""

    @property
    def released(self) -> bool: ...
    def release(self) -> None: ...


class Claim:
    """Marks that a thread is saving a staged state; ends with the save or with the thread."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    def end(self) -> None:
        self._lease.release()

    def __del__(self) -> None:
        self.end()


class _PerThread(threading.local):
    claim: Claim | None = None


_this_thread = _PerThread()


def claim_of_this_thread() -> Claim | None:
    """The staged state that `dcp.save` on this thread was given, once; None for any other."""
    claim, _this_thread.claim = _this_thread.claim, None
    return claim


class StagedState(dict[str, Any]):
    """What `stage()` returns: the state dict's structure around tensors in the arena.

    For one save only: its memory goes back when that save has been written.
    """

    lease: Lease | None = None

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """DCP's first use of a state dict, on the thread that saves it: the claim begins here.

        Raises:
            RuntimeError: it was saved before, and its memory may hold other values by now.
        """
        self.claim()
        return super().items()

    def __copy__(self) -> dict[str, Any]:
        return dict(super().items())

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(super().items()), memo)

    def claim(self) -> None:
        lease = self.lease
        if lease is None:
            return
        if lease.released:
            raise RuntimeError(
                "this staged state was saved before and its memory was given back: stage again"
            )
        _this_thread.claim = Claim(lease)
