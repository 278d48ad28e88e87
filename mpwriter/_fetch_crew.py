"""Worker processes that read ranges of a store's files into shared memory, for one large load.

Runs in: trainer. `Crew.scatter` in any thread; the workers belong to a thread of the crew.

    reading threads           the crew's thread               workers
    ---------------           -----------------               -------
    take a slot
    request  -- mailbox -->   the least busy worker  ------>  ask the store, fill the slot
    copy slot to target  <--  RangeRead | RangeFailed  <----
    give the slot back

One process moves some hundred MB/s over fsspec's event loop, whatever the network has to offer, so
several are worth their start where much is to be read. Until they have started, and when all of
them have died, the reading threads ask the store themselves: a load needs no worker.
"""

from __future__ import annotations

import itertools
import logging
import queue
import select
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mpwriter._arena import Arena
from mpwriter._channel import Mailbox
from mpwriter._faults import ToldError
from mpwriter._pool import WorkerPool
from mpwriter._process import WorkerProcess
from mpwriter._ranges import PART_BYTES, REQUESTS, RemoteFile
from mpwriter._types import (
    EndReads,
    Extent,
    JobRefused,
    JobStarted,
    Message,
    RangeFailed,
    RangeRead,
    ReadRange,
)
from mpwriter.errors import (
    WorkerDiedError,
)

__all__ = ["Crew", "CrewFile"]

_logger = logging.getLogger(__name__)

# At the end of a load that failed, for requests that are on their way; then the worker is killed.
_GRACE_S = 3.0


class _LostError(Exception):
    """The worker that was asked is gone, or cannot serve."""


class _ClosedError(Exception):
    """The load is over."""


@dataclass
class _Request:
    path: str
    start: int
    slot: Extent
    future: Future[int] = field(default_factory=Future)


