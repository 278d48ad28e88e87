"""However the trainer ends, is interrupted or forks, its workers are where they belong."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes import FaultPlan
from tests.saves import assert_holds, names_in, small_state
from tests.trainers import Trainer, all_gone, wait_until

Start = Callable[..., Trainer]

# The bound of the design, for any death of the trainer.
_GONE_WITHIN_S = 5.0

_SAVES = """
import sys, time
from tests.saves import *
save(sys.argv[1], small_state(1))
print("saved")
if len(sys.argv) > 2:
    save("fault://" + sys.argv[1], small_state(2), plan=sys.argv[2])
time.sleep(60)
"""


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "plan")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_workers_end_when_the_trainer_is_killed_while_they_are_idle(
    number: int, start_trainer: Start, checkpoint_dir: Path
) -> None:
    """B10 (i)."""
    trainer = start_trainer(_SAVES, checkpoint_dir)
    trainer.wait_for("saved")
    workers = trainer.workers()
    assert len(workers) == 2
    trainer.kill(number)
    assert trainer.ended() == -number
    assert all_gone(workers, within_s=_GONE_WITHIN_S)
    assert "Traceback" not in trainer.stderr.replace("Fatal Python error", "")
    assert_holds(checkpoint_dir, small_state(1))


@pytest.mark.parametrize("op", ["open", "write", "mv"])
def test_workers_end_when_the_trainer_is_killed_in_a_save(
    op: str, start_trainer: Start, plan: FaultPlan, tmp_path: Path
) -> None:
    """B10 (ii): also from inside a call that blocks; nothing of the save can be loaded."""
    plan.add(op, "__0_*", block=True)
    target = tmp_path / "checkpoint"
    trainer = start_trainer(
        """
        import sys
        from tests.saves import *
        save(sys.argv[1], small_state(2), plan=sys.argv[2])
        """,
        f"fault://{target}",
        plan.folder,
    )
    wait_until(lambda: len(plan.calls(op, phase="begin")) == 2)
    workers = trainer.workers()
    assert {call.pid for call in plan.calls(op, phase="begin")} == set(workers)
    trainer.kill()
    trainer.ended()
    assert all_gone(workers, within_s=_GONE_WITHIN_S)
    plan.release()
    assert not (target / ".metadata").exists()
    assert not [name for name in names_in(target) if not name.startswith(".")]


_STARTS = """
import os, signal
from mpwriter._pool import get_pool
get_pool().prepare(2)
print(*get_pool().pids())
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_when_the_trainer_is_killed_while_they_start(start_trainer: Start) -> None:
    """B10: it may be gone before they look for it."""
    trainer = start_trainer(_STARTS)
    assert trainer.ended() == -signal.SIGKILL
    workers = [int(pid) for pid in trainer.stdout.split()]
    assert len(workers) == 2
    assert all_gone(workers, within_s=_GONE_WITHIN_S)
    assert trainer.stderr == ""


_SAVES_IN_A_DAEMON_THREAD = """
import sys, threading
from tests.fakes import FaultPlan
from tests.saves import *
from tests.trainers import wait_until
url, plan = sys.argv[1:]
threading.Thread(
    target=save, args=(url, small_state(1)), kwargs={"plan": plan}, daemon=True
).start()
calls = FaultPlan(plan, fresh=False)
wait_until(lambda: len(calls.calls("write", phase="begin")) == 2)
print(*worker_pids())
"""


def test_workers_end_when_the_trainer_ends_in_the_middle_of_a_save(
    start_trainer: Start, plan: FaultPlan, checkpoint_dir: Path
) -> None:
    """B10: they are leased to a thread that Python does not wait for, and blocked."""
    plan.add("write", "__0_*", block=True)
    trainer = start_trainer(_SAVES_IN_A_DAEMON_THREAD, f"fault://{checkpoint_dir}", plan.folder)
    trainer.assert_succeeded()
    workers = [int(pid) for pid in trainer.stdout.split()]
    assert len(workers) == 2
    assert all_gone(workers, within_s=_GONE_WITHIN_S)
    assert not (checkpoint_dir / ".metadata").exists()


_HOLDS = """
import ctypes, os, sys, time
from tests.saves import *
save(sys.argv[1], small_state(1))
# As a C library forks: none of Python's hooks, and every descriptor stays open in the child.
holder = ctypes.PyDLL(None).fork()
if holder == 0:
    time.sleep(60)
    os._exit(0)
print(holder)
print("saved")
time.sleep(60 if sys.argv[2] == "killed" else 0)
"""


@pytest.mark.parametrize("end", ["killed", "normal"])
def test_workers_end_when_a_fork_of_the_trainer_holds_their_channels(
    end: str, start_trainer: Start, checkpoint_dir: Path
) -> None:
    """B10: the end of the channel is not what they wait for."""
    trainer = start_trainer(_HOLDS, checkpoint_dir, end)
    trainer.wait_for("saved")
    holder = int(trainer.stdout.splitlines()[0])
    try:
        workers = [pid for pid in trainer.workers() if pid != holder]
        if end == "killed":
            trainer.kill()
        trainer.ended()
        assert all_gone(workers, within_s=_GONE_WITHIN_S)
        os.kill(holder, 0)  # it was there all the time
    finally:
        os.kill(holder, signal.SIGKILL)


