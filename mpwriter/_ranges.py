"""Ranges of one file of a store that answers many requests at once: s3fs, gcsfs, adlfs, HTTP.

Runs in: both. Torch-free.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from fsspec.asyn import AsyncFileSystem

__all__ = ["PART_BYTES", "REQUESTS", "RemoteFile", "has_ranges"]

# A request costs a round trip, so a range is worth several, and many are on their way at once.
# Source: botocore's max_pool_connections, 10; the part size is that of the writer.
REQUESTS = 10
PART_BYTES = 8 * 2**20
# A range so long is worth a request for the file's size, before memory is claimed for it.
_WORTH_A_LOOK_BYTES = 64 * 2**20


def has_ranges(fs: Any) -> bool:
    """Whether several threads can ask `fs` for ranges of one file at the same time."""
    return isinstance(fs, AsyncFileSystem) and type(fs)._cat_file is not AsyncFileSystem._cat_file


class RemoteFile:
    """One file. Thread-safe.

    Args:
        fs: one that `has_ranges`.
        path: as it names the file.
    """

    def __init__(self, fs: AsyncFileSystem, path: str) -> None:
        self._fs = fs
        self.path = path
        self._size: int | None = None
        self._lock = threading.Lock()

    def read_into(self, offset: int, view: memoryview) -> int:
        """Read what there is at `offset`; gives how many bytes, fewer only at the file's end.

        Raises:
            Exception: as the filesystem has it.
        """
        return self.scatter(offset, [view])

    def scatter(self, offset: int, views: Sequence[memoryview]) -> int:
        """The same into several views, one after the other, by one request."""
        nbytes = sum(map(len, views))
        if not nbytes:
            return 0
        chunk = memoryview(self._cat(offset, offset + nbytes))
        begin = 0
        for view in views:
            piece = chunk[begin : begin + len(view)]
            view[: len(piece)] = piece
            begin += len(view)
        return len(chunk)

    def _cat(self, start: int, stop: int) -> bytes:
        try:
            chunk: bytes = self._fs.cat_file(self.path, start=start, end=stop)
        except Exception:
            # A range behind the file's end is an error for most stores, each has its own.
            size = self._size_or_none()
            if size is None or size >= stop:
                raise
            stop = max(start, size)
            chunk = self._fs.cat_file(self.path, start=start, end=stop) if stop > start else b""
        if len(chunk) > stop - start:  # a server that knows no ranges has sent all of the file
            return chunk[start:stop]
        return chunk

    def _size_or_none(self) -> int | None:
        with self._lock:
            if self._size is None:
                with contextlib.suppress(Exception):
                    size = self._fs.info(self.path).get("size")
                    self._size = size if isinstance(size, int) else None
            return self._size

    def size_for(self, nbytes: int) -> int | None:
        """The file's size, where it costs little beside reading so much; None: not known."""
        return self._size_or_none() if nbytes > _WORTH_A_LOOK_BYTES else None

    def renew(self) -> None:
        """Before a further try: nothing to do, every request is a new one."""

    def close(self) -> None:
        """Nothing is open between two requests."""
