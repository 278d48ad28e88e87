"""One worker process, as the trainer sees it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpwriter import _process
from mpwriter._channel import Channel, channel_pair
from mpwriter._process import WorkerProcess, start_worker
from mpwriter._types import AbortJob, EndJob, JobFailed, MapSegment, Message, Ready, UnmapSegment
from mpwriter.errors import WorkerDiedError, WorkerStartError
from tests.saves import open_fds

WATCHDOG_S = 30.0


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    started = start_worker(7)
    yield started
    started.kill()


def receive(worker: WorkerProcess) -> list[Message]:
    """What comes next; an empty list for the report for work alone."""
    poll = select.poll()
    poll.register(worker, select.POLLIN)
    assert poll.poll(WATCHDOG_S * 1000)
    return worker.receive()


def make_ready(worker: WorkerProcess) -> None:
    while not worker.ready:
        assert receive(worker) == []


class Ended:
    """Stands in for a process that has ended."""

    def __init__(self, exit_code: int = 3) -> None:
        self.pid = 4711
        self.returncode = exit_code

    def poll(self) -> int:
        return self.returncode

    def wait(self, timeout: float) -> int:
        return self.returncode

    def kill(self) -> None:
        raise ProcessLookupError


@pytest.fixture
def ended() -> Iterator[tuple[WorkerProcess, Channel]]:
    """A worker that has ended, and its end of the channel, still open."""
    ours, bare = channel_pair()
    theirs = Channel(bare)
    process: Any = Ended()
    yield WorkerProcess(7, process, ours), theirs
    ours.close()
    theirs.close()


def test_start_worker_gives_one_that_reports_and_answers(worker: WorkerProcess) -> None:
    assert not worker.ready and worker.alive() and worker.number == 7
    make_ready(worker)
    worker.send(AbortJob(5))
    (answer,) = receive(worker)
    assert isinstance(answer, JobFailed) and answer.job == 5


def test_close_ends_the_process_in_order(worker: WorkerProcess) -> None:
    make_ready(worker)
    worker.close()
    assert worker.wait(WATCHDOG_S)
    assert worker.death().exit_code == 0


def test_close_ends_the_process_when_somebody_else_holds_the_channel(
    worker: WorkerProcess,
) -> None:
    """As a child does that was forked without Python's hooks: the trainer need not wait for it."""
    make_ready(worker)
    held = os.dup(worker.fileno())
    worker.close()
    try:
        assert worker.wait(WATCHDOG_S)
    finally:
        os.close(held)


