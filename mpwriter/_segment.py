"""One piece of shared memory: created, claimed, mapped, and given back to the system.

Runs in: trainer.

    memfd_create -> ftruncate -> (look at the headroom -> fallocate)* -> map as a torch storage

Every page is claimed before the first byte is written: a write into a page that the system cannot
provide is a SIGBUS, a claim that it cannot provide an error. A memfd needs no /dev/shm, has no name
that could stay behind, and is gone with the last process that holds it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Callable

import torch

from mpwriter._allocator import FreeRanges
from mpwriter._compat import map_shared_storage
from mpwriter._memory import Headroom, file_size_limit
from mpwriter._pinning import Pinner

__all__ = ["AdoptedSegment", "ClaimError", "Segment", "margin_bytes", "memfd_unavailable_reason"]

logger = logging.getLogger(__name__)

# A signal makes the kernel undo a fallocate that is under way, and Python start it again: with a
# profiler's timer of a few milliseconds a large one would never end. 4 MiB take about 1 ms.
_CLAIM_STEP_BYTES = 4 << 20

# Other processes claim memory at the same time (the ranks of a node begin to save together), so
# the headroom is looked at again after this many bytes. A look takes 0.1 ms, claiming them 10 ms.
_LOOK_STEP_BYTES = 32 << 20

# Left to the rest of the machine, and to the page tables of the trainer and the workers: 8 bytes a
# page in each process.
_MARGIN_BYTES = 32 << 20
_MARGIN_DIVISOR = 128

# Source: linux/memfd.h and linux/falloc.h; Python names neither.
_MFD_NOEXEC_SEAL = 8  # Linux 6.3; implies that sealing is allowed
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2


class ClaimError(Exception):
    """Memory cannot be had. The text says why; `available_bytes` is None where not known."""

    def __init__(self, reason: str, available_bytes: int | None = None) -> None:
        super().__init__(reason)
        self.available_bytes = available_bytes


def margin_bytes(nbytes: int) -> int:
    """Bytes of headroom that a claim of `nbytes` leaves untouched."""
    return _MARGIN_BYTES + nbytes // _MARGIN_DIVISOR


def memfd_unavailable_reason() -> str | None:
    """Why shared memory of this kind cannot be had here at all; None where it can."""
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create"
    try:
        os.close(_create_memfd())
    except OSError as exc:
        return f"memfd_create is refused ({exc.strerror})"
    return None


class Segment:
    """Shared memory of a fixed size and what of it is leased.

    Attributes:
        number: never used again in this process.
        kind: "staged" or "window", what it was made for.
        over_budget: admitted above the budget; dropped as soon as it is free.
        free: its free ranges; leased: start of an extent -> its bytes. Guarded by the arena.
        fd: -1 until `open` and after `drop`.
    """

    def __init__(self, number: int, nbytes: int, kind: str, *, over_budget: bool = False) -> None:
        self.number = number
        self.nbytes = nbytes
        self.kind = kind
        self.over_budget = over_budget
        self.free = FreeRanges(nbytes)
        self.leased: dict[int, int] = {}
        self.fd = -1
        self.address = 0
        self._pinner: Pinner | None = None  # the one that has locked it
        self._pin_failed = False
        self._pin_lock = threading.Lock()
        self._tensor: torch.Tensor | None = None
        self._buffer: memoryview | None = None

    @property
    def idle(self) -> bool:
        """Whether no extent of it is leased."""
        return not self.leased

    @property
    def tensor(self) -> torch.Tensor:
        """All of it as a uint8 tensor. Views keep the mapping alive beyond `drop`."""
        if self._tensor is None:
            raise ValueError(f"segment {self.number} of the staging memory is gone")
        return self._tensor

    @property
    def buffer(self) -> memoryview:
        """All of it, writable; slices keep the mapping alive beyond `drop`."""
        if self._buffer is None:
            raise ValueError(f"segment {self.number} of the staging memory is gone")
        return self._buffer

    def open(self, look: Callable[[], Headroom]) -> None:
        """Claim the memory and map it.

        Args:
            look: tells the headroom; called before each step of the claim.

        Raises:
            ClaimError: it cannot be had. Nothing is left of the attempt; the same holds for a
                KeyboardInterrupt.

        Runs without the arena's lock, and mostly without the GIL: 0.3 s a GiB.
        """
        limit = file_size_limit()
        if limit is not None and self.nbytes > limit:
            # Beyond it the kernel sends SIGXFSZ, which ends a program that embeds Python.
            raise ClaimError(f"the file size limit (ulimit -f) is {limit} bytes", limit)
        try:
            self.fd = _create_memfd()
            os.ftruncate(self.fd, self.nbytes)
            _claim(self.fd, self.nbytes, look)
            _seal(self.fd)
            self._map()
        except OSError as exc:
            self.close_fd()
            raise ClaimError(_explain(exc), look().nbytes) from exc
        except BaseException:
            self.close_fd()
            raise

    def drop(self) -> None:
        """Give the memory back to the system; again does nothing.

        The pages go at once, even where a worker still maps the segment or a tensor outside views
        it (it reads zeros from then on): what is not leased has no content. The mapping goes with
        the last such view. Where extents are still leased the pages stay until then, too.
        """
        with self._pin_lock:
            pinner, self._pinner = self._pinner, None
            if pinner is not None:
                pinner.unregister(self.address)
            if self.idle and self.fd >= 0:
                _punch(self.fd, self.nbytes)
            self.forget()

    def pin(self, pinner: Pinner) -> bool:
        """Page-lock it unless it is already; whether it is now. `drop` unlocks it.

        A failure is remembered: locking is slow, and a second try fails like the first.
        """
        with self._pin_lock:
            if self._pinner is None and not self._pin_failed and self.fd >= 0:
                locked = pinner.register(self.address, self.nbytes)
                self._pinner = pinner if locked else None
                self._pin_failed = locked is False
            return self._pinner is not None

    def forget(self) -> None:
        """Close the descriptor and let go of the mapping; touches no page. Never raises."""
        self._tensor = self._buffer = None
        self.close_fd()

    def close_fd(self) -> None:
        """Close the descriptor, if there is one. Never raises."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            try:
                os.close(fd)
            except OSError as exc:
                logger.debug("closing a segment: %s", exc)

    def __del__(self) -> None:
        self.close_fd()  # of an arena that nobody closed; the mapping goes with the storage

    def _map(self) -> None:
        # Where its mmap fails, torch loses the descriptor that it has dupped: try here first.
        mmap.mmap(self.fd, self.nbytes).close()
        try:
            storage = map_shared_storage(self.fd, self.nbytes)
        except RuntimeError as exc:
            raise OSError(errno.ENOMEM, str(exc)) from exc
        # An inference tensor could not be written to outside of inference mode.
        with torch.inference_mode(False):
            tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
            tensor.set_(storage, 0, (self.nbytes,), (1,))
        self.address = tensor.data_ptr()
        self._tensor = tensor
        self._buffer = tensor.numpy().data


