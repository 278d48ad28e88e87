"""A worker that dies or hangs fails the save it serves, at once and by name, and no other save."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import mpwriter
from mpwriter import _feed
from mpwriter.errors import StorageError, WorkerDiedError, WorkerTimeoutError
from tests.fakes import FaultPlan
from tests.saves import (
    assert_holds,
    failure_in_save,
    failure_of,
    names_in,
    open_fds,
    save,
    small_state,
    worker_pids,
)
from tests.trainers import WATCHDOG_S, wait_until

WAYS = {
    "killed": ({"signal": signal.SIGKILL}, None, "SIGKILL"),
    "crashed": ({"signal": signal.SIGSEGV}, None, "SIGSEGV"),
    "exited": ({"exit_code": 3}, 3, None),
}
MOMENTS: dict[str, dict[str, Any]] = {
    "before open": {"op": "open"},
    "mid-write": {"op": "write", "nth": 2},
    "before publish": {"op": "mv"},
    "between publish and reply": {"op": "mv", "after": True},
}


_DIE_IN_TURN = """
import os, time
try:
    os.mkdir({first!r})
except FileExistsError:
    time.sleep(0.5)
os.kill(os.getpid(), {number})
"""


def large_state(number: int) -> dict[str, Any]:
    """Several write calls a file, several messages a worker."""
    return small_state(number, num_tensors=8, numel=150_000)


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "plan")


@pytest.fixture
def url(checkpoint_dir: Path) -> str:
    return f"fault://{checkpoint_dir}"


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("moment", list(MOMENTS))
def test_save_raises_when_a_worker_dies(
    moment: str, way: str, plan: FaultPlan, url: str, checkpoint_dir: Path
) -> None:
    """C01: naming worker, signal or exit code, and file; the checkpoint before stays as it was.

    C02: the next save succeeds, with its own values.
    """
    save(url, small_state(1), **plan.options)
    before = names_in(checkpoint_dir)
    action, exit_code, signal_name = WAYS[way]
    plan.add(name="__0_1.*", **MOMENTS[moment], **action)
    with pytest.raises(CheckpointException) as caught:
        save(url, large_state(2), **plan.options)
    died = failure_of(caught.value)
    assert isinstance(died, WorkerDiedError)
    assert died.signal_name == signal_name
    assert exit_code is None or died.exit_code == exit_code
    assert died.path is not None and re.search(r"/__0_1\.\w{8}\.distcp$", died.path)
    for text in (signal_name or "exit code 3", died.path, f"worker {died.worker}", str(died.pid)):
        assert text in str(died) and text in str(caught.value)
    assert names_in(checkpoint_dir) == before
    assert died.pid not in worker_pids()
    assert_holds(checkpoint_dir, small_state(1))
    plan.clear()
    report = save(url, large_state(3), **plan.options).last_report
    assert report is not None and report.num_workers == 2
    assert_holds(checkpoint_dir, large_state(3))
    assert len(names_in(checkpoint_dir)) == 3


@pytest.mark.parametrize("moment", list(MOMENTS))
def test_save_raises_when_a_worker_dies_at_the_commit(
    moment: str, plan: FaultPlan, url: str, checkpoint_dir: Path
) -> None:
    """C01: one of both checkpoints is there, whole."""
    save(url, small_state(1), **plan.options)
    before = names_in(checkpoint_dir)
    rule = {**MOMENTS[moment], "nth": None}
    plan.add(name=".metadata", **rule, signal=signal.SIGKILL)
    died = failure_in_save(url, large_state(2), **plan.options)
    assert isinstance(died, WorkerDiedError) and died.signal_name == "SIGKILL"
    assert died.path == str(checkpoint_dir / ".metadata")
    if moment == "between publish and reply":
        assert_holds(checkpoint_dir, large_state(2))
    else:
        assert names_in(checkpoint_dir) == before
        assert_holds(checkpoint_dir, small_state(1))
    plan.clear()
    save(url, small_state(3), **plan.options)
    assert_holds(checkpoint_dir, small_state(3))


def test_save_leaves_nothing_when_a_worker_dies_in_a_new_directory(
    plan: FaultPlan, url: str, checkpoint_dir: Path
) -> None:
    """C01: the other worker's file, complete or not, goes as well."""
    plan.add("mv", "__0_0.*", after=True, signal=signal.SIGKILL)
    assert isinstance(
        failure_in_save(url, large_state(1), num_workers=3, **plan.options), WorkerDiedError
    )
    assert names_in(checkpoint_dir) == []


