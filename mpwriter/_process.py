"""One worker process, as the trainer sees it.

Runs in: trainer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Container, Iterator

import psutil

from mpwriter._channel import Channel, ChannelClosed, channel_pair
from mpwriter._types import MapSegment, Message, Ready, UnmapSegment
from mpwriter._worker import BOOTSTRAP, GROUP_SIGNALS
from mpwriter.errors import WorkerDiedError, WorkerStartError

__all__ = ["WorkerProcess", "current_directory", "import_path", "start_worker"]

logger = logging.getLogger(__name__)

# One thread per library in a worker: N workers on N cores, and none of the trainer's settings.
# Source: the variables that OpenMP, MKL, OpenBLAS and numexpr document.
_SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
}

# Source: ioprio_set(2): levels 0 to 7, 7 being the lowest.
_LOWEST_BEST_EFFORT = 7

# After SIGKILL a process is gone at once, uninterruptible I/O excepted.
_KILL_WAIT_S = 5.0


class WorkerProcess:
    """A running worker. Used by one thread at a time: whoever has leased it.

    Attributes:
        number: counts the workers of this process, from 0.
        ready: whether it has reported for work.
    """

    def __init__(self, number: int, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self.number = number
        self.ready = False
        self._process = process
        self._channel = channel
        self._mapped: dict[int, bool] = {}  # whether it may write there
        self._quiet: tuple[int, Collection[int] | None] = (0, None)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Readable when a message has arrived and when the worker has died."""
        return self._channel.fileno()

    @property
    def wants_write(self) -> bool:
        return self._channel.wants_write

    def send(self, message: Message) -> None:
        """Queue a message.

        Raises:
            WorkerDiedError: the worker is gone.
        """
        try:
            self._channel.send(message)
        except ChannelClosed as exc:
            raise self.death() from exc

    def maps(self, segment: int, *, writable: bool = False) -> bool:
        """Whether the segment is known to the worker, as one that it may write to where asked."""
        return self._mapped.get(segment, False) or (segment in self._mapped and not writable)

    def map_segment(self, segment: int, nbytes: int, fd: int, *, writable: bool = False) -> None:
        """Make a segment known to the worker. `fd` must outlive the next `flush`es of it."""
        if segment in self._mapped:
            self.send(UnmapSegment(segment))
        # Sent before the next frame is queued: the descriptor must outlive its frame.
        try:
            self._channel.send(MapSegment(segment, nbytes, writable), (fd,))
        except ChannelClosed as exc:
            raise self.death() from exc
        self._mapped[segment] = writable

    def unmap_dead(self, live: Container[int]) -> None:
        """Let the worker drop every segment that is not in `live`."""
        for segment in [number for number in self._mapped if number not in live]:
            self.send(UnmapSegment(segment))
            del self._mapped[segment]

    def flush(self) -> None:
        """Send what waits.

        Raises:
            WorkerDiedError: the worker is gone.
        """
        try:
            self._channel.flush()
        except ChannelClosed as exc:
            raise self.death() from exc

    def receive(self) -> list[Message]:
        """Messages that have arrived, without waiting.

        Raises:
            WorkerDiedError: the worker is gone and has said nothing more.
        """
        try:
            messages = self._channel.receive()
        except ChannelClosed as exc:
            raise self.death() from exc
        if messages and isinstance(messages[0], Ready):
            self.ready = True
            del messages[0]
        return messages

    def keep_quiet(self, niceness: int, cores: Collection[int] | None) -> None:
        """Lower the process's CPU and I/O priority for good, and keep it to some cores.

        Args:
            niceness: the least it is to have; 0 leaves it as it is.
            cores: None for this thread's own.

        Where the system refuses, the worker goes on as it is.
        """
        if self._quiet == (niceness, cores):
            return
        cores_before, self._quiet = self._quiet[1], (niceness, cores)
        if cores_before and not cores:  # another writer has kept it to some
            cores = os.sched_getaffinity(0)
        with _tolerated(self.number):
            if niceness > os.getpriority(os.PRIO_PROCESS, self.pid):
                os.setpriority(os.PRIO_PROCESS, self.pid, niceness)
                process = psutil.Process(self.pid)
                process.ionice(psutil.IOPRIO_CLASS_BE, _LOWEST_BEST_EFFORT)
        with _tolerated(self.number):
            if cores:
                os.sched_setaffinity(self.pid, cores)

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process now and reap it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_WAIT_S)
        self._channel.close()

    def close(self) -> None:
        """Ask the process to end by closing its channel."""
        self._channel.hang_up()

    def wait(self, timeout_s: float) -> bool:
        """Whether the process has ended within `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def forget(self) -> None:
        """In a fork of the trainer: drop the inherited end; the worker is not this process's."""
        self._channel.close()
        # Else Popen.__del__ would warn about, and try to reap, a child of another process.
        self._process.returncode = 0

    def _note_report(self) -> None:
        """A send may fail before the worker's report has been read: it was at work all the same."""
        with contextlib.suppress(ChannelClosed):
            messages = self._channel.receive()
            self.ready = bool(messages) and isinstance(messages[0], Ready)

    def death(self, path: str | None = None) -> WorkerDiedError:
        """What is to be raised when the worker is gone: its exit code or signal."""
        if not self.ready:
            self._note_report()
        # Its channel closes a moment before the process can be waited for.
        if not self.wait(_KILL_WAIT_S):
            self.kill()
        code = self._process.poll()
        signal_name = _signal_name(code)
        how = f"was killed by {signal_name}" if signal_name else f"ended with exit code {code}"
        where = f" while writing {path}" if path else ""
        return WorkerDiedError(
            f"worker {self.number} (pid {self.pid}) {how}{where}",
            worker=self.number,
            pid=self.pid,
            exit_code=code,
            signal_name=signal_name,
            path=path,
        )


