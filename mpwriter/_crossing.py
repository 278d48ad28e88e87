"""A staged state on its way to another process: that of AsyncCheckpointerType.PROCESS.

Runs in: trainer and DCP's checkpoint process, which is a trainer to its own workers.

    trainer                                        checkpoint process
    take_apart: containers and objects pickled,    rebuild: each segment mapped once, tensors
      a tensor as (segment, offset, dtype, shape)    made as views; its workers map it, too
      a segment as (pid, fd, size)  ------------>

20,000 tensors cross as one message and a handful of descriptors, and no byte of them is copied. The
segments are opened through /proc, which asks for the same user and nothing else: no helper thread
or socket in a temporary directory, as the descriptor passing of multiprocessing has. The trainer's
lease holds until the checkpoint process has answered.
"""

from __future__ import annotations

import copyreg
import io
import math
import os
import pickle
import threading
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from mpwriter._arena import get_arena
from mpwriter._compat import SENDS_WHERE_IT_SAVES, reduce_storage
from mpwriter._segment import AdoptedSegment
from mpwriter._staged_state import Claim, Lease, StagedState
from mpwriter._staged_views import row_major
from mpwriter.errors import StagingError

__all__ = ["has_crossed", "rebuild", "take_apart"]

_crossed = threading.Event()


def has_crossed() -> bool:
    """Whether a staged state of this process has gone to another one, whose workers write it."""
    return _crossed.is_set()


class _Origin(NamedTuple):
    """Where a segment can be opened."""

    pid: int
    fd: int
    nbytes: int


class _Row(NamedTuple):
    """A row-major tensor in a segment."""

    segment: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Pickler(pickle.Pickler):
    """Notes tensors of the arena by their place. Others, inside of objects, go along as bytes.

    Not the way of torch.multiprocessing: that takes a descriptor for each, a socket in a temporary
    directory whose path may be too long, or moves them to /dev/shm.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self.segments: set[int] = set()

    def reducer_override(self, value: Any) -> Any:
        return reduce_storage(value) or NotImplemented

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return None
        extent = get_arena().find(value) if value.numel() else None
        if extent is None:
            return None
        self.segments.add(extent.segment)
        return _Row(extent.segment, extent.offset, value.dtype, tuple(value.shape))


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, segments: Mapping[int, AdoptedSegment]) -> None:
        super().__init__(stream)
        self._storages = {
            number: segment.tensor.untyped_storage() for number, segment in segments.items()
        }

    def persistent_load(self, row: Any) -> torch.Tensor:
        place = _Row(*row)
        nbytes = math.prod(place.shape) * place.dtype.itemsize
        own: Any = self._storages[place.segment][place.offset : place.offset + nbytes]
        tensor = torch.empty(0, dtype=place.dtype)
        return tensor.set_(own, 0, place.shape, row_major(place.shape))


def take_apart(state: StagedState) -> tuple[bytes, dict[int, _Origin], Any]:
    """What `rebuild` needs on the other side."""
    _crossed.set()
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(state.__copy__())
    arena = get_arena()
    origins = {
        number: _Origin(os.getpid(), arena.segment_fd(number), arena.segment_nbytes(number))
        for number in pickler.segments
    }
    return stream.getvalue(), origins, state.path


def rebuild(pickled: bytes, origins: Mapping[int, _Origin], path: Any) -> StagedState:
    """Map the segments and put the state together.

    Raises:
        StagingError: a segment cannot be opened: another user's process, or it has ended.
    """
    segments = _adopted.take(origins)
    try:
        state = StagedState(_Unpickler(io.BytesIO(pickled), segments).load())
    except BaseException:
        _adopted.give_back(segments)
        raise
    state.lease, state.path = _AdoptedLease(segments), path
    return state


class _Adopted:
    """Segments of other processes that are mapped here.

    They stay mapped between saves, so that the workers' page tables stay warm; one that a save
    does not bring again is unmapped then.
    """

    def __init__(self) -> None:
        # Reentrant: a collection of garbage in `take` may end an earlier lease.
        self._lock = threading.RLock()
        self._by_file: dict[tuple[int, int], AdoptedSegment] = {}
        self._users: dict[tuple[int, int], int] = {}

    def take(self, origins: Mapping[int, _Origin]) -> dict[int, AdoptedSegment]:
        with self._lock:
            taken = {number: self._one(_Origin(*origin)) for number, origin in origins.items()}
            used = set(map(id, taken.values()))
            for file, segment in list(self._by_file.items()):
                if id(segment) in used:
                    self._users[file] += 1
                elif not self._users[file]:
                    del self._by_file[file], self._users[file]
                    get_arena().let_go(segment)
            return taken

    def give_back(self, segments: Mapping[int, AdoptedSegment]) -> None:
        with self._lock:
            for segment in segments.values():
                for file, known in self._by_file.items():
                    if known is segment:
                        self._users[file] -= 1

    def _one(self, origin: _Origin) -> AdoptedSegment:
        path = f"/proc/{origin.pid}/fd/{origin.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as exc:
            raise StagingError(f"the staged memory of process {origin.pid}: {exc}") from exc
        status = os.fstat(fd)
        file = (status.st_dev, status.st_ino)
        known = self._by_file.get(file)
        if known is not None:
            os.close(fd)
            return known
        segment = get_arena().adopt(fd, origin.nbytes)
        self._by_file[file], self._users[file] = segment, 0
        return segment


_adopted = _Adopted()


class _AdoptedLease(Lease):
    """Ends this process's use of adopted segments; the memory is the other process's."""

    def __init__(self, segments: Mapping[int, AdoptedSegment]) -> None:
        self._segments = segments
        super().__init__()

    def _give_back(self, finalizing: bool) -> None:
        segments, self._segments = self._segments, {}
        _adopted.give_back(segments)


class _Turns:
    """Lets the threads that send staged states do so one after the other.

    torch has a thread for each save in flight and one pipe for all of them, and no lock: requests
    would mix, and a thread would take the answer to another's for its own, and give memory back
    that is still to be written.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sender: threading.Thread | None = None
        self._claim: weakref.ref[Claim] | None = None

    def take(self, claim: Claim | None) -> None:
        """Wait until the save that was sent before is over: its claim or its thread has ended."""
        me = threading.current_thread()
        while True:
            with self._lock:
                sender = self._sender
                if sender is None or sender is me or self._is_over():
                    self._sender = me
                    self._claim = None if claim is None else weakref.ref(claim)
                    return
            sender.join(_TURN_TICK_S)

    def _is_over(self) -> bool:
        claim = None if self._claim is None else self._claim()
        return claim is None or claim.ended


_turns = _Turns()

# How often a thread looks whether it is its turn where the one before it does not end.
_TURN_TICK_S = 0.2


def _reduce(state: StagedState) -> tuple[Any, ...]:
    # The thread that sends the state waits for the other process to save it: the claim is its.
    # torch 2.7 pickles on the feeder thread of a queue, which outlives every save: there the lease
    # ends with the state itself, which the saving thread holds until it has an answer.
    if SENDS_WHERE_IT_SAVES:
        _turns.take(state.claim())
    return rebuild, take_apart(state)


copyreg.pickle(StagedState, _reduce)