class _Member:
    """One worker. Of the crew's thread."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self.serves = False  # it has the filesystem
        self.requests: dict[int, _Request] = {}


class Crew:
    """Reads for one load.

    Args:
        fs: the filesystem.
        workers: leased from the pool, each of which has been told of the load.
        window: memory that their reads go to.
        job: of the messages.

    Attributes:
        num_workers: that were given.
        num_requests: that can be on their way at the same time.
    """

    def __init__(
        self,
        workers: Sequence[WorkerProcess],
        window: Extent,
        job: int,
        *,
        pool: WorkerPool,
        arena: Arena,
    ) -> None:
        self._members = [_Member(worker) for worker in workers]
        self.num_workers = len(workers)
        self._window = window
        self._job = job
        self._pool = pool
        self._arena = arena
        self._slots: queue.SimpleQueue[Extent] = queue.SimpleQueue()
        self.num_requests = min(len(workers) * REQUESTS, window.nbytes // PART_BYTES)
        for number in range(self.num_requests):
            offset = window.offset + number * PART_BYTES
            self._slots.put(Extent(window.segment, offset, PART_BYTES))
        self._mailbox: Mailbox[_Request | None] = Mailbox()
        self._numbers = itertools.count()
        self._closed = False
        self._over = False
        self._lock = threading.Lock()  # of the mailbox's end
        self._num_serving = 0
        self._thread = threading.Thread(target=self._run, name="mpwriter-crew", daemon=True)
        self._thread.start()

    @property
    def serving(self) -> bool:
        """Whether there is a worker to ask."""
        return self._num_serving > 0

    def scatter(self, path: str, offset: int, views: Sequence[memoryview]) -> int:
        """Read through a worker, as `RemoteFile.scatter`, at most `PART_BYTES`.

        Raises:
            _LostError: the worker was lost; ToldError: what the filesystem raised there.
        """
        nbytes = sum(map(len, views))
        slot = self._slots.get()
        try:
            request = _Request(path, offset, slot._replace(nbytes=nbytes))
            self._hand_in(request)
            count = request.future.result()
            _copy_out(self._arena.buffer(slot._replace(nbytes=count)), views)
            return count
        finally:
            self._slots.put(slot)

    def _hand_in(self, request: _Request) -> None:
        with self._lock:
            if self._over:
                raise _ClosedError
            self._mailbox.put(request)

    def close(self) -> None:
        """Give workers and memory back. Requests that are on their way fail."""
        self._mailbox.put(None)
        self._thread.join()
        with self._lock:
            self._over = True
            for request in self._mailbox.take():
                if request is not None:
                    request.future.set_exception(_ClosedError())
            self._mailbox.close()
        self._arena.release(self._window)

    # -- the crew's thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                self._turn(None)
        finally:
            self._disband()

    def _turn(self, timeout_s: float | None) -> None:
        poll = select.poll()
        poll.register(self._mailbox, select.POLLIN)
        for member in self._members:
            wants_write = member.worker.wants_write
            poll.register(member.worker, select.POLLIN | (select.POLLOUT if wants_write else 0))
        poll.poll(None if timeout_s is None else timeout_s * 1000)
        for request in self._mailbox.take():
            if request is None:
                self._closed = True
            else:
                self._pass_on(request)
        for member in list(self._members):
            self._guarded(member, partial(self._listen, member))

    def _pass_on(self, request: _Request) -> None:
        serving = [member for member in self._members if member.serves]
        if self._closed:
            request.future.set_exception(_ClosedError())
        elif not serving:
            request.future.set_exception(_LostError())
        else:
            member = min(serving, key=lambda each: len(each.requests))
            number, slot = next(self._numbers), request.slot
            member.requests[number] = request
            message = ReadRange(
                self._job, number, request.path, request.start, *_place(slot), slot.nbytes
            )
            self._guarded(member, partial(member.worker.send, message))

    def _listen(self, member: _Member) -> None:
        member.worker.flush()
        for message in member.worker.receive():
            self._take(member, message)

    def _take(self, member: _Member, message: Message) -> None:
        if isinstance(message, JobStarted) and message.job == self._job:
            member.serves = True
            self._num_serving += 1
        elif isinstance(message, JobRefused) and message.job == self._job:
            _logger.debug("worker %d reads nothing: %s", member.worker.number, message.reason)
            self._lose(member, usable=True)
        elif isinstance(message, RangeRead) and message.number in member.requests:
            member.requests.pop(message.number).future.set_result(message.nbytes)
        elif isinstance(message, RangeFailed) and message.number in member.requests:
            request = member.requests.pop(message.number)
            request.future.set_exception(ToldError(message.error))

    def _guarded(self, member: _Member, action: Callable[[], None]) -> None:
        try:
            action()
        except WorkerDiedError as exc:
            # Nothing is lost: what it was asked for is read again by somebody else.
            _logger.warning("%s while a checkpoint was loaded; others read on", exc)
            self._lose(member, usable=False)

    def _lose(self, member: _Member, *, usable: bool) -> None:
        if member not in self._members:
            return
        self._members.remove(member)
        self._num_serving -= member.serves
        # First: one that is stuck must not write to a slot that is given to another.
        self._pool.give_back(member.worker, usable=usable)
        for request in member.requests.values():
            request.future.set_exception(_ClosedError() if self._closed else _LostError())

    def _disband(self) -> None:
        deadline_s = time.monotonic() + _GRACE_S
        for member in list(self._members):
            self._guarded(member, partial(member.worker.send, EndReads(self._job)))
        self._closed = True
        while any(each.requests for each in self._members) and time.monotonic() < deadline_s:
            self._turn(deadline_s - time.monotonic())
        for member in list(self._members):
            # One that has not started yet may: it has nothing to write to.
            self._lose(member, usable=not member.requests)


def _place(slot: Extent) -> tuple[int, int]:
    return slot.segment, slot.offset


def _copy_out(filled: memoryview, views: Sequence[memoryview]) -> None:
    """By torch: 8 MiB take a millisecond, and the GIL belongs to others meanwhile."""
    begin = 0
    for view in views:
        piece = filled[begin : begin + len(view)]
        begin += len(view)
        if len(piece):
            target = torch.frombuffer(view[: len(piece)], dtype=torch.uint8)
            target.copy_(torch.frombuffer(piece, dtype=torch.uint8))


class CrewFile(RemoteFile):
    """A file that workers read, as long as there are any."""

    def __init__(self, fs: Any, path: str, crew: Crew) -> None:
        super().__init__(fs, path)
        self._crew = crew

    def scatter(self, offset: int, views: Sequence[memoryview]) -> int:
        nbytes = sum(map(len, views))
        while 0 < nbytes <= PART_BYTES and self._crew.serving:
            try:
                return self._crew.scatter(self.path, offset, views)
            except _LostError:
                _logger.debug("reading a range of %s again", self.path)
        return super().scatter(offset, views)