@contextlib.contextmanager
def _tolerated(number: int) -> Iterator[None]:
    try:
        yield
    except (OSError, psutil.Error) as exc:
        logger.debug("worker %d keeps its priority or cores: %s", number, exc)


def _signal_name(exit_code: int | None) -> str | None:
    if exit_code is None or exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def start_worker(number: int) -> WorkerProcess:
    """Start a worker and return without waiting for it.

    Raises:
        WorkerStartError: no interpreter to run, or the system refuses another process.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise WorkerStartError(
            "there is no Python interpreter to run (sys.executable)", worker=number
        )
    try:
        channel, theirs = channel_pair()
    except OSError as exc:
        raise _start_error(number, exc) from exc
    try:
        process = _execute(_command(theirs), theirs)
    except (OSError, ValueError) as exc:
        channel.close()
        raise _start_error(number, exc) from exc
    finally:
        theirs.close()
    return WorkerProcess(number, process, channel)


def _start_error(number: int, exc: Exception) -> WorkerStartError:
    text = f"worker {number} could not be started: {type(exc).__name__}: {exc}"
    return WorkerStartError(text, errno=getattr(exc, "errno", None), worker=number)


def _command(theirs: socket.socket) -> list[str]:
    fd, pid = str(theirs.fileno()), str(os.getpid())
    return [sys.executable, "-c", BOOTSTRAP, fd, pid, *import_path()]


def import_path() -> tuple[str, ...]:
    """This process's sys.path, as it means the same in a worker.

    "" is the current directory; a worker's is not always the trainer's.
    """
    # Nothing can be imported from a directory that was removed.
    return tuple(path or current_directory("/nonexistent") for path in sys.path)


def current_directory(if_removed: str = "/") -> str:
    """This process's, or `if_removed` where it does not exist any more."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return if_removed


def _execute(command: list[str], theirs: socket.socket) -> subprocess.Popen[bytes]:
    # subprocess, not multiprocessing: it execs (vfork, so nothing of the trainer is copied),
    # works from daemonic processes, and needs neither __main__ nor a temporary directory.
    environment = {**os.environ, **_SINGLE_THREADED}
    output = _standard_error()
    # The mask is inherited through exec: a Ctrl-C during the child's start-up waits until the
    # child ignores it, instead of killing it with a traceback.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=(theirs.fileno(),),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _standard_error() -> int:
    """The trainer's stderr, for whatever a worker prints; nowhere if that is closed.

    Its stdout is left alone: a pipeline behind the trainer would wait for the worker's end.
    """
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2
