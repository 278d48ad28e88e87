"""A state dict whose tensors lie in the arena, and the lease that keeps them there.

Runs in: trainer.

    stage()  -->  StagedState  -- dcp.save in some thread -->  Claim in that thread
                      |                                          |
                      |  released by whichever comes first:      |
                      +-- every reference gone                   +-- the save has written, or failed
                                                                 +-- the thread has ended

The second column is needed because an exception keeps the frames of a failed save, and with them
the state dict, alive for as long as somebody keeps the future that carries it. Of several saves of
one state at the same time the last one to end counts.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import ItemsView, Sequence
from typing import Any

from mpwriter._arena import Arena
from mpwriter._types import Extent

__all__ = ["Claim", "Lease", "StagedLease", "StagedState", "claim_of_this_thread"]


class Lease:
    """The memory under a staged state. Given back once, by the last save of it to end, by
    `release`, or with its last reference.
    """

    def __init__(self) -> None:
        # Reentrant: a collection of garbage in here may end another claim.
        self._lock = threading.RLock()
        self._num_saves = 0
        self.released = False

    def hold(self) -> None:
        """A save begins.

        Raises:
            RuntimeError: the memory may hold other values by now.
        """
        with self._lock:
            if self.released:
                raise RuntimeError(
                    "this staged state was saved before and its memory was given back: stage again"
                )
            self._num_saves += 1

    def let_go(self, *, finalizing: bool = False) -> None:
        """A save has ended."""
        with self._lock:
            self._num_saves -= 1
            last = self._num_saves == 0
        if last:
            self.release(finalizing=finalizing)

    def release(self, *, finalizing: bool = False) -> None:
        """Give the memory back; again does nothing.

        Args:
            finalizing: whether locks of the arena may be held by this very thread.
        """
        with self._lock:
            released, self.released = self.released, True
        if not released:
            self._give_back(finalizing)

    def _give_back(self, finalizing: bool) -> None:
        raise NotImplementedError

    def __del__(self) -> None:
        self.release(finalizing=True)


class StagedLease(Lease):
    """Extents of the arena; none where there is no arena to be had."""

    def __init__(self, arena: Arena, extents: Sequence[Extent]) -> None:
        self.arena = arena
        self.extents = extents
        super().__init__()

    def _give_back(self, finalizing: bool) -> None:
        extents, self.extents = self.extents, ()
        if extents and finalizing:
            self.arena.release_soon(extents)
        elif extents:
            self.arena.release_many(extents)


class Claim:
    """A save of a staged state, from its first look at it to its end or that of its thread.

    Attributes:
        path: where the writer pointed when the state was staged; None where it was not noted.

    Raises:
        RuntimeError: the state's memory was given back.
    """

    _holds = False

    def __init__(self, lease: Lease, path: str | os.PathLike[str] | None = None) -> None:
        self.path = path
        self._lease = lease
        lease.hold()
        self._holds = True

    @property
    def ended(self) -> bool:
        return not self._holds

    def end(self, *, finalizing: bool = False) -> None:
        """Again does nothing."""
        holds, self._holds = self._holds, False
        if holds:
            self._lease.let_go(finalizing=finalizing)

    def __del__(self) -> None:
        self.end(finalizing=True)


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

    Attributes:
        lease: None while it is being built.
        path: see `Claim`.
    """

    lease: Lease | None = None
    path: str | os.PathLike[str] | None = None

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

    def claim(self) -> Claim | None:
        """Begin a save of it on this thread. Raises: see `items`."""
        if self.lease is not None:
            _this_thread.claim = Claim(self.lease, self.path)
        return _this_thread.claim
