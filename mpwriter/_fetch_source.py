"""Files that several threads may read at once, at any offset.

Runs in: trainer, in the threads of `mpwriter._fetch_ahead`.

    local disk               one descriptor a file, preadv(2): no position to fight for
    behind an event loop     s3fs, gcsfs, adlfs, HTTP: a range request each, many on their way
    all others               one file object that one thread reads: `mpwriter._fetch_file`
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from typing import Any, NamedTuple, Protocol

from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem

from mpwriter._fetch_plan import MAX_RANGE_BYTES
from mpwriter._memory import local_world_size, usable_cores

__all__ = ["Lane", "Source", "lane_for"]

# On a local disk, reading is copying: more threads than cores gain nothing, and beyond a few they
# wait for memory. Ranges that a thread has just read are still in the cache when they are decoded.
_MAX_LOCAL_THREADS = 8
_LOCAL_RANGE_BYTES = 4 * 2**20

# A request costs a round trip, so a range is worth several, and many are on their way at once.
# Source: botocore's max_pool_connections, 10; the part size is that of the writer.
_REMOTE_THREADS = 10
_REMOTE_PART_BYTES = 8 * 2**20
# A range so long is worth a request for the file's size, before memory is claimed for it.
_WORTH_A_LOOK_BYTES = 64 * 2**20


class Source(Protocol):
    """One open file. Thread-safe but for `close`."""

    def read_into(self, offset: int, view: memoryview) -> int:
        """Read what there is at `offset`; gives how many bytes, fewer only at the file's end.

        Raises:
            Exception: as the filesystem has it.
        """
        ...

    def size_for(self, nbytes: int) -> int | None:
        """The file's size, where it costs little beside reading so much; None: not known."""
        ...

    def renew(self) -> None:
        """Open it anew, before a read is tried again: a stale handle stays stale. Thread-safe."""
        ...

    def close(self) -> None: ...


class Lane(NamedTuple):
    """How files of a filesystem are read side by side.

    Attributes:
        num_threads: that read.
        max_range_bytes: neighbouring items are not read together beyond this.
        part_bytes: a longer range is read in such pieces, side by side.
        in_place: whether a payload may be read into its target, piece by piece.
    """

    fs: Any
    num_threads: int
    max_range_bytes: int
    part_bytes: int
    in_place: bool

    def open(self, path: str) -> Source:
        """Open a file.

        Raises:
            Exception: as the filesystem has it; a remote file is not asked for before it is read.
        """
        return _LocalSource(self.fs, path) if self.in_place else _RemoteSource(self.fs, path)


def lane_for(fs: Any, num_workers: int | None) -> Lane | None:
    """How to read files of `fs` side by side; None where one thread has to do it.

    Args:
        num_workers: threads at most; None: as many as pay.
    """
    # A subclass may do more in `open` than the descriptor shows.
    if type(fs) is LocalFileSystem:
        cores = max(1, usable_cores() // local_world_size())
        num_threads = num_workers or min(_MAX_LOCAL_THREADS, cores)
        return Lane(fs, num_threads, _LOCAL_RANGE_BYTES, MAX_RANGE_BYTES, True)
    if isinstance(fs, AsyncFileSystem) and type(fs)._cat_file is not AsyncFileSystem._cat_file:
        num_threads = num_workers or _REMOTE_THREADS
        return Lane(fs, num_threads, _REMOTE_PART_BYTES, _REMOTE_PART_BYTES, False)
    return None


class _LocalSource:
    def __init__(self, fs: LocalFileSystem, path: str) -> None:
        self._path = fs._strip_protocol(path)
        self._fd: int | None = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        self._old_fds: list[int] = []  # other threads may be reading from them

    def read_into(self, offset: int, view: memoryview) -> int:
        assert self._fd is not None
        filled = 0
        while filled < len(view):
            # Also where the kernel gives less than asked for: 2 GiB at most, or a signal came.
            count = os.preadv(self._fd, [view[filled:]], offset + filled)
            if not count:
                break
            filled += count
        return filled

    def size_for(self, nbytes: int) -> int | None:
        assert self._fd is not None
        found = os.fstat(self._fd)
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def renew(self) -> None:
        fd, old = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC), self._fd
        self._fd = fd
        if old is not None:
            self._old_fds.append(old)

    def __del__(self) -> None:
        # Nobody closed it because a thread was stuck in it: that thread has let go now.
        if hasattr(self, "_old_fds"):
            self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, None
        for each in (*self._old_fds, *([] if fd is None else [fd])):
            os.close(each)
        self._old_fds.clear()


class _RemoteSource:
    def __init__(self, fs: AsyncFileSystem, path: str) -> None:
        self._fs = fs
        self._path = path
        self._size: int | None = None
        self._lock = threading.Lock()

    def read_into(self, offset: int, view: memoryview) -> int:
        if not len(view):
            return 0
        stop = offset + len(view)
        try:
            chunk = self._fs.cat_file(self._path, start=offset, end=stop)
        except Exception:
            # A range behind the file's end is an error for most stores, each has its own.
            size = self._size_or_none()
            if size is None or size >= stop:
                raise
            stop = max(offset, size)
            chunk = self._fs.cat_file(self._path, start=offset, end=stop) if stop > offset else b""
        if len(chunk) > stop - offset:  # a server that knows no ranges has sent all of the file
            chunk = chunk[offset:stop]
        view[: len(chunk)] = chunk
        return len(chunk)

    def _size_or_none(self) -> int | None:
        with self._lock:
            if self._size is None:
                with contextlib.suppress(Exception):
                    size = self._fs.info(self._path).get("size")
                    self._size = size if isinstance(size, int) else None
            return self._size

    def size_for(self, nbytes: int) -> int | None:
        return self._size_or_none() if nbytes > _WORTH_A_LOOK_BYTES else None

    def renew(self) -> None:
        """Every request is a new one."""

    def close(self) -> None:
        """Nothing is open between two requests."""
