"""Gathers workers for one large load, and memory for them to read to.

Runs in: trainer.
"""

from __future__ import annotations

import itertools
import logging
from typing import Any

from mpwriter._arena import Arena, arena_unavailable_reason, get_arena
from mpwriter._fetch_crew import Crew
from mpwriter._filesystems import pickled_filesystem
from mpwriter._pool import WorkerPool, get_pool
from mpwriter._process import WorkerProcess, current_directory, import_path
from mpwriter._ranges import PART_BYTES, REQUESTS
from mpwriter._types import Extent, StartReads
from mpwriter.errors import MPWriterError, StagingMemoryError, WorkerStartError

__all__ = ["BYTES_PER_WORKER", "gather"]

_logger = logging.getLogger(__name__)

# A worker costs 0.5 to 1 s until it has imported a store's client; in that time the trainer's own
# threads read some 200 MB (scripts/far_store.py --mode load --links none).
BYTES_PER_WORKER = 256 * 2**20

# Below those of saves: a worker that is late tells of a load when it serves a save already.
_numbers = itertools.count(-1, -1)


def gather(fs: Any, num_workers: int) -> Crew | None:
    """Workers for one load, and memory for them to read to.

    Args:
        fs: the filesystem.
        num_workers: at most.

    Returns:
        None where there are none to be had: a filesystem that cannot be pickled, no process, no
        memory.
    """
    if arena_unavailable_reason() is not None:
        return None
    pool, arena, job = get_pool(), get_arena(), next(_numbers)
    try:
        start = StartReads(
            job, pickled_filesystem(fs), REQUESTS, current_directory(), import_path()
        )
        wanted = num_workers * REQUESTS * PART_BYTES
        window = arena.lease(wanted, kind="window", min_nbytes=REQUESTS * PART_BYTES)
    except StagingMemoryError as exc:
        _logger.debug("no memory for workers to read to: %s", exc)
        return None
    except Exception as exc:  # whatever pickling brings
        _logger.debug("no worker can have this filesystem: %s", type(exc).__name__)
        return None
    workers: list[WorkerProcess] = []
    try:
        _lease(pool, arena, window, start, num_workers, workers)
        if workers:
            return Crew(workers, window, job, pool=pool, arena=arena)
    except MPWriterError as exc:
        _logger.debug("no worker to read with: %s", exc)
    for worker in workers:
        pool.give_back(worker, usable=False)
    arena.release(window)
    return None


def _lease(
    pool: WorkerPool,
    arena: Arena,
    window: Extent,
    start: StartReads,
    num_workers: int,
    workers: list[WorkerProcess],
) -> None:
    """Fill `workers`, and tell each of the load."""
    fd, nbytes = arena.segment_fd(window.segment), arena.segment_nbytes(window.segment)
    while len(workers) < num_workers:
        try:
            worker = pool.lease(num_workers, own=len(workers))
        except WorkerStartError as exc:
            _logger.debug("%s", exc)
            return
        if worker is None:
            return
        workers.append(worker)
        worker.unmap_dead(arena.live_segments())
        if not worker.maps(window.segment, writable=True):
            worker.map_segment(window.segment, nbytes, fd, writable=True)
        worker.send(start)
