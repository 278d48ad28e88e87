"""The trainer is forked by somebody else, as a DataLoader does, before and during a save."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes import FaultPlan
from tests.saves import assert_holds, names_in, small_state
from tests.trainers import Trainer, all_gone, wait_until

Start = Callable[..., Trainer]

_GONE_WITHIN_S = 5.0

# `fork(act)` runs `act` in a child that then ends as children of that kind do.
_FORKS = """
import ctypes, gc, json, multiprocessing, os, sys, time, warnings
import torch
import tests.fakes
from mpwriter._arena import get_arena
from tests.asyncs import async_save, wait_for_saves
from tests.fakes import FaultPlan
from tests.saves import *
from tests.trainers import wait_until

warnings.filterwarnings("ignore", message="torch.distributed is disabled")
warnings.simplefilter("ignore", DeprecationWarning)
folder, plan, kind = sys.argv[1:]

def held():
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return {
        "memfds": sum(link.startswith("/memfd:mpwriter") for link in links),
        "sockets": sum(link.startswith("socket:") for link in links),
        "maps": open("/proc/self/maps").read().count("memfd:mpwriter"),
        "leases": get_arena().stats().num_leases,
        "workers": len(worker_pids()),
    }

class Batches(torch.utils.data.Dataset):
    def __init__(self, act):
        self.act = act

    def __len__(self):
        return 4

    def __getitem__(self, n):
        self.act()
        return n

def fork(act):
    if kind == "os.fork":
        child = os.fork()
        if child == 0:
            act()
            sys.exit(0)  # with every exit handler
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    elif kind == "multiprocessing":
        child = multiprocessing.get_context("fork").Process(target=act)
        child.start()
        child.join()
        assert child.exitcode == 0
        child.close()
    else:
        loader = torch.utils.data.DataLoader(
            Batches(act), batch_size=None, num_workers=2, multiprocessing_context="fork"
        )
        assert list(loader) == [0, 1, 2, 3]

def look(name):
    def act():
        gc.collect()
        with open(f"{folder}/{name}.{os.getpid()}.json", "w") as file:
            json.dump(held(), file)
        gc.collect()
    return act
"""

_FORKS_AND_GOES_ON = f"""{_FORKS}
save(f"{{folder}}/before", small_state(1))
async_save(small_state(2), f"{{folder}}/staged").result()
own = worker_pids()
wait_for_saves()
fork(look("idle"))
save(f"{{folder}}/between", small_state(3))
calls = FaultPlan(plan, fresh=False)
future = async_save(small_state(4), f"fault://{{folder}}/in_flight", plan=plan)
wait_until(lambda: len(calls.calls("write", "__0_*", phase="begin")) == 2)
leases = get_arena().stats()
fork(look("in_flight"))
assert get_arena().stats() == leases and leases.num_leases > 0
calls.release()
future.result()
save(f"{{folder}}/after", small_state(5))
assert worker_pids() == own
wait_until(lambda: get_arena().stats().num_leases == 0)
"""


@pytest.mark.parametrize("kind", ["os.fork", "multiprocessing", "DataLoader"])
def test_saves_go_on_when_somebody_has_forked_the_trainer(
    kind: str, start_trainer: Start, tmp_path: Path
) -> None:
    """Issue 4: the child ends normally; it has no worker, no lease and no descriptor of either, and
    its end gives nothing back that is the parent's.
    """
    plan = FaultPlan(tmp_path / "plan")
    plan.add("write", "__0_*", block=True)
    trainer = start_trainer(_FORKS_AND_GOES_ON, tmp_path, plan.folder, kind)
    trainer.assert_succeeded()
    assert trainer.stderr == ""
    places = ["before", "staged", "between", "in_flight", "after"]
    for number, name in enumerate(places, start=1):
        assert_holds(tmp_path / name, small_state(number))
        assert len(names_in(tmp_path / name)) == 3
    for when in ("idle", "in_flight"):
        seen = [json.loads(path.read_text()) for path in tmp_path.glob(f"{when}.*.json")]
        assert len(seen) == (2 if kind == "DataLoader" else 1)
        for facts in seen:
            memory = facts.pop("maps"), facts.pop("memfds")
            # What the stack of a thread held that the child does not have stays until its end.
            assert memory == (0, 0) or when == "in_flight"
            assert facts == {"sockets": 0, "leases": 0, "workers": 0}


_IS_KILLED = f"""{_FORKS}
save(f"{{folder}}/before", small_state(1))
calls = FaultPlan(plan, fresh=False)
future = async_save(small_state(2), f"fault://{{folder}}/before", plan=plan)
wait_until(lambda: len(calls.calls("write", "__0_*", phase="begin")) == 2)
workers = worker_pids()
if kind == "DataLoader":
    loader = torch.utils.data.DataLoader(
        Batches(lambda: None), batch_size=None, num_workers=2, persistent_workers=True,
        multiprocessing_context="fork",
    )
    batches = iter(loader)
    assert next(batches) == 0
    children = [process.pid for process in multiprocessing.active_children()]
elif kind == "C":
    # None of Python's hooks: every descriptor stays open.
    children = [ctypes.PyDLL(None).fork()]
else:
    children = [os.fork()]
if 0 in children:
    time.sleep(60)
    os._exit(0)
print(json.dumps([workers, children]))
print("forked")
time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["os.fork", "C", "DataLoader"])
def test_workers_end_when_a_fork_outlives_the_trainer_that_is_killed_in_a_save(
    kind: str, start_trainer: Start, tmp_path: Path
) -> None:
    """B10: the fork has been there before the end and still is; the checkpoint is the old one."""
    plan = FaultPlan(tmp_path / "plan")
    plan.add("write", "__0_*", block=True)
    trainer = start_trainer(_IS_KILLED, tmp_path, plan.folder, kind)
    trainer.wait_for("forked")
    workers, children = json.loads(trainer.stdout.splitlines()[0])
    assert len(workers) == 2
    try:
        for child in children:
            os.kill(child, signal.SIGSTOP)  # a DataLoader's would see the trainer's end, too
        trainer.kill()
        trainer.ended()
        assert all_gone(workers, within_s=_GONE_WITHIN_S)
        for child in children:
            os.kill(child, 0)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
    wait_until(lambda: all_gone(children, within_s=0))
    assert_holds(tmp_path / "before", small_state(1))
