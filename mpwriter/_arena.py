"""The shared memory that tensors are staged into: leased by extent, kept warm, bounded.

Runs in: trainer. One arena a process, shared by all writers and saves: see `get_arena`.

    lease / lease_many                      release / release_many
       |  plan (_admission): free ranges,      ^
       |  idle segments to drop, growth        |  ranges join, waiting leases wake
       v                                       |
    Extent(segment, offset, nbytes) --> tensor(), buffer(), find()

Segments (_segment) stay claimed and mapped when their extents are released, so the next save finds
warm memory: copying into fresh pages is ten times slower. They go when the budget is needed for
something else, at `trim` and at `close`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

import torch

from mpwriter._holdings import ArenaStats
from mpwriter._leasing import DEFAULT_LEASE_TIMEOUT_S, MIN_WINDOW_BYTES, Leasing
from mpwriter._memory import Headroom, headroom
from mpwriter._pinning import CudaPinner, Pinner
from mpwriter._segment import AdoptedSegment, Segment, memfd_unavailable_reason
from mpwriter._types import Extent

__all__ = [
    "DEFAULT_LEASE_TIMEOUT_S",
    "MIN_WINDOW_BYTES",
    "Arena",
    "ArenaStats",
    "arena_unavailable_reason",
    "get_arena",
]


class Arena(Leasing):
    """Leases extents of shared memory within a budget.

    Args:
        budget_bytes: the most that segments come to where a lease names no budget of its own; None
            for `default_budget_bytes()`, asked anew for each lease.
        look: tells the headroom of the system.
        pinner: locks pages for an accelerator.

    Thread safety: every method may be called from any thread at any time. A fork of the process
    finds the arena empty: the parent's memory stays the parent's, and releasing its extents in the
    child does nothing.
    """

    def __init__(
        self,
        budget_bytes: int | None = None,
        *,
        look: Callable[[], Headroom] = headroom,
        pinner: Pinner | None = None,
    ) -> None:
        super().__init__(budget_bytes, look=look)
        self._pinner: Pinner = CudaPinner() if pinner is None else pinner
        _arenas.add(self)

    # -- what is behind an extent ------------------------------------------------------------

    def tensor(self, extent: Extent) -> torch.Tensor:
        """A 1-d uint8 tensor on the extent's memory, shared between processes. 1 us.

        Its storage is the whole segment. A view that outlives the lease keeps the memory mapped,
        but not its content.
        """
        start = extent.offset
        return self._segment(extent.segment).tensor[start : start + extent.nbytes]

    def buffer(self, extent: Extent) -> memoryview:
        """The extent's bytes as a writable memoryview; what `tensor` says holds for it too."""
        start = extent.offset
        return self._segment(extent.segment).buffer[start : start + extent.nbytes]

    def storage(self, segment: int) -> torch.UntypedStorage:
        """The storage of a live segment, for typed views by `torch.Tensor.set_`."""
        return self._segment(segment).tensor.untyped_storage()

    def segment_fd(self, segment: int) -> int:
        """The descriptor of a live segment, to be sent to a worker; it stays the arena's own."""
        return self._segment(segment).fd

    def segment_nbytes(self, segment: int) -> int:
        """Size of a live segment in bytes."""
        return self._segment(segment).nbytes

    def live_segments(self) -> frozenset[int]:
        """Numbers of the segments that exist; a number that has gone never comes back."""
        with self._changed:
            return frozenset(self._holdings.segments)

    def lookup(self, address: int) -> tuple[int, int] | None:
        """(segment, offset) of a memory address; None where it is not in the arena."""
        return self._holdings.lookup(address)

    def find(self, tensor: torch.Tensor) -> Extent | None:
        """The bytes of a tensor that lies in the arena and is contiguous; else None. 0.5 us.

        None too for empty tensors, which have no address. Whether the range is leased is not
        checked: the tensor may have outlived its lease.
        """
        try:
            if not tensor.is_cpu or not tensor.is_contiguous():
                return None
            found = self._holdings.lookup(tensor.data_ptr())
        except RuntimeError:  # wrapper subclasses, sparse layouts: no memory of their own
            return None
        if found is None:
            return None
        return tuple.__new__(Extent, (*found, tensor.nbytes))

    def pin(self, segment: int) -> bool:
        """Page-lock a segment for the accelerator, once; whether it is page-locked now.

        Hold a lease in it meanwhile. False where no accelerator is in use (asked again next time)
        or locking failed (not tried again). It is unlocked before it is unmapped.
        """
        return self._segment(segment).pin(self._pinner)

    # -- the whole ---------------------------------------------------------------------------

    def reserve(self, nbytes: int, *, budget_bytes: int | None = None) -> None:
        """Claim memory for staged leases ahead of time, and touch it, so that a save finds it warm.

        Raises:
            StagingMemoryError: it is not to be had.
        """
        extent = self.lease(nbytes, budget_bytes=budget_bytes, timeout_s=0)
        try:
            self.tensor(extent).zero_()
        finally:
            self.release(extent)

    def adopt(self, fd: int, nbytes: int) -> AdoptedSegment:
        """Map a segment of another process, so that its tensors are found here and by workers.

        Args:
            fd: a descriptor of its memfd; the arena's from now on.
            nbytes: its size.

        Raises:
            OSError: it cannot be mapped; `fd` is closed.
        """
        segment = AdoptedSegment(self._holdings.next_number(), nbytes, fd)
        with self._changed:
            self._holdings.adopt(segment)
        return segment

    def let_go(self, segment: AdoptedSegment) -> None:
        """Unmap an adopted segment. Tensors on it stay valid for as long as they live."""
        with self._changed:
            self._holdings.let_go(segment)
        segment.drop()

    def stats(self) -> ArenaStats:
        """What the arena holds at this moment."""
        with self._changed:
            self._take_back()
            return self._holdings.stats()

    def _segment(self, number: int) -> Segment:
        segment = self._holdings.segments.get(number)
        if segment is None:
            raise ValueError(f"there is no segment {number} in the staging memory")
        return segment


# -- the arena of this process ----------------------------------------------------------------

_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()
_arena: Arena | None = None
_arena_lock = threading.Lock()


def get_arena() -> Arena:
    """The arena of this process; made at first use."""
    global _arena
    with _arena_lock:
        if _arena is None:
            _arena = Arena()
        return _arena


def arena_unavailable_reason() -> str | None:
    """Why there can be no arena here, so that files are written in the trainer; None if it can."""
    return memfd_unavailable_reason()


def _forget_in_child() -> None:
    global _arena_lock
    _arena_lock = threading.Lock()
    for arena in list(_arenas):
        arena.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)
