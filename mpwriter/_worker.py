"""The child process: takes jobs from its channel, writes files, answers.

Runs in: worker. Imports no torch, reads no `__main__` of the trainer, opens no port.

    trainer                                  worker
    -------                                  ------
    exec python -c BOOTSTRAP fd ppid path... main()
    MapSegment, StartJob  ---------------->  FileJob: open an unpublished file
    Put                   ---------------->  container bytes from the mapped segment
                          <----------------  Progress, where that takes long
                          <----------------  Ack: those extents are free
    EndJob                ---------------->  publish
                          <----------------  JobDone | JobFailed | JobRefused
    StartReads, ReadRange* --------------->  ReadJob: fill the mapped segment, for a load
                          <----------------  JobStarted | JobRefused, RangeRead | RangeFailed
    (closes, or dies)                        exits

The process ends when its channel does, and within a second of the trainer's death even where a
fork of the trainer still holds the other end: a thread watches the trainer itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from mpwriter._channel import Channel, ChannelClosed, Mailbox
from mpwriter._faults import error_record
from mpwriter._job import FileJob, JobParts
from mpwriter._readjob import ReadJob
from mpwriter._types import (
    AbortJob,
    Ack,
    EndJob,
    EndReads,
    ErrorRecord,
    JobFailed,
    JobRefused,
    JobStarted,
    MapSegment,
    Message,
    Progress,
    Put,
    ReadRange,
    Ready,
    StartJob,
    StartReads,
    UnmapSegment,
)

__all__ = ["ABORTED", "BOOTSTRAP", "GROUP_SIGNALS", "JobServer", "main"]

# Sent to whole process groups: by terminals (INT, QUIT, HUP), schedulers (TERM, USR1, USR2, XCPU)
# and timers that are inherited. What they mean is for the trainer to say.
GROUP_SIGNALS = frozenset(
    {
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGQUIT,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGXCPU,
        signal.SIGALRM,
        signal.SIGVTALRM,
        signal.SIGPROF,
    }
)

# What the new interpreter runs. Until sys.path is the trainer's only built-in modules may be
# imported: with -c the first entry is the current directory, where any name may be shadowed.
BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from mpwriter._worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)

# type_name of the record that answers an AbortJob.
ABORTED = "Aborted"

# How often the trainer is told that a file takes bytes; far below any timeout_s that makes sense.
_PROGRESS_S = 0.5

# How often the trainer's pid is looked at where the kernel has no pidfd (before Linux 5.3).
_PARENT_POLL_S = 0.5


class JobServer:
    """Serves the messages of one trainer; used by the child's loop and, in the trainer, by the
    stand-in that writes where no worker can.

    Args:
        reply: called with every answer.
        take_fd: gives the descriptor that came with a MapSegment.
        reply_later: the same as `reply`, for any thread; None where there are no loads to serve.
        owns_process: whether the working directory and the umask may be set to the trainer's.
    """

    def __init__(
        self,
        reply: Callable[[Message], None],
        take_fd: Callable[[], int],
        reply_later: Callable[[Message], None] | None = None,
        *,
        owns_process: bool = True,
    ) -> None:
        self._reply = reply
        self._reply_later = reply_later
        self._take_fd = take_fd
        self._owns_process = owns_process
        self._mappings: dict[int, mmap.mmap] = {}
        self.buffers: dict[int, memoryview] = {}
        self._job: FileJob | None = None
        self._job_number: int | None = None
        self._path = ""
        self._filesystem: Any = None
        self._spoke_s = 0.0
        self._reads: ReadJob | None = None

    def handle(self, message: Message) -> None:
        """Serve one message. An error of the job is answered, never raised.

        Raises:
            KeyboardInterrupt, SystemExit: in the trainer only; the job is dropped.
        """
        if isinstance(message, MapSegment):
            self._map(message)
        elif isinstance(message, UnmapSegment):
            self._unmap(message.segment)
        elif isinstance(message, StartJob):
            self._guarded(self._begin, message, message.job)
        elif isinstance(message, AbortJob):
            self._abort(message)
        elif isinstance(message, (Put, EndJob)) and message.job == self._job_number:
            # Messages of a job that has failed are still on their way: they are dropped.
            self._guarded(
                self._put if isinstance(message, Put) else self._end, message, message.job
            )
        elif isinstance(message, StartReads):
            self._begin_reads(message)
        elif self._reads is not None and isinstance(message, (ReadRange, EndReads)):
            self._go_on_reading(message, self._reads)

    def close(self) -> None:
        """Discard an unfinished job and unmap everything."""
        self._drop_job()
        for segment in list(self.buffers):
            self._unmap(segment)

    def _guarded(self, action: Callable[..., None], message: Message, job: int) -> None:
        try:
            action(message)
        except BaseException as exc:  # every error belongs to the trainer
            if not self._owns_process and not isinstance(exc, Exception):
                self._drop_job()
                raise  # Ctrl-C in the trainer is the user's, not the file's
            record = error_record(exc, self._path, fs=self._filesystem)
            self._drop_job()
            self._reply(JobFailed(job, record))

    def _begin(self, start: StartJob) -> None:
        self._path = start.path
        if self._owns_process:
            self._settle_in(start)
            os.umask(start.umask)
        try:
            parts = JobParts.of(start)
        except Exception as exc:
            # The filesystem's class, or an extension's, is not to be had in this process.
            self._reply(JobRefused(start.job, f"{type(exc).__name__}: {exc}"))
            return
        self._job_number = start.job
        self._filesystem = parts.filesystem
        self._job = FileJob(start, parts, self.buffers, self._progressed)
        self._spoke_s = time.monotonic()
        self._reply(JobStarted(start.job))

    def _begin_reads(self, start: StartReads) -> None:
        assert self._reply_later is not None
        self._settle_in(start)
        try:
            self._reads = ReadJob(start, self._reply_later)
        except Exception as exc:
            # The filesystem's class is not to be had in this process, or no thread.
            self._reply(JobRefused(start.job, f"{type(exc).__name__}: {exc}"))
            return
        self._reply(JobStarted(start.job))

    def _go_on_reading(self, message: ReadRange | EndReads, reads: ReadJob) -> None:
        if message.job != reads.number:
            return
        if isinstance(message, EndReads):
            reads.close()
            self._reads = None
        else:
            buffer = self.buffers[message.segment]
            reads.read(message, buffer[message.offset : message.offset + message.nbytes])

    def _settle_in(self, start: StartJob | StartReads) -> None:
        """Take on what the trainer's paths and modules mean to it now."""
        # A deleted working directory is no reason to fail: paths are absolute.
        with contextlib.suppress(OSError):
            os.chdir(start.cwd)
        if start.sys_path and sys.path != list(start.sys_path):
            sys.path[:] = start.sys_path  # the trainer's has changed since this process began

    def _put(self, put: Put) -> None:
        assert self._job is not None
        self._job.put(put)
        self._spoke_s = time.monotonic()
        self._reply(Ack(put.job, put.sequence))

    def _progressed(self) -> None:
        if self._job_number is not None and time.monotonic() - self._spoke_s > _PROGRESS_S:
            self._spoke_s = time.monotonic()
            self._reply(Progress(self._job_number))

    def _end(self, end: EndJob) -> None:
        assert self._job is not None
        done = self._job.finish()
        self._job, self._job_number = None, None
        self._reply(done)

    def _abort(self, abort: AbortJob) -> None:
        if abort.job == self._job_number:
            self._drop_job()
        # Answered in any case: a job that has just ended is no less gone.
        record = ErrorRecord(ABORTED, "aborted by the trainer", None, self._path, "", False)
        self._reply(JobFailed(abort.job, record))

    def _drop_job(self) -> None:
        job, self._job, self._job_number = self._job, None, None
        if job is not None:
            job.discard()

    def _map(self, message: MapSegment) -> None:
        fd = self._take_fd()
        try:
            access = mmap.PROT_READ | (mmap.PROT_WRITE if message.writable else 0)
            mapping = mmap.mmap(fd, message.nbytes, mmap.MAP_SHARED, access)
        finally:
            os.close(fd)
        self._mappings[message.segment] = mapping
        self.buffers[message.segment] = memoryview(mapping)

    def _unmap(self, segment: int) -> None:
        buffer = self.buffers.pop(segment, None)
        mapping = self._mappings.pop(segment, None)
        if buffer is not None:
            buffer.release()
        if mapping is not None:
            # A file object that kept a slice keeps the mapping alive until it lets go.
            with contextlib.suppress(BufferError):
                mapping.close()


