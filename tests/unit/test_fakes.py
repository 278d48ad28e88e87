"""The fake filesystems do what their rules say, in other processes too."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from mpwriter._storage import locate
from tests.fakes import FaultPlan, exceptions

_WRITE = """
import pickle, sys
fs = pickle.loads(bytes.fromhex(sys.argv[1]))
with fs.open(sys.argv[2], "wb") as file:
    for chunk in (b"first", b"second", b"third"):
        file.write(chunk)
"""


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "plan")


def write_elsewhere(fs: Any, path: str) -> subprocess.CompletedProcess[str]:
    """Write a file of three chunks in another process."""
    return subprocess.run(
        [sys.executable, "-c", _WRITE, pickle.dumps(fs).hex(), path],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=Path(__file__).parents[2],
    )


def test_rules_hold_in_another_process(tmp_path: Path, plan: FaultPlan) -> None:
    fs = locate(f"fault://{tmp_path}", plan.options).fs
    plan.add("write", "b*", nth=2, errno=errno.ENOSPC, where="worker", times=1)
    assert write_elsewhere(fs, f"{tmp_path}/a").returncode == 0
    failed = write_elsewhere(fs, f"{tmp_path}/b")
    assert "No space left" in failed.stderr
    assert write_elsewhere(fs, f"{tmp_path}/b").returncode == 0  # times=1 is used up
    writes = plan.calls("write", "b")
    assert [call.result for call in writes] == ["ok", "OSError", "ok", "ok", "ok"]
    assert os.getpid() not in {call.pid for call in writes}


def test_rules_that_kill_spare_the_trainer(tmp_path: Path, plan: FaultPlan) -> None:
    fs = locate(f"fault://{tmp_path}", plan.options).fs
    plan.add("write", nth=2, signal=signal.SIGKILL)
    plan.add("close", exit_code=3)
    with fs.open(f"{tmp_path}/a", "wb") as file:
        file.write(b"x")
        file.write(b"y")
    assert write_elsewhere(fs, f"{tmp_path}/b").returncode == -signal.SIGKILL
    plan.clear()
    plan.add("close", exit_code=3)
    assert write_elsewhere(fs, f"{tmp_path}/b").returncode == 3
    assert len(plan.calls("write", "b", phase="begin")) == 2 + 3


def test_a_blocked_call_goes_on_when_it_is_released(tmp_path: Path, plan: FaultPlan) -> None:
    fs = locate(f"fault://{tmp_path}", plan.options).fs
    plan.add("open", block=True)
    thread = threading.Thread(target=lambda: fs.open(f"{tmp_path}/a", "wb").close())
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    plan.release()
    thread.join()
    assert [call.thread for call in plan.calls("open")] == [thread.ident]


def test_rules_choose_the_write_that_passes_a_position(tmp_path: Path, plan: FaultPlan) -> None:
    fs = locate(f"fault://{tmp_path}", plan.options).fs
    plan.add("write", after_bytes=6, errno=errno.EIO)
    with fs.open(f"{tmp_path}/a", "wb") as file:
        file.write(b"first")
        with pytest.raises(OSError):
            file.write(b"second")


def test_rules_name_the_final_file_when_a_temporary_one_is_open(
    tmp_path: Path, plan: FaultPlan
) -> None:
    fs = locate(f"fault://{tmp_path}", plan.options).fs
    plan.add("open", ".metadata", errno=errno.EIO)
    with pytest.raises(OSError):
        fs.open(f"{tmp_path}/.metadata.0f3a9c2e.tmp", "wb")
    fs.open(f"{tmp_path}/.__0_0.a.distcp.0f3a9c2e.tmp", "wb").close()
    assert plan.calls("open", "__0_0.a.distcp")


def test_an_object_is_published_when_it_is_only_lost(tmp_path: Path, plan: FaultPlan) -> None:
    """What real object files do, and why a Sink must take care."""
    fs = locate(f"objectlike://{tmp_path}", plan.options).fs
    file = fs.open(f"{tmp_path}/a", "wb")
    file.write(b"part of it")
    assert not (tmp_path / "a").exists()
    del file
    gc.collect()
    assert (tmp_path / "a").read_bytes() == b"part of it"


@pytest.mark.parametrize("protocol", ["fault", "objectlike", "commitlike", "closelike"])
def test_files_can_be_read_in_ranges(tmp_path: Path, plan: FaultPlan, protocol: str) -> None:
    (tmp_path / "a").write_bytes(bytes(range(100)))
    fs = locate(f"{protocol}://{tmp_path}", plan.options).fs
    with fs.open(f"{tmp_path}/a", "rb") as file:
        file.seek(10)
        assert file.read(5) == bytes(range(10, 15))
    assert fs.cat_file(f"{tmp_path}/a", start=20, end=22) == bytes([20, 21])
    assert len(plan.calls("open_read")) == 2
    assert plan.calls("read")


def test_a_rule_needs_an_action_that_exists(plan: FaultPlan) -> None:
    with pytest.raises(ValueError, match="action"):
        plan.add("open")
    with pytest.raises(ValueError, match="action"):
        plan.add("open", explode=True)


def test_rule_waits_when_it_is_for_several_processes(tmp_path: Path, plan: FaultPlan) -> None:
    fs = locate(f"fault://{tmp_path}", plan.options).fs
    plan.add("open", together=2, errno=errno.EIO)
    first = threading.Thread(target=write_elsewhere, args=(fs, f"{tmp_path}/a"))
    first.start()
    second = write_elsewhere(fs, f"{tmp_path}/b")
    first.join()
    assert "Input/output error" in second.stderr
    begins = plan.calls("open", phase="begin")
    assert max(call.at_s for call in begins) < min(call.at_s for call in plan.calls("open"))
    assert plan.num_acts() == 2


@pytest.mark.parametrize("name", ["Unpicklable", "Ununpicklable", "Huge"])
def test_exceptions_are_as_hard_to_hand_on_as_they_say(
    tmp_path: Path, plan: FaultPlan, name: str
) -> None:
    fs = locate(f"fault://{tmp_path}", plan.options).fs
    plan.add("open", raises=f"{exceptions.__name__}.{name}", text="on strike")
    with pytest.raises(getattr(exceptions, name), match=r"^on strike\b") as caught:
        fs.open(f"{tmp_path}/a", "wb")
    if name == "Unpicklable":
        with pytest.raises(TypeError):
            pickle.dumps(caught.value)
    elif name == "Ununpicklable":
        pickled = pickle.dumps(caught.value)
        with pytest.raises(TypeError):
            pickle.loads(pickled)
    else:
        assert len(str(caught.value)) > exceptions.HUGE_BYTES


def test_acts_are_counted_when_rules_act_and_not_when_they_only_match(
    tmp_path: Path, plan: FaultPlan
) -> None:
    fs = locate(f"fault://{tmp_path}", plan.options).fs
    plan.add("write", nth=2, exit_code=3)
    plan.add("open", "b", times=1, errno=errno.EIO)
    assert plan.num_acts() == 0
    assert write_elsewhere(fs, f"{tmp_path}/a").returncode == 3
    assert plan.num_acts() == 1
    with pytest.raises(OSError, match="Input/output"):
        fs.open(f"{tmp_path}/b", "wb")
    fs.open(f"{tmp_path}/b", "wb").close()
    assert plan.num_acts() == 2
