"""Programs that end with a save in flight."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpwriter._compat import HAS_ASYNC_STAGING
from tests.fakes import FaultPlan
from tests.saves import assert_holds, names_in, small_state
from tests.trainers import Trainer, all_gone

_PROGRAM = """
import json, sys, warnings
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
import tests.fakes
from tests.asyncs import async_save
from tests.saves import small_state, worker_pids

warnings.filterwarnings("ignore", message="torch.distributed is disabled")

class Planner(DefaultSavePlanner):
    def create_local_plan(self):
        raise LookupError("there is no plan")

folder, end, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
dcp_options = {}
if options.pop("stager", False):
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    dcp_options["async_stager"] = DefaultStager(StagingOptions(False, False, False, False))
if options.pop("planner", False):
    dcp_options["planner"] = Planner()
for number in range(options.pop("num_saves", 1)):
    state = small_state(number)
    response = async_save(state, f"fault://{folder}/{number}", dcp_options=dcp_options, **options)
    if options.get("async_staging"):
        response.staging_completion.result()
    for tensor in state.values():
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
    del response
print(json.dumps(worker_pids()))
if end == "exit":
    sys.exit(0)
if end == "raise":
    raise ValueError("the training has failed")
"""

Start = Callable[[str, dict[str, Any]], Trainer]

_NEVER_SAID = ["cannot schedule new futures", "interpreter shutdown", "Exception ignored", "leaked"]


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "plan")


@pytest.fixture
def start(start_trainer: Callable[..., Trainer], tmp_path: Path, plan: FaultPlan) -> Start:
    def start_one(name: str, options: dict[str, Any], end: str = "return") -> Trainer:
        options = {**plan.options, **options}
        return start_trainer(_PROGRAM, tmp_path / name, end, json.dumps(options))

    return start_one  # type: ignore[return-value]


def assert_ended(trainer: Trainer, exit_code: int = 0) -> None:
    """It has ended by itself, with its own exit code and without its workers."""
    assert trainer.ended() == exit_code, trainer.stderr
    assert not [text for text in _NEVER_SAID if text in trainer.stderr], trainer.stderr
    assert all_gone(json.loads(trainer.stdout.splitlines()[0]), within_s=10)


def test_save_is_completed_when_the_program_ends(
    start: Any, plan: FaultPlan, tmp_path: Path
) -> None:
    """B08: main returns, exits, raises; at once after the call. The exit code is main's."""
    plan.add("open", "*.distcp", sleep_s=0.5)
    ends = {"return": 0, "exit": 0, "raise": 1}
    trainers = {end: start(end, {}, end) for end in ends}
    for end, exit_code in ends.items():
        assert_ended(trainers[end], exit_code)
        assert_holds(tmp_path / end / "0", small_state(0))
        said = trainers[end].stderr
        assert "ValueError: the training has failed" in said if end == "raise" else said == ""


_STAGED = {
    "three in flight": {"num_saves": 3},
    "little memory": {"num_workers": 1, "staging_budget_bytes": 20000},
}
if HAS_ASYNC_STAGING:  # torch 2.7 has neither
    _STAGED["staged beside the training"] = {"async_staging": True}
    _STAGED["staged by torch"] = {"stager": True}


@pytest.mark.parametrize("options", _STAGED.values(), ids=_STAGED)
def test_save_is_completed_when_the_program_ends_however_it_was_staged(
    options: dict[str, Any], start: Any, plan: FaultPlan, tmp_path: Path
) -> None:
    """B08, invariant 16: everything that is needed at the end is there before it."""
    plan.add("open", "*.distcp", sleep_s=0.3)
    trainer = start("ckpt", options)
    assert_ended(trainer)
    for number in range(options.get("num_saves", 1)):
        assert_holds(tmp_path / "ckpt" / str(number), small_state(number))
    assert trainer.stderr == ""


def test_failure_is_told_when_nobody_keeps_the_future(
    start: Any, plan: FaultPlan, tmp_path: Path
) -> None:
    """A14: a line on stderr and no `.metadata`; at the end of the program as well as before."""
    plan.add("write", "__0_1.*", errno=errno.ENOSPC)
    failed, unplanned = start("failed", {"retries": 0}), start("unplanned", {"planner": True})
    assert_ended(failed)
    (line,) = [text for text in failed.stderr.splitlines() if text.startswith("The save of")]
    assert str(tmp_path / "failed" / "0") in line and "No space left" in line
    assert_ended(unplanned)
    (line,) = unplanned.stderr.splitlines()
    assert str(tmp_path / "unplanned" / "0") in line and "given up" in line
    assert names_in(tmp_path / "failed" / "0") == []
    assert not (tmp_path / "unplanned" / "0" / ".metadata").exists()


def test_program_ends_when_its_last_save_is_stuck(
    start: Any, plan: FaultPlan, tmp_path: Path
) -> None:
    """B08, invariant 8: after `timeout_s` without progress, with a message."""
    plan.add("write", "*.distcp", block=True)
    trainer = start("stuck", {"timeout_s": 1.5})
    assert_ended(trainer)
    assert "made no progress for 1.5 s" in trainer.stderr
    assert not (tmp_path / "stuck" / "0" / ".metadata").exists()
    plan.release()
