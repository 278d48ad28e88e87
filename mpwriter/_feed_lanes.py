"""Lanes for a save: a peer each, the memory that feeds it, and what it can see of the arena.

Runs in: trainer.
"""

from __future__ import annotations

from functools import partial

from mpwriter._arena import Arena
from mpwriter._lane import Lane
from mpwriter._lane_window import TrainerPeer, Window, window_bytes
from mpwriter._process import WorkerProcess
from mpwriter._types import Extent

__all__ = ["LaneMaker"]

# A window this small still holds a few slots.
_LEAST_WINDOW_BYTES = 64 * 1024

# In the trainer nothing is copied ahead: the window only bounds the pieces.
_TRAINER_WINDOW_BYTES = 8 << 20


class LaneMaker:
    """Makes the lanes of one save.

    Args:
        arena: the memory.
        copy_ahead_bytes: per lane, at most.
        budget_bytes: of the save's writer; None for the arena's own.
        job_bytes: size of the largest job, as far as it is known: a window holds no more.
    """

    def __init__(
        self, arena: Arena, copy_ahead_bytes: int, budget_bytes: int | None, job_bytes: int
    ) -> None:
        self._arena = arena
        self._budget_bytes = budget_bytes
        self._window_bytes = window_bytes(copy_ahead_bytes, job_bytes)

    def of_worker(self, worker: WorkerProcess) -> Lane:
        """A lane that feeds a worker; its window is leased when there is something to copy."""
        return Lane(worker, self._lease_window, partial(self._map, worker))

    def in_trainer(self) -> Lane:
        """A lane that writes in this thread, out of ordinary memory."""
        peer = TrainerPeer()
        lease = partial(peer.window, min(self._window_bytes, _TRAINER_WINDOW_BYTES))
        return Lane(peer, lease, partial(self._show, peer))

    def _map(self, worker: WorkerProcess, segment: int) -> None:
        if not worker.maps(segment):
            worker.unmap_dead(self._arena.live_segments())
            nbytes, fd = self._arena.segment_nbytes(segment), self._arena.segment_fd(segment)
            worker.map_segment(segment, nbytes, fd)

    def _lease_window(self) -> Window:
        # The arena may give less than asked for: a smaller window is slower, not wrong.
        extent = self._arena.lease(
            self._window_bytes,
            kind="window",
            min_nbytes=_LEAST_WINDOW_BYTES,
            budget_bytes=self._budget_bytes,
        )
        try:
            return Window.in_arena(self._arena, extent)
        except BaseException:
            self._arena.release(extent)
            raise

    def _show(self, peer: TrainerPeer, segment: int) -> None:
        if not peer.reaches(segment):
            whole = Extent(segment, 0, self._arena.segment_nbytes(segment))
            peer.reach(segment, self._arena.buffer(whole))
