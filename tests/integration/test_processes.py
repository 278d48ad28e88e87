"""What the worker processes are like, and what they leave alone."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import fsspec
import psutil
import pytest
import torch

import mpwriter
from mpwriter import FsspecReader, MPFsspecWriter
from mpwriter.errors import WorkerDiedError, WorkerStartError
from tests.fakes import FaultPlan
from tests.fakes.asynclike import AsyncLikeFileSystem
from tests.fakes.thread_count import ThreadCountExtension
from tests.fakes.witness import witnessed
from tests.saves import assert_holds, save, small_state, worker_pids
from tests.trainers import WATCHDOG_S, Trainer, wait_until

_forks: list[int] = []
os.register_at_fork(before=lambda: _forks.append(1))


@pytest.fixture(autouse=True)
def _afresh() -> None:
    """No worker of an earlier test: it has that test's environment and standard error."""
    mpwriter.shutdown()


def test_save_reuses_its_workers_when_it_is_repeated(tmp_path: Path) -> None:
    """C11: process ids equal over 5 saves; started by exec, never by a fork of this process."""
    _forks.clear()
    seen = set()
    for number in range(5):
        save(f"witness://{tmp_path}/{number}", small_state(number), folder=str(tmp_path))
        seen.add(tuple(worker_pids()))
        assert_holds(tmp_path / str(number), small_state(number))
    assert len(seen) == 1
    assert not _forks
    facts = witnessed(tmp_path)
    assert {entry["pid"] for entry in facts} == set(next(iter(seen)))
    for entry in facts:
        # subprocess calls no fork hooks of Python's; a forked trainer would have its command.
        assert entry["command"][:2] == [sys.executable, "-c"]
        assert os.path.samefile(entry["program"], sys.executable)
    assert {child.pid for child in psutil.Process().children()} >= set(worker_pids())


def test_workers_hold_nothing_of_the_trainer_when_they_serve(tmp_path: Path) -> None:
    """Invariant 6: no torch, no __main__ of the trainer, no signals, no descriptors of its."""
    secret = tmp_path / "the trainer's own file"
    with secret.open("w") as file:
        os.set_inheritable(file.fileno(), True)
        save(f"witness://{tmp_path}/checkpoint", small_state(), folder=str(tmp_path))
    for facts in witnessed(tmp_path):
        assert facts["parent"] == os.getpid()
        assert not {"torch", "numpy", "mpwriter._writer"} & set(facts["modules"])
        assert "__file__" not in facts["main"]
        assert [name for name in facts["main"] if not name.startswith("__")] == ["main", "sys"]
        assert facts["ignores"] == [True, True]
        assert facts["blocked_signals"] == 0
        assert facts["omp_threads"] == "1"
        links = facts["links"]
        assert str(secret) not in links
        assert len([link for link in links if link.startswith("socket:")]) == 1


def test_workers_are_where_the_trainer_is_when_it_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 13: cwd and umask are those of the time of the save, not of the start."""
    for number, mask in enumerate((0o027, 0o002)):
        folder = tmp_path / f"cwd{number}"
        folder.mkdir()
        (tmp_path / f"facts{number}").mkdir()
        monkeypatch.chdir(folder)
        before = os.umask(mask)
        try:
            facts = str(tmp_path / f"facts{number}")
            save("witness://checkpoint", small_state(number), folder=facts)
        finally:
            os.umask(before)
        entries = witnessed(facts)
        assert {entry["pid"] for entry in entries} == set(worker_pids())
        assert {entry["cwd"] for entry in entries} == {str(folder)}
        modes = {path.stat().st_mode & 0o777 for path in (folder / "checkpoint").iterdir()}
        assert modes == {0o666 & ~mask}


def test_constructors_start_no_process_when_they_are_called(tmp_path: Path) -> None:
    """C12."""
    before = {child.pid for child in psutil.Process().children()}
    threads = threading.active_count()
    MPFsspecWriter(tmp_path, num_workers=4)
    FsspecReader(tmp_path, num_workers=4)
    assert {child.pid for child in psutil.Process().children()} == before
    assert threading.active_count() == threads
    assert worker_pids() == []


def test_warm_up_starts_the_workers_that_a_save_then_uses(tmp_path: Path) -> None:
    """C12."""
    mpwriter.warm_up(2, staging_bytes=1 << 20)
    warm = worker_pids()
    assert len(warm) == 2
    save(tmp_path / "checkpoint", small_state(3))
    assert worker_pids() == warm
    mpwriter.warm_up(1)
    assert worker_pids() == warm


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("exit 7", WorkerDiedError),
        ("kill -KILL $$", WorkerDiedError),
        (None, WorkerStartError),
    ],
)
def test_warm_up_raises_when_workers_cannot_start(
    program: str | None,
    error: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C12: errors surface in the warm-up, and nothing is left of the failed start."""
    python = tmp_path / "python"
    if program is not None:
        python.write_text(f"#!/bin/sh\n{program}\n")
        python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(error) as caught:
        mpwriter.warm_up(2)
    assert caught.value.worker is not None
    if program == "exit 7":
        assert caught.value.exit_code == 7 and "exit code 7" in str(caught.value)
    elif program is not None:
        assert caught.value.signal_name == "SIGKILL" and "SIGKILL" in str(caught.value)
    else:
        assert "No such file" in str(caught.value)
    assert worker_pids() == []
    monkeypatch.undo()
    mpwriter.warm_up(2)
    assert len(worker_pids()) == 2