def main(fd: int, trainer_pid: int) -> None:
    """Entry of the child: serve `fd` until it closes."""
    _settle(trainer_pid)
    channel = Channel(socket.socket(fileno=fd))
    exit_code = 0
    try:
        _serve(channel)
    except ChannelClosed:
        pass  # the trainer is gone or wants this process to end
    except BaseException:
        # Of no job, or it would have been answered: no memory to map a segment, or a bug.
        exit_code = 1
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        # Not sys.exit: threads of a filesystem library may block interpreter shutdown for ever.
        os._exit(exit_code)


def _serve(channel: Channel) -> None:
    answers: Mailbox[Message] = Mailbox()
    server = JobServer(channel.send, channel.take_fd, answers.put)
    poll = select.poll()
    poll.register(answers, select.POLLIN)
    try:
        channel.send(Ready(os.getpid()))
        while True:
            poll.register(channel, select.POLLIN | (select.POLLOUT if channel.wants_write else 0))
            poll.poll()
            for answer in answers.take():
                channel.send(answer)
            channel.flush()
            for message in channel.receive():
                server.handle(message)
    finally:
        server.close()


def _settle(trainer_pid: int) -> None:
    """Make this process independent of the terminal's signals, dependent on the trainer's life."""
    # The trainer gets Ctrl-C and the scheduler's signals too and decides what becomes of the
    # save. They were blocked from before the exec, so that none could fall into start-up.
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
    # What a filesystem prints is to be seen when it happens, not when a buffer is full.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()  # a crash inside a client library leaves a trace on the trainer's stderr
    threading.Thread(target=_watch_trainer, args=(trainer_pid,), daemon=True).start()


def _watch_trainer(trainer_pid: int) -> None:
    try:
        pidfd = os.pidfd_open(trainer_pid)
    except (AttributeError, OSError):
        pidfd = -1
    # Looked at after the pidfd is open: a pid that was reused meanwhile is not our parent.
    if os.getppid() == trainer_pid and pidfd >= 0:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll()
    while os.getppid() == trainer_pid and pidfd < 0:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)
