"""Directories as two ranks see them: late, differently, with a checkpoint in them."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests import ranks
from tests.fakes import FaultPlan
from tests.fault_checks import Before
from tests.fault_table import state_of_rank, state_of_ranks
from tests.ranks import Failure, RankPair
from tests.saves import assert_holds, names_in

NUM_FRESH = 30


def test_saves_succeed_when_directories_are_fresh_and_made_by_both(
    rank_pair: RankPair, tmp_path: Path
) -> None:
    """B13: nested ones, again and again."""
    rank_pair.run(_save_into_fresh, str(tmp_path / "run"))
    for number in (0, NUM_FRESH - 1):
        assert_holds(tmp_path / "run" / str(number) / "a" / "b", state_of_ranks(number))


def _save_into_fresh(folder: str) -> None:
    for number in range(NUM_FRESH):
        state = state_of_rank(number, dist.get_rank())
        ranks.save(f"{folder}/{number}/a/b", state, sync_files=False)


def test_save_succeeds_when_the_other_rank_was_faster_and_nobody_sees_it(
    rank_pair: RankPair, checkpoint_dir: Path, place: str, plan: FaultPlan
) -> None:
    """B13: makedirs raises FileExistsError on both although exist_ok; visible 0.5 s later."""
    plan.add("makedirs", errno=errno.EEXIST, times=2, after=True)
    for op in ("info", "exists", "isdir"):
        plan.add(op, checkpoint_dir.name, for_s=0.5, absent=True)
    rank_pair.run(_save, place, 1, plan.options)
    assert_holds(checkpoint_dir, state_of_ranks(1))


@pytest.mark.parametrize("name", [".metadata", "checkpoint", "*"])
def test_save_succeeds_when_one_rank_does_not_see_what_exists(
    name: str, rank_pair: RankPair, checkpoint_dir: Path, place: str, plan: FaultPlan
) -> None:
    """B14: attribute caches that disagree; nothing of the protocol depends on them."""
    rank_pair.run(_save, place, 1, plan.options)
    other = FaultPlan(plan.folder.with_name("plan of rank 1"))
    for op in ("exists", "isdir"):
        other.add(op, name, absent=True)
    rank_pair.run(_save_apart, place, 2, plan.options, other.options)
    assert_holds(checkpoint_dir, state_of_ranks(2))
    rank_pair.run(_load_apart, place, plan.options, other.options)


def test_load_raises_on_both_ranks_when_one_does_not_see_the_metadata(
    rank_pair: RankPair, place: str, plan: FaultPlan
) -> None:
    """B14: no rank waits for the other."""
    rank_pair.run(_save, place, 1, plan.options)
    blind = FaultPlan(plan.folder.with_name("plan of rank 1"))
    for op in ("open_read", "info"):
        blind.add(op, ".metadata", absent=True)
    for failure in rank_pair.run(_failure_of_load, place, plan.options, blind.options):
        assert failure is not None
        kinds = {kind for classes in failure.kinds.values() for kind in classes}
        assert "FileNotFoundError" in kinds
        assert ".metadata" in failure.text


@pytest.mark.parametrize("left", ["nothing", "shards"])
def test_load_raises_on_both_ranks_when_there_is_no_checkpoint(
    left: str, rank_pair: RankPair, checkpoint_dir: Path
) -> None:
    """B02, B17."""
    if left == "shards":
        rank_pair.run(_save, str(checkpoint_dir), 1, {})
        (checkpoint_dir / ".metadata").unlink()
    for failure in rank_pair.run(_failure_of_load, str(checkpoint_dir), {}, {}):
        assert failure is not None
        assert str(checkpoint_dir) in failure.text
        assert all("FileNotFoundError" in classes for classes in failure.kinds.values())


def test_save_refuses_on_both_ranks_when_there_is_a_checkpoint(
    rank_pair: RankPair, checkpoint_dir: Path
) -> None:
    """B05: `overwrite=False`, before a file is touched."""
    rank_pair.run(_save, str(checkpoint_dir), 1, {})
    before = Before.of(checkpoint_dir)
    failures = rank_pair.run(_failure_of_save, str(checkpoint_dir), {"overwrite": False})
    for failure in failures:
        assert failure is not None
        assert all("FileExistsError" in classes for classes in failure.kinds.values())
        assert str(checkpoint_dir) in failure.text
    assert Before.of(checkpoint_dir) == before
    assert_holds(checkpoint_dir, state_of_ranks(1))


def test_save_removes_the_shards_of_all_ranks_when_it_overwrites(
    rank_pair: RankPair, checkpoint_dir: Path
) -> None:
    """B06: also those of a rank that has nothing any more."""
    rank_pair.run(_save, str(checkpoint_dir), 1, {})
    before = set(names_in(checkpoint_dir))
    rank_pair.run(_save_on_first, str(checkpoint_dir))
    after = set(names_in(checkpoint_dir))
    assert after & before == {".metadata"} and len(after) == 2
    assert_holds(checkpoint_dir, state_of_rank(2, 0))


# -- on the ranks -------------------------------------------------------------------------------


def _save(place: str, number: int, options: dict[str, Any]) -> None:
    ranks.save(place, state_of_rank(number, dist.get_rank()), **options)


def _save_apart(place: str, number: int, *options: dict[str, Any]) -> None:
    _save(place, number, options[dist.get_rank()])


def _save_on_first(place: str) -> None:
    ranks.save(place, state_of_rank(2, 0) if dist.get_rank() == 0 else {})


def _load_apart(place: str, *options: dict[str, Any]) -> None:
    ranks.load(place, state_of_ranks(0), **options[dist.get_rank()])


def _failure_of_load(place: str, *options: dict[str, Any]) -> Failure | None:
    return ranks.caught(ranks.load, place, state_of_ranks(0), **options[dist.get_rank()])


def _failure_of_save(place: str, options: dict[str, Any]) -> Failure | None:
    return ranks.caught(ranks.save, place, state_of_rank(2, dist.get_rank()), **options)