_IS_INTERRUPTED = """
import os, sys, time
from tests.saves import *
url, plan = sys.argv[1:]
save(url, small_state(1), plan=plan)
print("saved")
while not os.path.exists(plan + "/go on"):
    time.sleep(0.01)
try:
    save(url, small_state(2, num_tensors=8, numel=150_000), plan=plan)
except BaseException as error:
    caught = error
if not isinstance(caught, KeyboardInterrupt):
    caught = failure_of(caught)
print(type(caught).__name__)
save(url + ".next", small_state(3), plan=plan)
print("next")
sys.stdin.read()
"""


@pytest.mark.parametrize("op", ["open", "write", "mv"])
def test_save_raises_one_keyboard_interrupt_when_ctrl_c_is_pressed(
    op: str, start_trainer: Start, plan: FaultPlan, checkpoint_dir: Path
) -> None:
    """C24: no word of the workers, the checkpoint before is as it was, the next save works."""
    trainer = start_trainer(_IS_INTERRUPTED, f"fault://{checkpoint_dir}", plan.folder)
    trainer.wait_for("saved")
    before = names_in(checkpoint_dir)
    num_before = len(plan.calls(op, "__0_*", phase="begin"))
    workers = trainer.workers()
    plan.add(op, "__0_*", sleep_s=1.0, times=2)
    (plan.folder / "go on").touch()
    wait_until(lambda: len(plan.calls(op, "__0_*", phase="begin")) == num_before + 2)
    trainer.interrupt_group()
    trainer.assert_succeeded()
    assert trainer.stdout.splitlines() == ["saved", "KeyboardInterrupt", "next"]
    assert trainer.stderr == ""
    assert names_in(checkpoint_dir) == before
    assert_holds(checkpoint_dir, small_state(1))
    assert_holds(f"{checkpoint_dir}.next", small_state(3))
    assert all_gone(workers, within_s=_GONE_WITHIN_S)


_IS_INTERRUPTED_AND_ENDS = """
import sys
from tests.saves import *
save(sys.argv[1], small_state(1), plan=sys.argv[2])
"""


def test_trainer_ends_at_once_when_ctrl_c_is_pressed(
    start_trainer: Start, plan: FaultPlan, checkpoint_dir: Path
) -> None:
    """C24: workers in the middle of a call that never returns; no .metadata, no orphan."""
    plan.add("write", "__0_*", block=True)
    trainer = start_trainer(_IS_INTERRUPTED_AND_ENDS, f"fault://{checkpoint_dir}", plan.folder)
    wait_until(lambda: len(plan.calls("write", phase="begin")) == 2)
    workers = trainer.workers()
    trainer.interrupt_group()
    assert trainer.ended() != 0
    assert all_gone(workers, within_s=_GONE_WITHIN_S)
    # In DCP's exception, which shows its text twice in one traceback.
    assert "KeyboardInterrupt" in trainer.stderr
    assert "_worker.py" not in trainer.stderr and "_job.py" not in trainer.stderr
    assert names_in(checkpoint_dir) == []


_FORKS = """
import os, sys, threading
from tests.saves import *
path, plan = sys.argv[1:]
save(path + "/first", small_state(1))
own = worker_pids()
thread = threading.Thread(
    target=save, args=("fault://" + path + "/slow", small_state(5)), kwargs={"plan": plan}
)
if plan:
    from tests.fakes import FaultPlan
    from tests.trainers import wait_until
    thread.start()
    calls = FaultPlan(plan, fresh=False)
    wait_until(lambda: len(calls.calls("open", phase="begin")) == 2)
child = os.fork()
if child == 0:
    assert worker_pids() == []
    report = save(path + "/child", small_state(2)).last_report
    assert report.num_workers == 2 and not set(worker_pids()) & set(own)
    if not plan:
        again = os.fork()
        if again == 0:
            save(path + "/grandchild", small_state(3))
            raise SystemExit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(again, 0)[1]) == 7
        save(path + "/child", small_state(4))
    raise SystemExit(8)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8
if plan:
    calls.release()
    thread.join()
assert worker_pids() == own
save(path + "/second", small_state(6))
assert worker_pids() == own
"""


def test_both_can_save_when_the_trainer_has_forked(start_trainer: Start, tmp_path: Path) -> None:
    """The child has workers of its own, and its end leaves those of the parent alone."""
    trainer = start_trainer(_FORKS, tmp_path, "")
    trainer.assert_succeeded()
    assert trainer.stderr == ""
    for name, number in {"first": 1, "child": 4, "grandchild": 3, "second": 6}.items():
        assert_holds(tmp_path / name, small_state(number))


def test_both_can_save_when_the_trainer_forks_in_a_save(
    start_trainer: Start, plan: FaultPlan, tmp_path: Path
) -> None:
    """Whatever lock the other thread holds at that moment."""
    plan.add("open", "__0_*", block=True)
    trainer = start_trainer(_FORKS, tmp_path, plan.folder)
    trainer.assert_succeeded()
    for name, number in {"first": 1, "child": 2, "slow": 5, "second": 6}.items():
        assert_holds(tmp_path / name, small_state(number))