def test_shutdown_ends_every_worker_when_called_twice(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint", small_state())
    pids = worker_pids()
    mpwriter.shutdown()
    mpwriter.shutdown(timeout_s=0)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    save(tmp_path / "next", small_state(1))
    assert len(worker_pids()) == 2 and not set(worker_pids()) & set(pids)


def test_shutdown_kills_a_worker_when_it_does_not_end(tmp_path: Path) -> None:
    """C19: bounded by its timeout."""
    mpwriter.warm_up(1)
    (pid,) = worker_pids()
    os.kill(pid, signal.SIGSTOP)
    mpwriter.shutdown(timeout_s=0.1)
    assert not psutil.pid_exists(pid)


def test_transforms_use_one_thread_when_they_run_in_a_worker(tmp_path: Path) -> None:
    """C13: and the trainer's own count is as before."""
    counts = tmp_path / "counts"
    counts.mkdir()
    before = torch.get_num_threads()
    save(tmp_path / "checkpoint", small_state(), _extensions=[ThreadCountExtension(str(counts))])
    found = [json.loads(path.read_text()) for path in counts.glob("*.json")]
    assert sorted(entry["pid"] for entry in found) == worker_pids()
    assert [entry["threads"] for entry in found] == [1, 1]
    assert torch.get_num_threads() == before
    assert os.environ.get("OMP_NUM_THREADS") == psutil.Process().environ().get("OMP_NUM_THREADS")


def test_save_and_filesystem_work_when_its_event_loop_runs_before(tmp_path: Path) -> None:
    """C09: the trainer uses an asynchronous filesystem before and after, workers have their own."""
    fs = fsspec.filesystem("asynclike")
    assert isinstance(fs, AsyncLikeFileSystem)
    fs.pipe_file(f"{tmp_path}/before", b"one")
    assert "fsspecIO" in {thread.name for thread in threading.enumerate()}
    for number in range(2):
        report = save(f"asynclike://{tmp_path}/checkpoint", small_state(number)).last_report
        assert report is not None and report.num_workers == 2
        assert fs.cat_file(f"{tmp_path}/before") == b"one"
        assert_holds(f"asynclike://{tmp_path}/checkpoint", small_state(number))


def test_what_a_filesystem_says_in_a_worker_reaches_the_trainers_stderr(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C26: at once, not at the worker's end."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    save(f"witness://{tmp_path}/checkpoint", small_state(), folder=str(tmp_path), talkative=True)
    assert len(worker_pids()) == 2
    captured = capfd.readouterr()
    for means in ("print", "stderr", "warnings", "logging"):
        assert captured.err.count(f"the witness says by {means}") >= 2, means
    assert captured.out == ""


_WITHOUT_NETWORK = """
import ctypes, os, sys
import psutil
from tests.saves import *
libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
cut_off = libc.unshare(CLONE_NEWNET) == 0 or libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0
print("cut off" if cut_off else "not permitted")
save(sys.argv[1], small_state(9))
for pid in tree_pids():
    kinds = {connection.type for connection in psutil.Process(pid).net_connections("inet")}
    assert not kinds, (pid, kinds)
print(len(tree_pids()))
"""


def test_save_opens_no_port_when_there_is_no_network(
    start_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    """C22."""
    trainer = start_trainer(_WITHOUT_NETWORK, tmp_path / "checkpoint")
    trainer.assert_succeeded()
    assert trainer.stdout.splitlines()[-1] == "3"
    assert_holds(tmp_path / "checkpoint", small_state(9))


def test_save_gets_one_worker_when_another_save_holds_all(tmp_path: Path) -> None:
    """It need not wait for the other save's upload; the pool does not stay larger for that."""
    plan = FaultPlan(tmp_path / "plan")
    plan.add("open", "__0_*", block=True, times=2)
    url = f"fault://{tmp_path}/slow"
    thread = threading.Thread(
        target=save, args=(url, small_state(1)), kwargs=plan.options, daemon=True
    )
    thread.start()
    try:
        wait_until(lambda: len(plan.calls("open", phase="begin")) == 2)
        held = worker_pids()
        report = save(
            f"witness://{tmp_path}/quick", small_state(2), folder=str(tmp_path)
        ).last_report
        assert report is not None and report.num_workers == 1 and report.files == 2
        assert not {facts["pid"] for facts in witnessed(tmp_path)} & set(held)
    finally:
        plan.release()
        thread.join(WATCHDOG_S)
    assert worker_pids() == held
    assert_holds(tmp_path / "slow", small_state(1))
    assert_holds(tmp_path / "quick", small_state(2))
