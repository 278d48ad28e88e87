"""Files that several threads may read at once, at any offset.

Runs in: trainer, in the threads of `mpwriter._fetch_ahead`.

    local disk               one descriptor a file, preadv(2): no position to fight for
    behind an event loop     s3fs, gcsfs, adlfs, HTTP: a range request each, many on their way;
                             from several processes where much is read: `mpwriter._fetch_crew`
    all others               one file object that one thread reads: `mpwriter._fetch_file`
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from fsspec.implementations.local import LocalFileSystem

from mpwriter._fetch_crew import Crew, CrewFile
from mpwriter._fetch_gather import BYTES_PER_WORKER, gather
from mpwriter._fetch_place import MIN_PLACE_BYTES
from mpwriter._fetch_plan import MAX_RANGE_BYTES
from mpwriter._memory import local_world_size, usable_cores
from mpwriter._pool import default_num_workers
from mpwriter._ranges import PART_BYTES, REQUESTS, RemoteFile, has_ranges

__all__ = ["Lane", "Source", "lane_for"]

# On a local disk, reading is copying: more threads than cores gain nothing, and beyond a few they
# wait for memory. Ranges that a thread has just read are still in the cache when they are decoded.
_MAX_LOCAL_THREADS = 8
_LOCAL_RANGE_BYTES = 4 * 2**20


class Source(Protocol):
    """One open file. Thread-safe but for `close`."""

    def read_into(self, offset: int, view: memoryview) -> int:
        """Read what there is at `offset`; gives how many bytes, fewer only at the file's end.

        Raises:
            Exception: as the filesystem has it.
        """
        ...

    def scatter(self, offset: int, views: Sequence[memoryview]) -> int:
        """The same into several views, one after the other."""
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
        in_place: whether one thread may read a payload into its target, piece by piece.
        crew: worker processes that read instead of these threads.
    """

    fs: Any
    num_threads: int
    max_range_bytes: int
    part_bytes: int
    in_place: bool
    crew: Crew | None = None

    @property
    def place_bytes(self) -> int:
        """An item of this length or more is read into its target, where that is possible."""
        return MIN_PLACE_BYTES if self.in_place else self.part_bytes

    @property
    def num_processes(self) -> int:
        """Worker processes that read."""
        return 0 if self.crew is None else self.crew.num_workers

    def open(self, path: str) -> Source:
        """Open a file.

        Raises:
            Exception: as the filesystem has it; a remote file is not asked for before it is read.
        """
        if self.in_place:
            return _LocalSource(self.fs, path)
        return (
            RemoteFile(self.fs, path) if self.crew is None else CrewFile(self.fs, path, self.crew)
        )

    def with_crew(self, num_workers: int | None, total_bytes: int) -> Lane:
        """The same through worker processes, where these pay for so many bytes.

        Args:
            num_workers: at most; None: this rank's share of the cores.
        """
        most = default_num_workers() if num_workers is None else num_workers
        useful = min(most, total_bytes // BYTES_PER_WORKER)
        crew = gather(self.fs, useful) if useful > 1 and not self.in_place else None
        if crew is None:
            return self
        return self._replace(crew=crew, num_threads=crew.num_requests)

    def close(self) -> None:
        """No more reads: those that workers are at fail."""
        if self.crew is not None:
            self.crew.close()


def lane_for(fs: Any, num_threads: int | None) -> Lane | None:
    """How to read files of `fs` side by side; None where one thread has to do it.

    Args:
        num_threads: at most; None: as many as pay.
    """
    # A subclass may do more in `open` than the descriptor shows.
    if type(fs) is LocalFileSystem:
        cores = max(1, usable_cores() // local_world_size())
        num_threads = num_threads or min(_MAX_LOCAL_THREADS, cores)
        return Lane(fs, num_threads, _LOCAL_RANGE_BYTES, MAX_RANGE_BYTES, True)
    if has_ranges(fs):
        return Lane(fs, num_threads or REQUESTS, PART_BYTES, PART_BYTES, False)
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

    def scatter(self, offset: int, views: Sequence[memoryview]) -> int:
        filled = 0
        for view in views:
            count = self.read_into(offset + filled, view)
            filled += count
            if count < len(view):
                break
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
