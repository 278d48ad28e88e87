"""The worker processes of this trainer, shared by all of its writers.

Runs in: trainer.

              start_worker                    lease
    (none) --------------->  idle  <---------------------->  leased to one save
                              |          give_back              |
                              | shutdown, death                 | death, kill
                              v                                 v
                            ended                             ended (a later lease starts another)

A leased worker belongs to the thread that leased it: no thread of the pool stands between a save
and its workers, and none is left running when the trainer's main thread ends. Workers start at
the first save that needs them or in `warm_up`, and stay.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import threading
import time

from mpwriter._arena import get_arena
from mpwriter._memory import local_world_size, usable_cores
from mpwriter._process import WorkerProcess, start_worker
from mpwriter.errors import WorkerStartError

__all__ = ["WorkerPool", "default_num_workers", "get_pool", "shutdown", "warm_up"]

# The design's cap for num_workers=None: past 8 files a rank, files and seeks cost more than
# further processes bring. Users may ask for more.
_MAX_DEFAULT_WORKERS = 8

logger = logging.getLogger(__name__)

_WARM_UP_TIMEOUT_S = 60.0


class WorkerPool:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._capacity = 0  # the largest num_workers asked for so far
        self._idle: list[WorkerProcess] = []
        self._leased: set[WorkerProcess] = set()
        self._next_number = 0

    def lease(self, limit: int, *, own: int) -> WorkerProcess | None:
        """Take an idle worker, or start one.

        A save that has no worker yet always gets one, so that none waits for another save's
        upload; for its further ones the pool does not grow past `limit` workers in all.

        Args:
            limit: the save's num_workers.
            own: how many workers the save holds already.

        Returns:
            None when the save has to go on with what it holds.

        Raises:
            WorkerStartError: one was due, and it cannot be started.
        """
        with self._lock:
            self._capacity = max(self._capacity, limit)
            while self._idle:
                worker = self._idle.pop()
                if worker.alive():
                    self._leased.add(worker)
                    return worker
                worker.kill()  # died while idle: reap it and go on
            if own and len(self._leased) >= limit:
                return None
            number = self._next_number
            self._next_number += 1
        worker = start_worker(number)
        with self._lock:
            self._leased.add(worker)
        return worker

    def give_back(self, worker: WorkerProcess, *, usable: bool) -> None:
        """Return a worker. One in an unknown state (`usable` false) is killed.

        As many stay as the largest num_workers that any save has asked for.
        """
        with self._lock:
            self._leased.discard(worker)
            room = len(self._idle) + len(self._leased) < self._capacity
            keep = usable and room and worker.alive()
            if keep:
                self._idle.append(worker)
        if not keep:
            worker.kill()  # it is idle or worthless: there is nothing to lose

    def start(self, num_workers: int) -> None:
        """Start workers until there are `num_workers`, and wait until each has reported.

        Raises:
            WorkerStartError, WorkerDiedError: what the start of one of them brought.
        """
        taken: list[WorkerProcess] = []
        try:
            while len(taken) < num_workers:
                worker = self.lease(num_workers, own=len(taken))
                if worker is None:
                    break
                taken.append(worker)
            deadline_s = time.monotonic() + _WARM_UP_TIMEOUT_S
            for worker in taken:
                _await_ready(worker, deadline_s)
        finally:
            for worker in taken:
                self.give_back(worker, usable=worker.ready)

    def prepare(self, num_workers: int) -> None:
        """Start missing workers without waiting for them; what fails will be seen at the save."""
        with self._lock:
            missing = num_workers - len(self._idle) - len(self._leased)
            self._capacity = max(self._capacity, num_workers)
            first, self._next_number = self._next_number, self._next_number + max(0, missing)
        for number in range(first, first + missing):
            try:
                worker = start_worker(number)
            except WorkerStartError as exc:
                logger.debug("%s", exc)
                return
            with self._lock:
                self._idle.append(worker)

    def pids(self) -> list[int]:
        """Process ids of all workers that have not ended."""
        with self._lock:
            return [worker.pid for worker in (*self._idle, *self._leased) if worker.alive()]

    def shutdown(self, timeout_s: float) -> None:
        """End every idle worker; leased ones end with their save.

        Workers that have not ended after `timeout_s` seconds are killed.
        """
        with self._lock:
            ending, self._idle = self._idle, []
            self._capacity = len(self._leased)
        deadline_s = time.monotonic() + timeout_s
        for worker in ending:
            worker.close()
        for worker in ending:
            if not worker.wait(max(0.0, deadline_s - time.monotonic())):
                worker.kill()

    def forget(self) -> None:
        """In a fork of the trainer: these workers belong to the parent."""
        for worker in (*self._idle, *self._leased):
            worker.forget()


def _await_ready(worker: WorkerProcess, deadline_s: float) -> None:
    poll = select.poll()
    poll.register(worker, select.POLLIN)
    while not worker.ready:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise WorkerStartError(
                f"worker {worker.number} (pid {worker.pid}) did not start within "
                f"{_WARM_UP_TIMEOUT_S:.0f} s",
                worker=worker.number,
            )
        if poll.poll(left_s * 1000):
            worker.receive()


def default_num_workers() -> int:
    """Workers of a writer with num_workers=None: this rank's share of the cores, 1 to 8.

    The ranks of a node together start no more workers than it has cores, unless there are more
    ranks than cores: then each has one.
    """
    return max(1, min(_MAX_DEFAULT_WORKERS, usable_cores() // local_world_size()))


_pool: WorkerPool | None = None
_pool_lock = threading.Lock()


def get_pool() -> WorkerPool:
    """The pool of this process; made at first use."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = WorkerPool()
            atexit.register(shutdown)
        return _pool


def warm_up(num_workers: int | None = None, staging_bytes: int = 0) -> None:
    """Start workers and claim staging memory now, so that errors surface before training does.

    Args:
        num_workers: workers to have; None as in `MPFsspecWriter`.
        staging_bytes: shared memory to claim and keep warm.

    Raises:
        WorkerStartError, WorkerDiedError: a worker does not start.
        StagingMemoryError: the memory is not to be had.
    """
    get_pool().start(default_num_workers() if num_workers is None else num_workers)
    if staging_bytes:
        get_arena().reserve(staging_bytes)


def shutdown(timeout_s: float = 10) -> None:
    """End the workers and free the shared memory. Safe to call twice; a later save starts anew.

    Args:
        timeout_s: how long workers may take before they are killed.
    """
    with _pool_lock:
        pool = _pool
    if pool is not None:
        pool.shutdown(timeout_s)
    get_arena().trim()


def _forget_after_fork() -> None:
    global _pool, _pool_lock
    pool, _pool, _pool_lock = _pool, None, threading.Lock()
    if pool is not None:
        pool.forget()


os.register_at_fork(after_in_child=_forget_after_fork)
