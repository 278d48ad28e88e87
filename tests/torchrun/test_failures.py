"""A rank that dies in a save, and a store that fails one rank: scripts/train.py under torchrun."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes import FaultPlan
from tests.fakes.filesystems import PLAN_VARIABLE
from tests.states import assert_same
from tests.torchrun.conftest import Reference
from tests.torchrun.jobs import (
    TRAIN_ON_FAULTS,
    Job,
    complete_steps,
    copy_checkpoint,
    losses,
    torchrun,
    values_in,
)
from tests.trainers import all_gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def _environment(plan: FaultPlan) -> dict[str, str]:
    return {PLAN_VARIABLE: str(plan.folder)}


def test_job_restarts_from_the_last_complete_checkpoint_when_a_rank_is_killed_in_a_save(
    reference: Callable[[int], Reference],
    start: Callable[..., Job],
    plan: FaultPlan,
    tmp_path: Path,
) -> None:
    """B10, C01: SIGKILL while step 6 is written; then as if it had not been."""
    old, run = reference(2), tmp_path / "run"
    copy_checkpoint(old.run, 4, run)
    plan.add("write", "__1_*", block=True)
    job = start(
        torchrun(
            2, "--max-restarts=1", *TRAIN_ON_FAULTS, "--steps=8", "--keep=1",
            "--checkpoints", f"fault://{run}",
        ),
        _environment(plan),
    )  # fmt: skip
    job.wait_until(lambda: plan.calls("write", "__1_*", phase="begin"))
    worker = plan.calls("write", "__1_*", phase="begin")[0].pid
    rank = psutil.Process(worker).ppid()
    assert complete_steps(run) == [4]
    plan.clear()
    os.kill(rank, signal.SIGKILL)
    job.assert_succeeded()

    assert all_gone([worker, rank], within_s=5)
    assert job.stderr.count("resumed from step 4") == 2, job.story()
    found = losses(job.stdout)
    assert [step for step, _ in found][-4:] == [5, 6, 7, 8]
    assert [pair for pair in found if pair[1] != old.losses[pair[0]]] == []
    assert complete_steps(run) == [8]
    (tmp_path / "whole").mkdir()
    assert_same(values_in(run, 8, tmp_path), values_in(old.run, 8, tmp_path / "whole"))


@pytest.mark.parametrize(
    ("action", "told"),
    [({"errno": errno.EACCES}, "Permission denied"), ({"block": True}, "WorkerTimeoutError")],
    ids=["refused", "silent"],
)
def test_job_ends_with_an_error_when_the_store_fails_one_rank_in_a_save(
    action: dict[str, Any],
    told: str,
    start: Callable[..., Job],
    plan: FaultPlan,
    tmp_path: Path,
) -> None:
    """F13: all ranks hear of it, and nothing is left that could be taken for a checkpoint."""
    run = tmp_path / "run"
    plan.add("write", "__1_*", **action)
    job = start(
        torchrun(
            # The agent looks seldom, so that every rank ends by itself.
            2, "--monitor-interval=3", *TRAIN_ON_FAULTS, "--steps=1000000", "--save-every=20",
            "--timeout-s=5", "--checkpoints", f"fault://{run}",
        ),
        _environment(plan),
    )  # fmt: skip
    assert job.ended() == 1, job.story()
    for rank in range(2):
        assert f"rank {rank} failed" in job.stderr, job.story()
    assert told in job.stderr and "__1_0." in job.stderr
    assert "CheckpointException" in job.stderr and "(RANK 1)" in job.stderr, job.story()
    assert complete_steps(run) == []
    # What rank 0 has written by then stays, as after a kill.
    assert not list(run.rglob("__1_*"))
    assert all_gone(sorted({call.pid for call in plan.calls(phase="begin")}), within_s=5)
