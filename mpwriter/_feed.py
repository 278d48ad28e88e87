"""Feeds the jobs of one save to workers and brings back what they say.

Runs in: trainer, in the thread that saves.

    pending jobs --> lanes (a worker and a window each) --> JobDone per job
          ^                     |
          |   transient error   |  any other error: abort every lane, remove what is published,
          +---------------------+  give the workers back (idle or killed), raise

The loop never blocks on one worker: it stages a batch for each lane that has a free slot, reads
what has arrived, and sleeps only when nothing moves, until a worker speaks or dies.
"""

from __future__ import annotations

import itertools
import logging
import select
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial

from mpwriter._arena import Arena
from mpwriter._feed_ends import (
    ask_to_abort,
    at_work,
    has_aborted,
    living,
    sleep_until_spoken_to,
    storage_error,
    timeout_error,
    worker_report,
)
from mpwriter._feed_lanes import LaneMaker
from mpwriter._lane import Job, Lane
from mpwriter._lane_window import TrainerPeer
from mpwriter._pool import WorkerPool
from mpwriter._process import WorkerProcess
from mpwriter._report import WorkerReport
from mpwriter._staging import ItemStream
from mpwriter._types import (
    Ack,
    ErrorRecord,
    JobDone,
    JobFailed,
    JobRefused,
    Message,
    StartJob,
)
from mpwriter.errors import (
    WorkerDiedError,
    WorkerStartError,
)

__all__ = ["FeedSettings", "JobFeed"]

logger = logging.getLogger(__name__)

# How long aborted workers have to discard their files before they are killed.
_ABORT_GRACE_S = 3.0

# Longest sleep of the loop: timeouts and retries are looked at this often.
_TICK_S = 0.5

# First pause before a failed file is written again; doubles per try up to the second figure.
_RETRY_PAUSE_S = 0.2
_MAX_RETRY_PAUSE_S = 10.0

_attempt_numbers = itertools.count()


@dataclass(frozen=True)
class FeedSettings:
    """What is the same for every job of a save."""

    num_workers: int
    copy_ahead_bytes: int
    budget_bytes: int | None
    timeout_s: float
    retries: int
    niceness: int  # of the workers' processes; 0 leaves them as they are
    worker_cores: tuple[int, ...] | None
    trainer_reason: str | None  # why every file is written in the trainer; None: workers serve
    start: Callable[[Job, int, bool], StartJob]  # job, attempt, whether it stays in the trainer
    stream: Callable[[Job], ItemStream]
    remove: Callable[[Job], None]  # a published file of a save that has failed
    sweep: Callable[[Job], None]  # what a killed worker has left of a file
    on_bytes: Callable[[int], None]
    on_file: Callable[[Job], None]
    warn: Callable[[str], None]