class AdoptedSegment(Segment):
    """Another process's segment, mapped here. Its memory is that process's to claim and to free.

    Leased as a whole from the start, so that nothing is put into it.

    Args:
        fd: a descriptor of the memfd; this object's from now on.

    Raises:
        OSError: it cannot be mapped; `fd` is closed.
    """

    def __init__(self, number: int, nbytes: int, fd: int) -> None:
        super().__init__(number, nbytes, "staged", over_budget=True)
        self.fd = fd
        self.free.take(0, self.free.capacity_bytes)
        self.leased = {0: nbytes}
        try:
            self._map()
        except BaseException:
            self.close_fd()
            raise

    def drop(self) -> None:
        """Unmap it. The pages stay: they are not ours."""
        self.forget()


def _create_memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        # Where vm.memfd_noexec is 2, one that could be executed is refused.
        return os.memfd_create("mpwriter", flags | _MFD_NOEXEC_SEAL)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # a kernel before 6.3
            raise
    return os.memfd_create("mpwriter", flags)


def _claim(fd: int, nbytes: int, look: Callable[[], Headroom]) -> None:
    """Make the system provide every page.

    Raises:
        ClaimError: the look says that it cannot.
        OSError: fallocate says so.
    """
    for start in range(0, nbytes, _LOOK_STEP_BYTES):
        end = min(start + _LOOK_STEP_BYTES, nbytes)
        available = look()
        if end - start + margin_bytes(end - start) > available.nbytes:
            raise ClaimError(
                f"{available.limited_by} leaves {available.nbytes} bytes", available.nbytes
            )
        for position in range(start, end, _CLAIM_STEP_BYTES):
            os.posix_fallocate(fd, position, min(_CLAIM_STEP_BYTES, end - position))


def _seal(fd: int) -> None:
    """Fix the size: were the file cut short, every process that maps it would get SIGBUS."""
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as exc:
        logger.debug("sealing a segment: %s", exc)


def _punch(fd: int, nbytes: int) -> None:
    """Free the pages of the file.

    Unmapping would free them too, but torch does that under the GIL, at 0.2 s a GiB.
    """
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    if fallocate(fd, mode, 0, nbytes):
        logger.debug("freeing a segment's pages: errno %d", ctypes.get_errno())


def _explain(exc: OSError) -> str:
    if exc.errno in (errno.EMFILE, errno.ENFILE):
        return f"no file descriptor is left for it ({exc.strerror}; ulimit -n)"
    if exc.errno == errno.EFBIG:
        return f"the file size limit is too low ({exc.strerror}; ulimit -f)"
    return f"the system refuses it ({exc.strerror or exc})"
