"""One worker and what is on its way to it.

Runs in: trainer.

A lane joins a worker (or the stand-in that writes in the trainer), the copy-ahead window that
feeds it, and the job it is at. Slots of the window go round:

    free --fill--> staged --events complete, Put--> in flight --Ack--> free

so at most the window's bytes are copied ahead of the file, and a slot is not used again before
the worker has let go of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from mpwriter._collector import collector_paused
from mpwriter._lane_window import Window
from mpwriter._staging import Batch, ItemStream
from mpwriter._staging_parts import Slot
from mpwriter._types import AbortJob, Ack, EndJob, ItemSpec, Message, Put, StartJob

__all__ = ["Job", "Lane", "Peer"]

# Messages about staged bytes that may wait for a worker: enough to keep it busy, few enough to
# be dropped at once when a save is aborted.
_MAX_STAGED_IN_FLIGHT = 8


@dataclass
class Job:
    """One bucket, one file.

    Attributes:
        path: as the filesystem names it; relative_path: its name in the checkpoint.
        positions: the plan's items that go into it; written: those that did, in file order,
            set when it is complete (items tied to another file's are left out).
        attempts: tries that have failed. furthest_bytes: payload that the best of them got rid of;
            gained_s: when it got so far, on the monotonic clock.
    """

    number: int
    path: str
    relative_path: str
    positions: list[int]
    container: str = "torch"
    header: tuple[ItemSpec, ...] = ()
    offsets: tuple[tuple[int, ...], ...] = ()
    attempts: int = 0
    written: list[int] = field(default_factory=list)
    furthest_bytes: int = 0
    gained_s: float = 0.0


class Peer(Protocol):
    """What a lane needs of a worker."""

    def send(self, message: Message) -> None: ...
    def receive(self) -> list[Message]: ...


class Lane:
    """Feeds one peer; used by the save's thread alone.

    Args:
        lease: makes the copy-ahead window, when there is something to copy.
        reach: makes a segment known to the peer.
    """

    def __init__(
        self, peer: Peer, lease: Callable[[], Window], reach: Callable[[int], None]
    ) -> None:
        self.peer = peer
        self._lease = lease
        self._reach = reach
        self._window: Window | None = None
        self.job: Job | None = None
        self.attempt = -1
        self.retry_at_s = 0.0
        self.progress_s = time.monotonic()
        self.stage_s = 0.0
        self._start: StartJob | None = None
        self._stream: ItemStream | None = None
        self._staged: deque[Batch] = deque()
        self._in_flight: deque[tuple[int, Batch]] = deque()
        self._sequence = 0
        self._taken_bytes = 0
        self._ended = False

    @property
    def stream(self) -> ItemStream:
        assert self._stream is not None
        return self._stream

    @property
    def outstanding(self) -> bool:
        """Whether the worker owes an answer."""
        return bool(self._in_flight) or self._ended

    @property
    def unannounced(self) -> bool:
        """Whether the worker knows of no job of this lane."""
        return self.job is None or self._start is not None

    @property
    def staged(self) -> bool:
        return bool(self._staged)

    def begin(self, job: Job, start: StartJob, stream: ItemStream) -> None:
        """Take on a job; `start` goes out with its first bytes."""
        self.job, self._stream = job, stream
        self._start = start
        # Every attempt has a number of its own: what is still on its way of a failed one is
        # dropped by the worker instead of ending up in the next.
        self.attempt = start.job
        self._sequence = 0
        self._ended = False
        self._taken_bytes = 0
        self.progress_s = time.monotonic()
        if job.attempts == 0:
            job.gained_s = self.progress_s

    def begin_again(self, start: StartJob, at_s: float) -> None:
        """Repeat the job from its first item, not before `at_s` on the monotonic clock."""
        self._take_back_all()
        self.stream.restart()
        assert self.job is not None
        self.begin(self.job, start, self.stream)
        self.retry_at_s = at_s

    def step(self) -> bool:
        """Stage at most one batch and send what has landed. Returns whether anything moved."""
        if self.job is None or self._ended or time.monotonic() < self.retry_at_s:
            return False
        moved = self._stage()
        while self._staged and self._staged[0].ready():
            self._send(self._staged.popleft())
            moved = True
        if self.stream.exhausted and not self._staged:
            moved = self._finish_sending() or moved
        return moved

    def wait_for_copies(self) -> None:
        """Wait until the oldest staged batch has landed."""
        self._staged[0].wait()

    def acknowledge(self, ack: Ack) -> int:
        """Take back the slots up to `ack`; returns their payload bytes."""
        nbytes = 0
        while self._in_flight and self._in_flight[0][0] <= ack.sequence:
            batch = self._in_flight.popleft()[1]
            nbytes += sum(batch.sizes)
            self._take_back(batch)
        self._taken_bytes += nbytes
        if self.job is not None and self._taken_bytes > self.job.furthest_bytes:
            self.job.furthest_bytes, self.job.gained_s = self._taken_bytes, time.monotonic()
        return nbytes

    def end(self) -> Job:
        """The job is over: forget it and take every slot back."""
        assert self.job is not None
        job, self.job = self.job, None
        self._take_back_all()
        self._ended = False
        return job

    def release(self) -> None:
        """Give the window back; no slot is touched afterwards."""
        self._take_back_all()
        if self._window is not None:
            self._window.release()
            self._window = None

    def abort(self) -> bool:
        """Ask the worker to drop the job; False when it has not heard of it."""
        for batch in self._staged:
            batch.wait()  # nothing may land in a slot that is given to somebody else
        if self.unannounced:
            return False
        self.peer.send(AbortJob(self.attempt))
        return True

    def _stage(self) -> bool:
        if self.stream.exhausted:
            return False
        begin_s = time.perf_counter()
        if self.stream.needs_slot():
            slots = self._slots()
            if not slots:
                return False
            batch = self._fill(slots[0])
            slots.popleft()
        elif len(self._in_flight) >= _MAX_STAGED_IN_FLIGHT:
            return False
        else:
            batch = self._fill(None)
        if batch is not None:
            self._staged.append(batch)
        self.stage_s += time.perf_counter() - begin_s
        return True

    def _fill(self, slot: Slot | None) -> Batch | None:
        with collector_paused():
            return self.stream.fill(slot)

    def _slots(self) -> deque[Slot]:
        if self._window is None:
            self._window = self._lease()
        return self._window.slots

    def _send(self, batch: Batch) -> None:
        batch.settle()
        self._announce()
        self._in_flight.append((self._sequence, batch))
        self._reach(batch.segment)
        pieces = (batch.specs, batch.offsets, batch.sizes)
        self.peer.send(Put(self.attempt, self._sequence, batch.segment, *pieces))
        self._sequence += 1

    def _announce(self) -> None:
        if self._start is not None:
            self.progress_s = time.monotonic()
            start, self._start = self._start, None
            self.peer.send(start)

    def _finish_sending(self) -> bool:
        if self._start is not None:
            return False  # every item is tied to another file's: there is no file to write
        self.peer.send(EndJob(self.attempt))
        self._ended = True
        return True

    @property
    def empty(self) -> bool:
        """Whether the job has turned out to have nothing of its own to write."""
        return self.stream.exhausted and not self._staged and self._start is not None

    def _take_back_all(self) -> None:
        for batch in self._staged:
            batch.wait()
            self._take_back(batch)
        for _, batch in self._in_flight:
            self._take_back(batch)
        self._staged.clear()
        self._in_flight.clear()

    def _take_back(self, batch: Batch) -> None:
        if batch.slot is not None and self._window is not None:
            self._window.slots.append(batch.slot)
