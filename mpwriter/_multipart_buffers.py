"""Memory for the parts of uploads, used again by later parts and by the files of later saves.

Runs in: both. Torch-free. For `mpwriter._multipart`.

New memory costs more than the copy into it: the kernel clears every page. So buffers are kept, as
those of one file in flight at most, and meanwhile the kernel may take their pages if it is short of
memory (MADV_FREE): a buffer that is kept is no claim.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

__all__ = ["KEPT_BYTES", "PartBuffers", "part_buffers"]

# What a file has in flight at most, and the part that is being filled.
KEPT_BYTES = 72 << 20


class PartBuffers:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[mmap.mmap] = []

    def take(self, nbytes: int) -> mmap.mmap:
        """A buffer of `nbytes` with any content. Pages that nobody writes to take no memory."""
        with self._lock:
            for number in range(len(self._kept) - 1, -1, -1):  # the warmest first
                if len(self._kept[number]) == nbytes:
                    return self._kept.pop(number)
        buffer = mmap.mmap(-1, nbytes)
        _advise(buffer, "MADV_HUGEPAGE")  # a page fault for 2 MiB, not for 4 KiB
        return buffer

    def give_back(self, buffer: mmap.mmap) -> None:
        """Nothing refers to its memory any more."""
        _advise(buffer, "MADV_FREE")
        with self._lock:
            self._kept.append(buffer)
            while sum(map(len, self._kept)) > KEPT_BYTES:
                self._kept.pop(0)  # freed with its last reference

    def num_kept(self) -> int:
        return len(self._kept)


def _advise(buffer: mmap.mmap, name: str) -> None:
    """Where the system knows this advice; it is no more than that."""
    with contextlib.suppress(OSError, AttributeError):
        buffer.madvise(getattr(mmap, name))


part_buffers = PartBuffers()
"""Those of this process."""
