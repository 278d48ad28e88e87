"""Workers that run in the thread that feeds them, and a pool that does as it was told."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mpwriter import _feed, _save
from mpwriter._arena import get_arena
from mpwriter._process import WorkerProcess
from mpwriter._types import Extent, Message, StartJob
from mpwriter._worker import JobServer

__all__ = ["Behaviour", "FakePool", "InlineWorker", "fake_pool"]

Behaviour = Callable[["InlineWorker", Message], None]


class InlineWorker(WorkerProcess):
    """Serves each message as it is sent. What a test makes of it is in `behaviour`.

    Its answers wait in `replies` until the feed asks for them.
    """

    ready_at_first = True

    def __init__(self, number: int, behaviour: Behaviour | None) -> None:
        self.number = number
        self.ready = self.ready_at_first
        self.replies: list[Message] = []
        self.attempts: list[int] = []
        self._behaviour = behaviour or InlineWorker.serve
        self._fds: list[int] = []
        self._reached: set[int] = set()
        self._server = JobServer(self.replies.append, self._fds.pop, owns_process=False)
        self._event = os.eventfd(0, os.EFD_NONBLOCK)
        self._quiet = (0, None)
        self.killed = False

    @property
    def pid(self) -> int:
        return 100_000 + self.number

    def speaks(self) -> bool:
        """Whether there is something to hear."""
        return bool(self.replies)

    def fileno(self) -> int:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        if self.speaks():
            os.eventfd_write(self._event, 1)
        return self._event

    @property
    def wants_write(self) -> bool:
        return False

    def send(self, message: Message) -> None:
        if isinstance(message, StartJob):
            self.attempts.append(message.job)
        self._behaviour(self, message)

    def serve(self, message: Message) -> None:
        self._server.handle(message)

    def flush(self) -> None:
        pass

    def receive(self) -> list[Message]:
        replies = self.replies[:]
        self.replies.clear()
        return replies

    def maps(self, segment: int) -> bool:
        return segment in self._reached

    def map_segment(self, segment: int, nbytes: int, fd: int) -> None:
        self._reached.add(segment)
        whole = Extent(segment, 0, nbytes)
        self._server.buffers[segment] = get_arena().buffer(whole)

    def unmap_dead(self, live: Any) -> None:
        pass

    def alive(self) -> bool:
        return not self.killed

    def wait(self, timeout_s: float) -> bool:
        return True

    def kill(self) -> None:
        self.killed = True

    def dispose(self) -> None:
        self._server.close()
        os.close(self._event)


class FakePool:
    """Gives what it was told to: a worker per behaviour, None, or an exception."""

    def __init__(self) -> None:
        self.script: list[Behaviour | Exception | None] = []
        self.made: list[InlineWorker] = []
        self.idle: list[InlineWorker] = []
        self.given_back: list[tuple[int, bool]] = []

    def lease(self, limit: int, *, own: int) -> InlineWorker | None:
        if self.idle:
            return self.idle.pop()
        behaviour = self.script.pop(0) if self.script else InlineWorker.serve
        if isinstance(behaviour, Exception):
            raise behaviour
        if behaviour is None:
            return None
        self.made.append(InlineWorker(len(self.made), behaviour))
        return self.made[-1]

    def give_back(self, worker: InlineWorker, *, usable: bool) -> None:
        self.given_back.append((worker.number, usable))
        if usable:
            self.idle.append(worker)
        else:
            worker.kill()


@contextlib.contextmanager
def fake_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePool]:
    """Let every save in this process use a pool of inline workers."""
    fake = FakePool()
    monkeypatch.setattr(_save, "get_pool", lambda: fake)
    monkeypatch.setattr(_save, "_warned", set())
    monkeypatch.setattr(_feed, "_ABORT_GRACE_S", 0.2)
    yield fake
    leases = get_arena().stats().num_leases
    for worker in fake.made:
        worker.dispose()
    assert leases == 0  # whatever happened, no window is lost