def test_worker_ignores_the_signals_of_the_terminal_from_its_first_moment(
    worker: WorkerProcess,
) -> None:
    """C24: they are blocked before the exec, then ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.pid, number)
    make_ready(worker)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.pid, number)
    worker.send(AbortJob(1))
    assert len(receive(worker)) == 1


def test_start_worker_leaves_the_trainers_signals_alone(worker: WorkerProcess) -> None:
    """Invariant 13."""
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_receive_raises_when_the_process_was_killed(worker: WorkerProcess, number: int) -> None:
    make_ready(worker)
    os.kill(worker.pid, number)
    with pytest.raises(WorkerDiedError) as caught:
        receive(worker)
    died = caught.value
    assert died.signal_name == signal.Signals(number).name
    assert (died.worker, died.pid, died.exit_code) == (7, worker.pid, -number)
    assert str(died) == f"worker 7 (pid {worker.pid}) was killed by {died.signal_name}"
    with pytest.raises(WorkerDiedError):
        while True:  # the socket takes a few more, until it knows
            worker.send(AbortJob(1))


def test_death_names_the_file_and_the_exit_code(
    ended: tuple[WorkerProcess, Channel],
) -> None:
    worker, _ = ended
    died = worker.death("/there/__0_1.distcp")
    assert str(died) == (
        "worker 7 (pid 4711) ended with exit code 3 while writing /there/__0_1.distcp"
    )
    assert (died.exit_code, died.signal_name) == (3, None)
    assert died.path == "/there/__0_1.distcp"
    worker._process.returncode = -40
    assert worker.death().signal_name == "signal 40"  # it has no name


def test_worker_counts_as_ready_when_it_died_with_its_report_unread(
    ended: tuple[WorkerProcess, Channel],
) -> None:
    """Or its death in mid-job would be taken for an interpreter that cannot run workers."""
    worker, theirs = ended
    theirs.send(Ready(4711))
    theirs.close()
    with pytest.raises(WorkerDiedError):
        while True:
            worker.send(EndJob(1))
    assert worker.ready


def test_receive_returns_what_was_said_before_it_raises(
    ended: tuple[WorkerProcess, Channel],
) -> None:
    worker, theirs = ended
    theirs.send(Ready(4711))
    theirs.send(EndJob(1))
    theirs.close()
    assert worker.receive() == [EndJob(1)]
    with pytest.raises(WorkerDiedError):
        worker.receive()


def test_unmap_dead_lets_go_of_dead_segments_only(
    ended: tuple[WorkerProcess, Channel],
) -> None:
    worker, theirs = ended
    fd = os.open(os.devnull, os.O_RDONLY)
    for segment in range(3):
        worker.map_segment(segment, 10, fd)
    os.close(fd)
    worker.unmap_dead({1, 5})
    messages: list[Message] = []
    while len(messages) < 5:
        messages += theirs.receive()
    assert messages == [*(MapSegment(n, 10) for n in range(3)), UnmapSegment(0), UnmapSegment(2)]
    assert [worker.maps(segment) for segment in range(3)] == [False, True, False]


def test_worker_says_what_happened_when_it_cannot_map_a_segment(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """C26: an error that belongs to no job ends the worker, with a traceback."""
    worker = start_worker(0)
    make_ready(worker)
    fd = os.memfd_create("empty")
    worker.map_segment(0, 1 << 20, fd)
    os.close(fd)
    with pytest.raises(WorkerDiedError) as caught:
        receive(worker)
    assert caught.value.exit_code == 1
    assert "Traceback" in (error := capfd.readouterr().err) and "mmap" in error
    worker.kill()


@pytest.mark.parametrize("executable", ["", None, "/no/such/python", "/", "relative/python"])
def test_start_worker_raises_when_there_is_no_interpreter(
    executable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    before = open_fds()
    with pytest.raises(WorkerStartError) as caught:
        start_worker(4)
    assert caught.value.worker == 4
    assert open_fds() == before


def test_start_worker_raises_when_the_program_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """sys.executable is then the program itself, which would run once more."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(WorkerStartError):
        start_worker(0)


@pytest.mark.parametrize("refused", ["socketpair", "process"])
def test_start_worker_raises_when_the_system_refuses(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(11, "Resource temporarily unavailable")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise error

    if refused == "process":
        monkeypatch.setattr(subprocess, "Popen", refuse)
    else:
        monkeypatch.setattr(_process, "channel_pair", refuse)
    before = open_fds()
    with pytest.raises(WorkerStartError, match="temporarily unavailable") as caught:
        start_worker(0)
    assert caught.value.errno == 11 and caught.value.__cause__ is error
    assert open_fds() == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_start_worker_works_when_the_trainer_has_no_standard_error() -> None:
    kept = os.dup(2)
    os.close(2)
    try:
        worker = start_worker(0)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    try:
        make_ready(worker)
    finally:
        worker.kill()


def test_start_worker_works_when_the_cwd_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `python -c`: "" in sys.path is the cwd, in which nothing can be found then."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    gone.rmdir()
    worker = start_worker(0)
    try:
        make_ready(worker)
    finally:
        worker.kill()


def test_forget_leaves_the_process_to_the_one_that_started_it(worker: WorkerProcess) -> None:
    """As in a fork of the trainer: neither waited for nor killed."""
    make_ready(worker)
    pid = os.fork()
    if pid == 0:
        worker.forget()
        del worker
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    worker.send(AbortJob(1))
    assert len(receive(worker)) == 1
    assert worker.alive()


def test_kill_may_come_at_any_time(worker: WorkerProcess) -> None:
    worker.kill()
    worker.kill()
    assert not worker.alive()
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.pid, 0)
        pytest.fail("not reaped")
