"""What the trainer and the machine notice of an asynchronous save."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

import mpwriter
from mpwriter._arena import get_arena
from mpwriter._compat import HAS_ASYNC_STAGING
from tests.asyncs import async_save, settled, wait_for_saves
from tests.fakes import FaultPlan
from tests.memory import PeakMemory
from tests.saves import assert_holds, open_fds, save, small_state, worker_pids
from tests.trainers import Trainer, wait_until

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    """Workers as they are started: priorities do not come back."""
    mpwriter.shutdown()
    yield
    wait_for_saves()


def niceness() -> list[int]:
    return [os.getpriority(os.PRIO_PROCESS, pid) for pid in worker_pids()]


def test_workers_are_quiet_when_they_serve_an_asynchronous_save(tmp_path: Path) -> None:
    """CPU and I/O priority, which stay; a save that is not asynchronous lowers nothing."""
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    save(tmp_path / "sync", small_state())
    assert niceness() == [ours, ours]
    settled(async_save(small_state(), tmp_path / "loud", background_priority=False))
    assert niceness() == [ours, ours]
    settled(async_save(small_state(), tmp_path / "quiet"))
    assert niceness() == [10, 10]
    for pid in worker_pids():
        assert tuple(psutil.Process(pid).ionice()) == (psutil.IOPRIO_CLASS_BE, 7)
    assert os.getpriority(os.PRIO_PROCESS, 0) == ours
    pids = worker_pids()
    save(tmp_path / "sync", small_state(1))
    assert worker_pids() == pids and niceness() == [10, 10]
    assert_holds(tmp_path / "quiet", small_state())


def test_workers_keep_to_their_cores_when_told_so(tmp_path: Path) -> None:
    """And are where the trainer is when the next writer does not say; a wrong number is refused."""
    ours = os.sched_getaffinity(0)
    core = min(ours)

    def cores() -> list[set[int]]:
        return [os.sched_getaffinity(pid) for pid in worker_pids()]

    settled(async_save(small_state(), tmp_path / "x", worker_cores=[core]))
    assert cores() == [{core}, {core}]
    settled(async_save(small_state(), tmp_path / "x"))
    assert cores() == [ours, ours]
    save(tmp_path / "y", small_state(), worker_cores=(core,))
    assert cores() == [{core}, {core}]
    with pytest.raises(ValueError, match=r"worker_cores.*4095"):
        async_save(small_state(), tmp_path / "x", worker_cores=[core, 4095])
    assert_holds(tmp_path / "x", small_state())
    assert os.sched_getaffinity(0) == ours


def test_trainer_goes_on_while_a_save_is_written(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """G09: a tick of 1 ms in the trainer's thread; the longest gap is reported, not judged."""
    state = {f"w{n}": torch.randn(2 * MIB) for n in range(16)}
    settled(async_save(state, tmp_path / "warm"))
    future = async_save(state, tmp_path / "x")
    gaps = []
    last_s = time.perf_counter()
    while not future.done():
        time.sleep(0.001)
        now_s = time.perf_counter()
        gaps.append(now_s - last_s)
        last_s = now_s
    assert settled(future) is None
    assert len(gaps) > 5
    record_property("longest_gap_ms", round(max(gaps) * 1e3, 1))
    record_property("ticks", len(gaps))


@pytest.mark.parametrize(
    ("num_saves", "numel"), [(12, 10_000), pytest.param(20, 125_000, marks=pytest.mark.slow)]
)
def test_saves_leave_nothing_to_the_garbage_collector(
    num_saves: int, numel: int, tmp_path: Path
) -> None:
    """G16: switched off, as large trainers do; 20 saves of 50 MB, each with a writer of its own."""
    state = {f"w{n}": torch.randn(numel) for n in range(100)}
    process = psutil.Process()
    figures = []
    gc.collect()
    gc.disable()
    try:
        for number in range(num_saves):
            for value in state.values():
                value.fill_(number)
            beside = HAS_ASYNC_STAGING and number % 3 == 2
            options = {"async_staging": True} if beside else {}
            response = async_save(state, tmp_path / "x", **options)
            if options:
                response.staging_completion.result(30)
                response = response.upload_completion
            assert settled(response) is None
            del response
            stats = get_arena().stats()
            rss = process.memory_info().rss
            figures.append((stats.claimed_bytes, stats.num_opened, open_fds(), _threads(), rss))
    finally:
        gc.enable()
    claimed, opened, fds, threads, rss = zip(*figures, strict=True)
    assert len(set(claimed[3:])) == 1
    assert len(set(opened[3:])) == 1
    assert max(fds[3:]) <= fds[3] + 1
    assert max(threads[3:]) <= max(threads[:3]) + 1
    half = num_saves // 2
    assert max(rss[half:]) <= max(rss[3:half]) + 10 * MIB, [value >> 20 for value in rss]
    last = {key: torch.full_like(value, num_saves - 1) for key, value in state.items()}
    assert_holds(tmp_path / "x", last)


def _threads() -> int:
    """Not counting those that are at their end."""
    return len([t for t in threading.enumerate() if t is not threading.current_thread()])


_LARGE = """
import os, sys, time
import torch
import tests.fakes
from tests.asyncs import async_save
from tests.saves import *

folder, plan, go_on = sys.argv[1:]
state = {f"w{n}": torch.full((1250000,), float(n)) for n in range(40)}
save(f"{folder}/warm", {"w": torch.ones(3)})
print("ready")
while not os.path.exists(go_on):
    time.sleep(0.01)
for number in range(3):
    for value in state.values():
        value.add_(1)
    future = async_save(state, f"fault://{folder}/{number}", plan=plan)
    future.result()
    assert_holds(f"{folder}/{number}", {"w7": torch.full((1250000,), 8.0 + number)})
print("done")
while os.path.exists(go_on):
    time.sleep(0.01)
"""


@pytest.fixture
def slow_plan(tmp_path: Path) -> str:
    """A filesystem that takes its time, so that the peak can be seen."""
    plan = FaultPlan(tmp_path / "plan")
    plan.add("open", "*.distcp", sleep_s=0.5)
    return str(plan.folder)


@pytest.mark.slow
def test_save_needs_one_staged_copy(
    start_trainer: Callable[..., Trainer], tmp_path: Path, slow_plan: str
) -> None:
    """C25, D06: PSS of trainer and workers; 200 MB of state and as much once, not two or three."""
    go_on = tmp_path / "go_on"
    trainer = start_trainer(_LARGE, tmp_path, slow_plan, go_on)
    trainer.wait_for("ready")
    with PeakMemory(trainer.pid) as before:
        wait_until(lambda: before.pss_bytes)
    with PeakMemory(trainer.pid) as peak:
        go_on.touch()
        trainer.wait_for("done")
    with PeakMemory(trainer.pid) as after:
        wait_until(lambda: after.pss_bytes)
    go_on.unlink()
    trainer.assert_succeeded()
    state_bytes = 200_000_000
    growth = peak.pss_bytes - before.pss_bytes
    assert state_bytes < growth < 1.3 * state_bytes, growth / state_bytes
    assert after.pss_bytes - before.pss_bytes < 1.3 * state_bytes