def test_saves_alternate_between_failure_and_success_when_workers_die_now_and_then(
    plan: FaultPlan, url: str, checkpoint_dir: Path
) -> None:
    """C02: 5 times over, by turns for two reasons; processes, descriptors and threads are flat."""
    save(url, large_state(0), **plan.options)
    fds, threads = open_fds(), threading.active_count()
    for number in range(5):
        if number % 2:
            plan.add("write", "__0_0.*", nth=1, errno=errno.ENOSPC)
            expected: type[Exception] = StorageError
        else:
            plan.add("write", "__0_0.*", nth=2, signal=signal.SIGKILL)
            expected = WorkerDiedError
        assert isinstance(failure_in_save(url, large_state(-number), **plan.options), expected)
        plan.clear()
        save(url, large_state(number), **plan.options)
        assert_holds(checkpoint_dir, large_state(number))
        assert len(worker_pids()) == 2
        assert {child.pid for child in psutil.Process().children()} >= set(worker_pids())
        assert open_fds() == fds and threading.active_count() == threads
    assert len(names_in(checkpoint_dir)) == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_save_succeeds_when_a_worker_has_died_while_idle(
    number: int, checkpoint_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C15: another one is started, without a word."""
    save(checkpoint_dir, large_state(1))
    victim, survivor = worker_pids()
    os.kill(victim, number)
    # Dead with all its threads, and left to be reaped.
    assert os.waitid(os.P_PID, victim, os.WEXITED | os.WNOWAIT) is not None
    with caplog.at_level(logging.WARNING):
        report = save(checkpoint_dir, large_state(2)).last_report
    assert report is not None and report.num_workers == 2
    assert not [record for record in caplog.records if record.name.startswith("mpwriter")]
    assert survivor in worker_pids() and victim not in worker_pids()
    assert not psutil.pid_exists(victim)  # reaped
    assert_holds(checkpoint_dir, large_state(2))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_save_raises_when_a_worker_is_killed_while_it_starts(
    number: int, tmp_path: Path, checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C01, C02: the second one, which would die a little later, is not handed to the next save."""
    mpwriter.shutdown()
    program = _DIE_IN_TURN.format(first=str(tmp_path / "first"), number=int(number))
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    died = failure_in_save(checkpoint_dir, large_state(1))
    assert isinstance(died, WorkerDiedError)
    assert died.signal_name == signal.Signals(number).name
    assert died.path is not None and str(checkpoint_dir) in died.path
    assert names_in(checkpoint_dir) == []
    monkeypatch.undo()
    save(checkpoint_dir, large_state(2))
    assert len(worker_pids()) == 2
    assert_holds(checkpoint_dir, large_state(2))


@pytest.mark.parametrize(("op", "name"), [("open", "__0_1.*"), ("write", "__0_1.*")])
@pytest.mark.parametrize("attempt", range(3))
def test_save_raises_when_a_worker_exits_before_the_trainer_has_heard_of_it(
    attempt: int, op: str, name: str, plan: FaultPlan, url: str, checkpoint_dir: Path
) -> None:
    """Not taken for an interpreter that cannot run workers at all: nothing is written here then."""
    mpwriter.shutdown()
    plan.add(op, name, nth=1, exit_code=3)
    assert isinstance(
        failure_in_save(url, small_state(1, num_tensors=40, numel=150_000), **plan.options),
        WorkerDiedError,
    )
    assert names_in(checkpoint_dir) == []


@pytest.mark.parametrize("op", ["open", "write", "close", "mv"])
def test_save_raises_when_a_worker_makes_no_progress(
    op: str, plan: FaultPlan, url: str, checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C01: bounded by timeout_s; the stuck worker is killed."""
    monkeypatch.setattr(_feed, "_ABORT_GRACE_S", 0.2)
    save(url, small_state(1), **plan.options)
    before = names_in(checkpoint_dir)
    plan.add(op, "__0_1.*", block=True)
    stuck = failure_in_save(url, large_state(2), timeout_s=0.4, **plan.options)
    assert isinstance(stuck, WorkerTimeoutError) and isinstance(stuck, TimeoutError)
    assert stuck.timeout_s == 0.4 and stuck.path is not None and "__0_1." in stuck.path
    for text in ("0.4 s", "timeout_s", stuck.path, f"worker {stuck.worker}"):
        assert text in str(stuck)
    assert stuck.pid is not None and not psutil.pid_exists(stuck.pid)
    assert names_in(checkpoint_dir) == before
    plan.clear()
    save(url, large_state(3), timeout_s=0.4 if op == "mv" else None, **plan.options)
    assert_holds(checkpoint_dir, large_state(3))


def test_save_raises_when_a_worker_is_stopped(
    checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C01: not even its channel is read."""
    monkeypatch.setattr(_feed, "_ABORT_GRACE_S", 0.2)
    mpwriter.warm_up(2)
    stopped = worker_pids()[0]
    os.kill(stopped, signal.SIGSTOP)
    stuck = failure_in_save(checkpoint_dir, large_state(1), timeout_s=0.4)
    assert isinstance(stuck, WorkerTimeoutError) and stuck.pid == stopped
    assert not psutil.pid_exists(stopped)
    assert names_in(checkpoint_dir) == []


def test_save_waits_when_workers_are_slow_but_get_on(
    plan: FaultPlan, url: str, checkpoint_dir: Path
) -> None:
    """timeout_s bounds the silence, not the save: this one takes longer as a whole."""
    plan.add("write", "__0_*", sleep_s=0.3)
    state = {f"w{n}": torch.full((100_000,), float(n)) for n in range(4)}
    save(url, state, num_workers=1, timeout_s=1.0, per_worker_copy_ahead=1 << 20, **plan.options)
    writes = plan.calls("write", "__0_*")
    assert writes[-1].at_s - writes[0].at_s > 1.0
    assert_holds(checkpoint_dir, state)


def test_other_saves_go_on_when_a_worker_of_one_save_dies(tmp_path: Path, plan: FaultPlan) -> None:
    plan.add("write", "__0_*", block=True, times=1)
    slow = threading.Thread(
        target=save,
        args=(f"fault://{tmp_path}/slow", large_state(1)),
        kwargs={"num_workers": 1, **plan.options},
        daemon=True,
    )
    slow.start()
    wait_until(lambda: plan.calls("write", phase="begin"))
    plan.add("write", "__0_0.*", signal=signal.SIGKILL, times=1)
    assert isinstance(
        failure_in_save(f"fault://{tmp_path}/dying", large_state(2), num_workers=1, **plan.options),
        WorkerDiedError,
    )
    assert names_in(tmp_path / "dying") == []
    plan.release()
    slow.join(WATCHDOG_S)
    assert_holds(tmp_path / "slow", large_state(1))
