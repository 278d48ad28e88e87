"""The memory that feeds a worker: a window in slots. And the stand-in that needs no worker.

Runs in: trainer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from mpwriter._arena import Arena
from mpwriter._staging_parts import MIN_SLOT_BYTES, Slot
from mpwriter._types import PAGE_BYTES, Extent, Message
from mpwriter._worker import JobServer

__all__ = ["TrainerPeer", "Window", "window_bytes"]

# A slot is copied, sent, checksummed and written as a whole, and costs the trainer 100 us of
# messages. 8 MiB: half the trainer's work beside the copy itself that 2 MiB cost (0.16 CPU-seconds
# per GiB, not 0.20), and no later at the end. Source: scripts/benchmark.py, `large`, 0.5 to 16 MiB.
_MAX_SLOT_BYTES = 8 << 20

# Slots of a full window at least, so that copying, checksumming and writing overlap.
_MIN_SLOTS = 8

# Windows come in powers of two from here up, so that later saves find a warm one that fits.
_MIN_WINDOW_BYTES = 256 * 1024

# The segment number of the stand-in's own memory.
_TRAINER_SEGMENT = -1


def window_bytes(copy_ahead_bytes: int, job_bytes: int) -> int:
    """Size of the window for jobs of up to `job_bytes`: no more than they can fill."""
    size = _MIN_WINDOW_BYTES
    while size < job_bytes:
        size *= 2
    return max(2 * MIN_SLOT_BYTES, min(size, copy_ahead_bytes))


class Window:
    """A range of memory in slots. `release` gives it back; slots must not be used after that."""

    def __init__(
        self,
        segment: int,
        offset: int,
        tensor: torch.Tensor,
        buffer: memoryview,
        release: Callable[[], None],
    ) -> None:
        nbytes = tensor.numel()
        self.slot_bytes = max(MIN_SLOT_BYTES, min(_MAX_SLOT_BYTES, nbytes // _MIN_SLOTS))
        # Slots keep the alignment of items.
        self.slot_bytes -= self.slot_bytes % (PAGE_BYTES if self.slot_bytes > PAGE_BYTES else 64)
        self.release = release
        address = tensor.data_ptr()
        self.slots: deque[Slot] = deque(
            Slot(
                segment,
                offset + start,
                self.slot_bytes,
                tensor[start : start + self.slot_bytes],
                buffer[start : start + self.slot_bytes],
                address + start,
            )
            for start in range(0, nbytes - self.slot_bytes + 1, self.slot_bytes)
        )

    @classmethod
    def in_arena(cls, arena: Arena, extent: Extent) -> Window:
        return cls(
            extent.segment,
            extent.offset,
            arena.tensor(extent),
            arena.buffer(extent),
            lambda: arena.release(extent),
        )


class TrainerPeer:
    """Stands in for a worker where none can serve: runs each message at once, in this thread."""

    def __init__(self) -> None:
        self._replies: list[Message] = []
        self._server = JobServer(self._replies.append, _no_fd, owns_process=False)

    def send(self, message: Message) -> None:
        self._server.handle(message)

    def receive(self) -> list[Message]:
        replies = self._replies[:]
        self._replies.clear()
        return replies

    def reaches(self, segment: int) -> bool:
        return segment in self._server.buffers

    def reach(self, segment: int, buffer: memoryview) -> None:
        """Make a segment known, as `MapSegment` does for a worker."""
        self._server.buffers[segment] = buffer

    def window(self, nbytes: int) -> Window:
        """A window in ordinary memory."""
        memory = torch.empty(nbytes, dtype=torch.uint8)
        buffer = memoryview(_as_array(memory))
        self.reach(_TRAINER_SEGMENT, buffer)
        return Window(_TRAINER_SEGMENT, 0, memory, buffer, lambda: None)

    def close(self) -> None:
        self._server.close()


def _no_fd() -> int:
    raise AssertionError("no descriptors travel inside the trainer")


def _as_array(memory: torch.Tensor) -> Any:
    return memory.numpy()