class JobFeed:
    """Runs the jobs of one save. Use once, from one thread.

    Args:
        jobs: in the order they are to begin.
        job_bytes: size of the largest job, as far as it is known.
    """

    def __init__(
        self,
        settings: FeedSettings,
        jobs: Sequence[Job],
        job_bytes: int,
        pool: WorkerPool,
        arena: Arena,
    ) -> None:
        self._settings = settings
        self._pending = deque(jobs)
        self._pool = pool
        self._maker = LaneMaker(arena, settings.copy_ahead_bytes, settings.budget_bytes, job_bytes)
        self._lanes: list[Lane] = []
        self._trainer_reason = settings.trainer_reason
        self._done: dict[int, JobDone] = {}
        self._finished: list[Job] = []
        self.reports: list[WorkerReport] = []
        self.stage_s = 0.0

    def run(self) -> dict[int, JobDone]:
        """Write every job's file.

        Returns:
            What each worker said, by job number; a job whose items are all tied to other
            files has no entry.

        Raises:
            MPWriterError: the first error; no file of these jobs is left under its name.
        """
        try:
            while self._pending or self._lanes:
                self._engage()
                if not self._move():
                    self._wait()
        except BaseException:
            self._abandon()
            raise
        return self._done

    # -- lanes ---------------------------------------------------------------------------

    def _engage(self) -> None:
        """Give pending jobs to lanes: one per worker, or one in the trainer."""
        while self._pending and len(self._lanes) < self._settings.num_workers:
            if self._trainer_reason is not None:
                if self._lanes:
                    return
                self._settings.warn(self._trainer_reason)
                self._lanes.append(self._maker.in_trainer())
            else:
                lane = self._worker_lane()
                if lane is None:
                    if self._trainer_reason is not None:
                        continue
                    return
                self._lanes.append(lane)
            self._begin(self._lanes[-1], self._pending.popleft())

    def _worker_lane(self) -> Lane | None:
        try:
            worker = self._pool.lease(self._settings.num_workers, own=len(self._lanes))
        except WorkerStartError as exc:
            if not self._lanes:
                self._trainer_reason = str(exc)
            return None
        if worker is None:
            return None
        worker.keep_quiet(self._settings.niceness, self._settings.worker_cores)
        return self._maker.of_worker(worker)

    def _begin(self, lane: Lane, job: Job) -> None:
        lane.begin(job, self._start(lane, job), self._settings.stream(job))

    def _start(self, lane: Lane, job: Job) -> StartJob:
        return self._settings.start(job, next(_attempt_numbers), _in_trainer(lane))

    def _next(self, lane: Lane) -> None:
        """The lane's job is over: take on another, or leave."""
        if self._pending and (self._trainer_reason is None or _in_trainer(lane)):
            self._begin(lane, self._pending.popleft())
        else:
            self._leave(lane, usable=True)

    def _leave(self, lane: Lane, *, usable: bool) -> None:
        self._lanes.remove(lane)
        self.stage_s += lane.stage_s
        if isinstance(lane.peer, WorkerProcess) and not usable:
            lane.peer.kill()  # first: a stuck one may still read its window
        lane.release()
        if isinstance(lane.peer, WorkerProcess):
            self._pool.give_back(lane.peer, usable=usable)
        elif isinstance(lane.peer, TrainerPeer):
            lane.peer.close()

    # -- the loop ------------------------------------------------------------------------

    def _move(self) -> bool:
        moved = False
        for lane in list(self._lanes):
            moved = self._visit(lane, self._step) or moved
        for lane in list(self._lanes):
            moved = self._visit(lane, self._collect) or moved
        return moved

    def _visit(self, lane: Lane, action: Callable[[Lane], bool]) -> bool:
        try:
            return action(lane)
        except WorkerDiedError:
            self._died(lane)
            return True

    def _step(self, lane: Lane) -> bool:
        moved = lane.step()
        if lane.empty:
            lane.end()
            self._next(lane)
            return True
        return moved

    def _collect(self, lane: Lane) -> bool:
        messages = lane.peer.receive()
        for message in messages:
            lane.progress_s = time.monotonic()
            self._handle(lane, message)
        return bool(messages)

    def _handle(self, lane: Lane, message: Message) -> None:
        if getattr(message, "job", None) != lane.attempt:
            return  # the last words of an attempt that is over
        if isinstance(message, Ack):
            self._settings.on_bytes(lane.acknowledge(message))
        elif isinstance(message, JobDone):
            self._finish(lane, message)
        elif isinstance(message, JobRefused):
            self._refused(lane, message.reason)
        elif isinstance(message, JobFailed):
            self._failed(lane, message.error)

    def _finish(self, lane: Lane, done: JobDone) -> None:
        job = lane.end()
        job.written = lane.stream.written
        self._done[job.number] = done
        self._finished.append(job)
        self._settings.on_file(job)
        self.reports.append(worker_report(lane, done))
        self._next(lane)

    def _refused(self, lane: Lane, reason: str) -> None:
        self._trainer_reason = f"a worker process cannot use this filesystem: {reason}"
        self._pending.appendleft(lane.end())
        self._leave(lane, usable=True)

    def _failed(self, lane: Lane, error: ErrorRecord) -> None:
        assert lane.job is not None
        if not error.transient or lane.job.attempts >= self._settings.retries:
            raise storage_error(error, lane)
        if time.monotonic() - lane.job.gained_s > self._settings.timeout_s:
            raise storage_error(error, lane)  # try after try, and none gets any further
        lane.job.attempts += 1
        pause_s = min(_MAX_RETRY_PAUSE_S, _RETRY_PAUSE_S * 2 ** (lane.job.attempts - 1))
        logger.warning(
            "%s failed (%s: %s); try %d of %d in %.1f s",
            error.path,
            error.type_name,
            error.text,
            lane.job.attempts + 1,
            self._settings.retries + 1,
            pause_s,
        )
        start = self._start(lane, lane.job)
        lane.begin_again(start, time.monotonic() + pause_s)

    def _wait(self) -> None:
        for lane in self._lanes:
            if lane.staged:
                lane.wait_for_copies()  # an accelerator is at work: it is done in milliseconds
                return
        poll = select.poll()
        for lane in self._lanes:
            if isinstance(lane.peer, WorkerProcess):
                wants = select.POLLIN | (select.POLLOUT if lane.peer.wants_write else 0)
                poll.register(lane.peer, wants)
        events = poll.poll(self._until_retry_s() * 1000)
        heard = {fd for fd, event in events if event != select.POLLOUT}
        for lane in list(self._lanes):
            self._visit(lane, partial(self._look_after, heard))

    def _until_retry_s(self) -> float:
        """How long to sleep at most: until the next retry is due, or for a tick."""
        now_s = time.monotonic()
        pauses = [lane.retry_at_s - now_s for lane in self._lanes if lane.retry_at_s > now_s]
        return min(_TICK_S, *pauses) if pauses else _TICK_S

    def _look_after(self, heard: Container[int], lane: Lane) -> bool:
        if isinstance(lane.peer, WorkerProcess):
            lane.peer.flush()
            silent_s = time.monotonic() - lane.progress_s
            # What is heard has not been read yet. This process may have been stopped meanwhile.
            silent = silent_s > self._settings.timeout_s and lane.peer.fileno() not in heard
            if lane.outstanding and silent:
                raise timeout_error(lane, self._settings.timeout_s)
        return False

    # -- errors --------------------------------------------------------------------------

    def _died(self, lane: Lane) -> None:
        worker = lane.peer
        assert isinstance(worker, WorkerProcess)
        death = worker.death(lane.job.path if lane.job else None)
        if worker.ready or death.signal_name is not None:
            raise death
        # It ended by itself before it was at work: this interpreter cannot run workers.
        # Without the file's name: of this reason the user hears once, not at every save.
        self._trainer_reason = f"worker processes do not start here: {worker.death()}"
        if lane.job is not None:
            self._pending.appendleft(lane.end())
        self._leave(lane, usable=False)

    def _abandon(self) -> None:
        """Leave nothing of this save: stop every lane, then remove what was published."""
        waiting = [lane for lane in self._lanes if ask_to_abort(lane)]
        # One that has not reported yet may be about to die of what has just killed another.
        clean = {id(lane) for lane in self._lanes if lane.unannounced and at_work(lane)}
        deadline_s = time.monotonic() + _ABORT_GRACE_S
        while waiting and time.monotonic() < deadline_s:
            clean.update(id(lane) for lane in waiting if has_aborted(lane, self._finished))
            waiting = [lane for lane in waiting if id(lane) not in clean and living(lane)]
            sleep_until_spoken_to(waiting, deadline_s)
        for lane in list(self._lanes):
            job, usable = lane.job, id(lane) in clean
            # Also of one that has answered: an error may come after the file has got its name.
            begun = job is not None and (job.attempts > 0 or not lane.unannounced)
            self._leave(lane, usable=usable)
            if job is not None and (begun or not usable):
                self._settings.sweep(job)
        for job in self._finished:
            self._settings.remove(job)


def _in_trainer(lane: Lane) -> bool:
    return isinstance(lane.peer, TrainerPeer)
