"""An error on one rank: what the other one hears of it."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from mpwriter import MPFsspecWriter
from tests import ranks
from tests.fakes import FaultPlan
from tests.fault_table import state_of_rank, state_of_ranks
from tests.ranks import Failure, RankPair
from tests.saves import assert_holds


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("failing", [0, 1])
def test_both_ranks_raise_when_the_worker_of_one_fails(
    failing: int, mode: str, rank_pair: RankPair, checkpoint_dir: Path, place: str, plan: FaultPlan
) -> None:
    """F13: with the rank, its path and its errno; the next save works."""
    plan.add("write", f"__{failing}_*", errno=errno.ENOSPC)
    failures = rank_pair.run(_failure_of_save, place, mode, plan.options)
    _assert_told(failures, failing, "StorageError")
    for failure in failures:
        assert failure.errnos == {failing: errno.ENOSPC}
        assert Path(failure.paths[failing] or "").name.startswith(f"__{failing}_0.")
        assert "No space left on device" in failure.text
    assert not (checkpoint_dir / ".metadata").exists()

    plan.clear()
    assert rank_pair.run(_failure_of_save, place, mode, plan.options) == [None, None]
    assert_holds(checkpoint_dir, state_of_ranks(1))


@pytest.mark.parametrize("stuck", [0, 1])
def test_both_ranks_raise_when_the_store_blocks_for_one(
    stuck: int, rank_pair: RankPair, checkpoint_dir: Path, place: str, plan: FaultPlan
) -> None:
    """F13: `timeout_s` ends it on the one, and DCP tells the other."""
    plan.add("write", f"__{stuck}_*", block=True)
    options = {**plan.options, "timeout_s": 1.0, "sync_files": False}
    failures = rank_pair.run(_failure_of_save, place, "sync", options)
    _assert_told(failures, stuck, "WorkerTimeoutError")
    assert not (checkpoint_dir / ".metadata").exists()


@pytest.mark.parametrize("failing", [0, 1])
def test_both_ranks_raise_when_a_value_of_one_cannot_be_saved(
    failing: int, rank_pair: RankPair, checkpoint_dir: Path
) -> None:
    """F13: nothing has been written then; in both modes the error names the key."""
    for failure in rank_pair.run(_failure_of_odd_value, str(checkpoint_dir), failing):
        assert failure is not None and list(failure.kinds) == [failing]
        assert "odd" in failure.text
    assert not (checkpoint_dir / ".metadata").exists()


def test_both_ranks_raise_when_the_commit_fails(
    rank_pair: RankPair, checkpoint_dir: Path, place: str, plan: FaultPlan
) -> None:
    """F13, B01: `.metadata` is the coordinator's; its error is everybody's."""
    plan.add("open", ".metadata", errno=errno.EDQUOT)
    failures = rank_pair.run(_failure_of_save, place, "sync", plan.options)
    _assert_told(failures, 0, "StorageError")
    assert all(failure.errnos == {0: errno.EDQUOT} for failure in failures)
    assert not (checkpoint_dir / ".metadata").exists()


def _assert_told(failures: list[Failure], rank: int, kind: str) -> None:
    for failure in failures:
        assert failure is not None
        assert list(failure.kinds) == [rank]
        assert kind in failure.kinds[rank]


# -- on the ranks -------------------------------------------------------------------------------


def _failure_of_save(place: str, mode: str, options: dict[str, Any]) -> Failure | None:
    state = state_of_rank(1, dist.get_rank())
    if mode == "sync":
        return ranks.caught(ranks.save, place, state, **options)
    writer = MPFsspecWriter(place, num_workers=1, **options)
    saved = dcp.async_save(state, storage_writer=writer, process_group=ranks.group(0, 1))
    return ranks.caught(saved.result)


def _failure_of_odd_value(path: str, failing: int) -> Failure | None:
    state: dict[str, Any] = {f"rank{dist.get_rank()}": torch.ones(3)}
    if dist.get_rank() == failing:
        state["odd"] = torch.ones(3).to_sparse()
    return ranks.caught(ranks.save, path, state)
