"""Loads on ranks: which files are opened, and by whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.tensor import Shard, distribute_tensor

from mpwriter import FsspecReader
from mpwriter._compat import StockFsspecReader, StockFsspecWriter
from tests import ranks
from tests.fakes import FaultPlan
from tests.fault_table import state_of_rank, state_of_ranks
from tests.ranks import RankPair
from tests.saves import load
from tests.states import assert_same

ROWS = torch.arange(40.0).reshape(8, 5)


def test_load_opens_only_what_it_needs_when_every_rank_wrote_a_file(
    rank_pair: RankPair, place: str, plan: FaultPlan
) -> None:
    """F16: of replicated and sharded tensors each rank opens the shards that hold its part."""
    rank_pair.run(_save_mixed, place, plan.options)
    opened_by = rank_pair.run(_load_mixed, place, plan.options)
    for rank, names in enumerate(opened_by):
        # Its rows from its own file; what is replicated lies in that of rank 0.
        assert {name[:4] for name in names} == {"__0_", f"__{rank}_"}
        assert len(names) == len(set(names)), "no file twice"


def test_load_opens_one_shard_when_one_key_is_asked_for(
    rank_pair: RankPair, place: str, plan: FaultPlan
) -> None:
    """F16, G12: by one process, of two ranks' checkpoint."""
    rank_pair.run(_save_mixed, place, plan.options)
    before = len(_opened(plan))
    target = {"replicated": torch.zeros(10)}
    reader = FsspecReader(place, **plan.options)
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert torch.equal(target["replicated"], torch.arange(10.0))
    assert [name[:4] for name in _opened(plan)[before:]] == ["__0_"]


def test_load_is_partial_on_two_ranks_when_the_planner_allows_it(
    rank_pair: RankPair, checkpoint_dir: Path
) -> None:
    """G12: keys that are not there stay as they are."""
    rank_pair.run(_save_own, str(checkpoint_dir))
    for rank, found in enumerate(rank_pair.run(_load_partially, str(checkpoint_dir))):
        assert_same(found, {**state_of_rank(1, rank), "missing": torch.full((3,), 7.0)})


def test_checkpoints_cross_between_ours_and_stock_when_two_ranks_saved(
    rank_pair: RankPair, checkpoint_dir: Path, tmp_path: Path
) -> None:
    """E08, E15: ours by the stock reader on both ranks, stock's by ours, and by one process."""
    rank_pair.run(_save_own, str(checkpoint_dir))
    rank_pair.run(_save_own_with_stock, str(tmp_path / "stock"))
    for readers in rank_pair.run(_load_crosswise, str(checkpoint_dir), str(tmp_path / "stock")):
        for found in readers:
            assert_same(found, state_of_ranks(1))
    assert_same(load(tmp_path / "stock", state_of_ranks(1)), state_of_ranks(1))


def _opened(plan: FaultPlan) -> list[str]:
    return [call.name for call in plan.calls("open_read", "*.distcp")]


# -- on the ranks -------------------------------------------------------------------------------


def _mixed(fill: float | None = None) -> dict[str, Any]:
    state = {
        "rows": distribute_tensor(ROWS.clone(), ranks.mesh(2), [Shard(0)]),
        "replicated": torch.arange(10.0),
    }
    if fill is not None:
        for value in state.values():
            value.fill_(fill)
    return state


def _save_mixed(place: str, options: dict[str, Any]) -> None:
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    ranks.save(place, _mixed(), planner=planner, **options)


def _load_mixed(place: str, options: dict[str, Any]) -> list[str]:
    plan = FaultPlan(options["plan"], fresh=False)
    target = _mixed(fill=-1)
    ranks.load(place, target, **options)
    assert torch.equal(target["rows"].full_tensor(), ROWS)
    assert torch.equal(target["replicated"], torch.arange(10.0))
    mine = {psutil.Process().pid, *(child.pid for child in psutil.Process().children())}
    calls = plan.calls("open_read", "*.distcp")
    return [call.name for call in calls if call.pid in mine]


def _save_own(path: str) -> None:
    ranks.save(path, state_of_rank(1, dist.get_rank()))


def _save_own_with_stock(path: str) -> None:
    dcp.save(state_of_rank(1, dist.get_rank()), storage_writer=StockFsspecWriter(path))


def _load_partially(path: str) -> dict[str, Any]:
    target = {**state_of_rank(0, dist.get_rank()), "missing": torch.full((3,), 7.0)}
    return ranks.load(path, target, planner=DefaultLoadPlanner(allow_partial_load=True))


def _load_crosswise(ours: str, stock: str) -> list[dict[str, Any]]:
    of_stock = state_of_ranks(0)
    ranks.load(stock, of_stock)
    of_ours = state_of_ranks(0)
    dcp.load(of_ours, storage_reader=StockFsspecReader(ours))
    return [of_stock, of_ours]
