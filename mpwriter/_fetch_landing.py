"""Page-locked shared memory on the way from a file to an accelerator.

Runs in: trainer. One thread at a time, but for what reading threads put into a landing.

    reading threads    file or store --> landing of the next payloads, CRC so far
    main thread                          landing --> target, on a side stream

An accelerator copies from page-locked memory at its own speed, and the threads read on meanwhile.
A payload that is not what was written never gets to its target.
"""

from __future__ import annotations

import logging

import torch

from mpwriter._arena import Arena, arena_unavailable_reason, get_arena
from mpwriter._streams import CopyStream, StreamFactory, accelerator_stream
from mpwriter._types import Extent
from mpwriter.errors import StagingMemoryError

__all__ = ["Landing", "Landings"]

_logger = logging.getLogger(__name__)


class Landing:
    """Memory for one payload, leased until it has been copied or given up.

    Attributes:
        memory: as bytes, writable, in any thread.
    """

    def __init__(
        self, arena: Arena, extent: Extent, target: torch.Tensor, stream: CopyStream
    ) -> None:
        self.memory = arena.buffer(extent)
        self._arena = arena
        self._extent: Extent | None = extent
        self._target = target
        self._stream = stream

    @torch.no_grad()
    def land(self) -> None:
        """Copy what is in the memory to the target. It is there when this returns.

        Raises:
            Exception: as torch has it, and at once where the device fails later.
        """
        assert self._extent is not None
        staged = self._arena.tensor(self._extent)
        target = self._target
        self._stream.copy(target, staged.view(target.dtype).view(target.shape))
        self._stream.record().synchronize()

    def release(self) -> None:
        """Give the memory back: nobody writes to it any more. Again does nothing."""
        extent, self._extent = self._extent, None
        if extent is not None:
            self._arena.release(extent)


class Landings:
    """Makes those of one load.

    Args:
        stream_for: copy streams; None for side streams of the targets' own devices.
    """

    def __init__(self, stream_for: StreamFactory | None = None) -> None:
        self._stream_for = stream_for or accelerator_stream()

    def needs_one(self, target: torch.Tensor) -> bool:
        """Whether the target's memory is not the CPU's."""
        return not target.is_meta and self._stream_for(target) is not None

    def open(self, target: torch.Tensor) -> Landing | None:
        """Lease memory for the target's bytes.

        Args:
            target: contiguous, on an accelerator.

        Returns:
            None where there is no memory to be had: the payload goes the way of small ones.
        """
        stream = self._stream_for(target)
        if stream is None or arena_unavailable_reason() is not None:
            return None
        arena = get_arena()
        try:
            extent = arena.lease(target.nbytes, timeout_s=0)
        except StagingMemoryError as exc:
            _logger.debug("no page-locked memory for %d bytes: %s", target.nbytes, exc)
            return None
        arena.pin(extent.segment)
        return Landing(arena, extent, target, stream)
