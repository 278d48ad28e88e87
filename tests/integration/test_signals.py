"""Signals to the trainer's whole process group, and what is left of a trainer that is killed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.fakes import FaultPlan
from tests.saves import assert_holds, names_in, save, small_state
from tests.trainers import Trainer, all_gone, tree, wait_until

Start = Callable[..., Trainer]

# The bound of the design, for any death of the trainer.
_GONE_WITHIN_S = 5.0


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "plan")


# -- the emergency save -------------------------------------------------------------------------

_HANDLES = """
import signal, sys, warnings
import tests.fakes
from tests.asyncs import async_save
from tests.saves import *

warnings.filterwarnings("ignore", message="torch.distributed is disabled")
folder, plan, number, moment = sys.argv[1:]
seen = []

def emergency(number, frame):
    seen.append(number)
    if len(seen) == 1:
        save(f"fault://{folder}/emergency", small_state(7), plan=plan)
        print("emergency")

signal.signal(int(number), emergency)
save(f"{folder}/regular", small_state(1))
regular = f"fault://{folder}/regular"
print("ready")
if moment == "idle":
    while not seen:
        signal.pause()
elif moment == "sync":
    save(regular, small_state(2), plan=plan + "_of_regular")
else:
    async_save(small_state(2), regular, plan=plan + "_of_regular").result()
save(f"{folder}/next", small_state(3))
print(len(seen), *worker_pids())
"""


@pytest.mark.parametrize("moment", ["idle", "sync", "async"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_emergency_save_works_when_the_signal_goes_to_the_group(
    number: int, moment: str, start_trainer: Start, plan: FaultPlan, tmp_path: Path
) -> None:
    """Issue 4, C24: as schedulers do it. The handler saves, between saves or in the middle of one,
    and the signal comes again while it does; the save that was interrupted is completed, too.
    """
    of_regular = FaultPlan(tmp_path / "plan_of_regular")
    for slow in (plan, of_regular):
        slow.add("write", "__0_*", block=True)
    trainer = start_trainer(_HANDLES, tmp_path, plan.folder, int(number), moment)
    trainer.wait_for("ready")
    workers = set(trainer.workers())
    if moment != "idle":
        wait_until(lambda: len(of_regular.calls("write", phase="begin")) == 2)
    os.killpg(trainer.pid, number)
    wait_until(lambda: plan.calls("write", "__0_*", phase="begin"), lambda: trainer.stderr)
    os.killpg(trainer.pid, number)
    plan.release()
    trainer.wait_for("emergency")
    assert_holds(tmp_path / "emergency", small_state(7))
    of_regular.release()
    trainer.assert_succeeded()
    num_seen, *left = map(int, trainer.stdout.splitlines()[-1].split())
    assert num_seen == 2
    assert workers <= set(left), "no worker has died of it"
    assert trainer.stderr == ""
    assert_holds(tmp_path / "regular", small_state(1 if moment == "idle" else 2))
    assert_holds(tmp_path / "next", small_state(3))
    assert all_gone(left, within_s=_GONE_WITHIN_S)


# -- what a killed trainer leaves ---------------------------------------------------------------

_HOLDS_MEMORY = """
import sys, time
import tests.fakes
from tests.asyncs import async_save
from tests.saves import *

folder, plan, moment = sys.argv[1:]
state = small_state(1, num_tensors=8, numel=1_000_000)
async_save(state, f"{folder}/first").result()
save(f"{folder}/second", small_state(2))
print("ready")
if moment == "sync":
    save(f"fault://{folder}/first", small_state(3), plan=plan)
elif moment == "async":
    future = async_save(state, f"fault://{folder}/first", plan=plan)
time.sleep(60)
"""


def shared_memory(pids: list[int]) -> set[tuple[str, str]]:
    """Segments that these processes hold open or mapped, as (device, inode)."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/memfd:mpwriter" in line:
                    found.add((line.split()[3], line.split()[4]))
        for name in _names(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                path = f"/proc/{pid}/fd/{name}"
                if "/memfd:mpwriter" in os.readlink(path):
                    status = os.stat(path)
                    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
                    found.add((device, str(status.st_ino)))
    return found


def _names(folder: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from os.listdir(folder)


@pytest.mark.parametrize("moment", ["idle", "sync", "async"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_trainer_is_killed(
    number: int, moment: str, start_trainer: Start, plan: FaultPlan, tmp_path: Path
) -> None:
    """B10: no process, and no page of shared memory, which lives as long as anybody holds it; the
    checkpoint before loads; what lies about of the killed save goes with the next one.

    SIGTERM, which nobody handles here, goes to the whole group.
    """
    plan.add("write", "__0_*", block=True)
    trainer = start_trainer(_HOLDS_MEMORY, tmp_path, plan.folder, moment)
    trainer.wait_for("ready")
    if moment != "idle":
        wait_until(lambda: len(plan.calls("write", phase="begin")) == 2, lambda: trainer.stderr)
    pids = [process.pid for process in tree(trainer.pid)]
    segments = shared_memory(pids)
    assert len(pids) >= 3 and segments
    os.killpg(trainer.pid, number) if number == signal.SIGTERM else trainer.kill(number)
    assert trainer.ended() == -number
    assert all_gone(pids, within_s=_GONE_WITHIN_S)
    wait_until(lambda: not shared_memory(psutil.pids()) & segments)
    large = small_state(1, num_tensors=8, numel=1_000_000)
    assert_holds(tmp_path / "first", large)
    left = [name for name in names_in(tmp_path / "first") if name.endswith(".tmp")]
    assert len(left) == (0 if moment == "idle" else 2)
    plan.release()
    save(tmp_path / "first", small_state(4))
    assert len(names_in(tmp_path / "first")) == 3
    assert_holds(tmp_path / "first", small_state(4))
