"""How a lane's job ends: errors, deaths and aborts, and the figures where all went well.

Runs in: trainer.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence

from mpwriter._lane import Job, Lane
from mpwriter._process import WorkerProcess
from mpwriter._report import WorkerReport
from mpwriter._types import ErrorRecord, JobDone, JobFailed
from mpwriter._worker import ABORTED
from mpwriter.errors import StorageError, WorkerDiedError, WorkerTimeoutError

__all__ = [
    "ask_to_abort",
    "at_work",
    "has_aborted",
    "living",
    "sleep_until_spoken_to",
    "storage_error",
    "timeout_error",
    "worker_report",
]


def ask_to_abort(lane: Lane) -> bool:
    """Send it an AbortJob; False where there is nobody to answer, or nothing to abort."""
    try:
        return lane.abort()
    except WorkerDiedError:
        return False


def living(lane: Lane) -> bool:
    """Whether somebody can still answer."""
    return not isinstance(lane.peer, WorkerProcess) or lane.peer.alive()


def at_work(lane: Lane) -> bool:
    """The same, and it has reported for work."""
    return not isinstance(lane.peer, WorkerProcess) or (lane.peer.ready and lane.peer.alive())


def sleep_until_spoken_to(lanes: Sequence[Lane], deadline_s: float) -> None:
    """Wait for a word of any of these workers, briefly: one may have died in silence."""
    if not lanes:
        return
    poll = select.poll()
    for lane in lanes:
        if isinstance(lane.peer, WorkerProcess):
            poll.register(lane.peer, select.POLLIN)
    poll.poll(max(0.0, min(0.05, deadline_s - time.monotonic())) * 1000)


def worker_report(lane: Lane, done: JobDone) -> WorkerReport:
    """The figures of one job."""
    worker = lane.peer
    number = worker.number if isinstance(worker, WorkerProcess) else None
    return WorkerReport(
        worker=number,
        files=1,
        nbytes=done.nbytes,
        write_s=done.write_s,
        crc_s=done.crc_s,
        publish_s=done.publish_s,
        cpu_s=done.cpu_s,
    )


def storage_error(error: ErrorRecord, lane: Lane) -> StorageError:
    """What the trainer raises for a job that has failed."""
    worker = lane.peer.number if isinstance(lane.peer, WorkerProcess) else None
    who = f"worker {worker}" if worker is not None else "the trainer"
    text = f"{who} could not write {error.path}: {error.type_name}: {error.text}"
    if error.traceback:
        text += f"\n--- traceback of {who} ---\n{error.traceback}"
    return StorageError(
        text,
        errno=error.errno,
        path=error.path,
        original_type=error.type_name,
        worker=worker,
        worker_traceback=error.traceback,
    )


def timeout_error(lane: Lane, timeout_s: float) -> WorkerTimeoutError:
    """For a worker that has been silent for too long."""
    worker = lane.peer
    assert isinstance(worker, WorkerProcess) and lane.job is not None
    return WorkerTimeoutError(
        f"worker {worker.number} (pid {worker.pid}) made no progress for {timeout_s:g} s "
        f"while writing {lane.job.path} (timeout_s)",
        worker=worker.number,
        pid=worker.pid,
        timeout_s=timeout_s,
        path=lane.job.path,
    )


def has_aborted(lane: Lane, finished: list[Job]) -> bool:
    """Whether the worker has answered; a job that it published just before joins `finished`."""
    try:
        if isinstance(lane.peer, WorkerProcess):
            lane.peer.flush()
        messages = lane.peer.receive()
    except WorkerDiedError:
        return False
    for message in messages:
        if isinstance(message, JobDone) and message.job == lane.attempt and lane.job:
            finished.append(lane.job)  # it was published just before
    return any(
        isinstance(message, JobFailed)
        and message.job == lane.attempt
        and message.error.type_name == ABORTED
        for message in messages
    )
