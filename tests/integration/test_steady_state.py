"""Nothing grows over any number of saves, and nothing is said at the end."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

import mpwriter
from mpwriter._arena import get_arena
from tests import leaks
from tests.saves import assert_holds, open_fds, save, small_state, worker_pids
from tests.trainers import Trainer

_MANY_SAVES = 50


def footprint() -> dict[str, int]:
    """Counts that have to stay flat, of this process and of its workers."""
    gc.collect()
    counts = {
        "children": len(psutil.Process().children(recursive=True)),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "fds": open_fds(),
        "shm": sum(leaks._is_ours(name) for name in os.listdir("/dev/shm")),
        "claimed": get_arena().stats().claimed_bytes,
        "leased": get_arena().stats().num_leases,
    }
    for number, pid in enumerate(worker_pids()):
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        mapped = [link for link in links if link.startswith("/memfd:")]
        counts[f"worker{number}_fds"] = len(links) - len(mapped)
        # A mapping keeps its descriptor. Which worker has met which segment is a matter of luck.
        assert len(mapped) <= get_arena().stats().num_segments
        counts[f"worker{number}_threads"] = len(os.listdir(f"/proc/{pid}/task"))
    return counts


def resident_bytes() -> list[int]:
    """Of this process all; of a worker not the shared memory, which `footprint` has as claimed."""
    own = psutil.Process().memory_info().rss
    return [own, *(_status_bytes(pid, "RssAnon", "RssFile") for pid in worker_pids())]


def _status_bytes(pid: int, *names: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    figures = dict(line.split(":", 1) for line in lines)
    return sum(1024 * int(figures[name].split()[0]) for name in names)


def test_counts_are_flat_when_every_save_has_a_writer_of_its_own(tmp_path: Path) -> None:
    """C23: 50 saves of changing sizes, writers dropped."""
    mpwriter.shutdown()
    for number in range(3):
        save(tmp_path / "checkpoint", small_state(number, num_tensors=40, numel=10_000))
    before = footprint()
    pids = worker_pids()
    for number in range(_MANY_SAVES):
        sizes = {"num_tensors": 1 + 7 * number % 40, "numel": 1 + 997 * number % 10_000}
        save(tmp_path / "checkpoint", small_state(number, **sizes))
    assert footprint() == before
    assert worker_pids() == pids
    assert_holds(tmp_path / "checkpoint", small_state(_MANY_SAVES - 1, **sizes))
    assert len(os.listdir(tmp_path / "checkpoint")) <= 3


def test_memory_is_flat_when_every_save_has_a_writer_of_its_own(tmp_path: Path) -> None:
    """Invariant 10: resident memory within 5 % after the third of 30 saves of 24 MB."""
    mpwriter.shutdown()
    state = small_state(num_tensors=6, numel=1_000_000)
    for _ in range(3):
        save(tmp_path / "checkpoint", state)
    gc.collect()
    counts, before = footprint(), resident_bytes()
    for _ in range(27):
        save(tmp_path / "checkpoint", state)
    after = resident_bytes()
    assert footprint() == counts
    for earlier, later in zip(before, after, strict=True):
        assert later < 1.05 * earlier


_SAVES_AND_ENDS = """
import os, signal, sys
from tests.saves import *
path = sys.argv[1]
state = small_state(1, num_tensors=8, numel=150_000)
for number in range(5):
    save(path, small_state(number, num_tensors=8, numel=150_000))
pids = worker_pids()
os.kill(pids[0], signal.SIGKILL)
os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)
save(path, state)
assert pids[1] in worker_pids() and pids[0] not in worker_pids()
print(*worker_pids())
"""


def test_trainer_says_nothing_when_it_ends_after_saves(
    start_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    """C15: of leaked or missing things; buffers are valid after a worker was killed."""
    before = set(os.listdir("/dev/shm"))
    trainer = start_trainer(_SAVES_AND_ENDS, tmp_path / "checkpoint")
    trainer.assert_succeeded()
    # No "resource_tracker", "leaked", KeyError, FileNotFoundError, and no other line either.
    assert trainer.stderr == ""
    workers = [int(pid) for pid in trainer.stdout.split()]
    assert len(workers) == 2 and not [pid for pid in workers if psutil.pid_exists(pid)]
    assert set(os.listdir("/dev/shm")) <= before
    assert_holds(tmp_path / "checkpoint", small_state(1, num_tensors=8, numel=150_000))
