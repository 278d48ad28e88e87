"""Keys that two ranks share, and the names of the files that their values go to."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from mpwriter import MPFsspecWriter
from mpwriter._compat import StockFsspecReader, StockFsspecWriter
from tests import ranks
from tests.fault_table import state_of_rank, state_of_ranks
from tests.ranks import RankPair
from tests.states import (
    assert_loads_everywhere,
    assert_same,
    blank,
    load_into,
    shard_names,
)

NAME = re.compile(r"__(\d+)_(\d+)\.([0-9a-z]{8})\.distcp")

OBJECTS: dict[str, Any] = {
    "step": 17,
    "name": "text",
    "pair": (1, "two"),
    "nested": {"lr": 0.1, "betas": [0.9, 0.99], "flags": {True, False}},
}


# -- the same key on both -----------------------------------------------------------------------


@pytest.mark.parametrize("to_lowest", [False, True])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_save_has_the_values_of_stock_when_ranks_hold_different_ones(
    mode: str, to_lowest: bool, rank_pair: RankPair, checkpoint_dir: Path, tmp_path: Path
) -> None:
    """A15: of every key the copy of one rank, and of the rank that stock takes."""
    stock = tmp_path / "stock"
    rank_pair.run(_save_contradictions, str(checkpoint_dir), str(stock), mode, to_lowest)
    like = blank(_contradictions(0))
    expected = load_into(dict(like), StockFsspecReader(stock))
    taken = {key: expected[key].flatten()[0].item() for key in like}
    assert set(taken.values()) == ({0.0} if to_lowest else {0.0, 1.0})
    assert_loads_everywhere(checkpoint_dir, expected)


def _contradictions(rank: int) -> dict[str, Any]:
    """Of many sizes, so that both ranks get some where the planner spreads them."""
    return {f"weight{n}": torch.full((10 * (n + 1),), float(rank)) for n in range(8)}


def _save_contradictions(ours: str, stock: str, mode: str, to_lowest: bool) -> None:
    state = _contradictions(dist.get_rank())
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=to_lowest)
    if mode == "sync":
        ranks.save(ours, state, planner=planner)
    else:
        writer = MPFsspecWriter(ours, num_workers=1)
        dcp.async_save(
            state, storage_writer=writer, planner=planner, process_group=ranks.group(0, 1)
        ).result()
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=to_lowest)
    dcp.save(state, storage_writer=StockFsspecWriter(stock), planner=planner)


def test_save_ends_as_stock_when_shapes_of_a_key_differ(
    rank_pair: RankPair, checkpoint_dir: Path, tmp_path: Path
) -> None:
    """A15: both succeed with the same chunks, or both refuse with the same error."""
    stock = tmp_path / "stock"
    for ours, theirs in rank_pair.run(_save_two_shapes, str(checkpoint_dir), str(stock)):
        assert ours == theirs
    found = [(path / ".metadata").exists() for path in (checkpoint_dir, stock)]
    assert found[0] == found[1]
    if found[0]:
        chunks = [
            StockFsspecReader(path).read_metadata().state_dict_metadata
            for path in (checkpoint_dir, stock)
        ]
        assert chunks[0] == chunks[1]


def _save_two_shapes(ours: str, stock: str) -> tuple[Any, Any]:
    state = {"weight": torch.full((3 + dist.get_rank(),), 1.0)}
    outcomes = (
        ranks.caught(ranks.save, ours, state),
        ranks.caught(dcp.save, state, storage_writer=StockFsspecWriter(stock)),
    )
    return outcomes[0] and outcomes[0].kinds, outcomes[1] and outcomes[1].kinds


# -- objects ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_save_round_trips_objects_when_both_ranks_hold_them(
    mode: str, rank_pair: RankPair, checkpoint_dir: Path
) -> None:
    """A15: each is stored once, and both ranks and a single process load it."""
    rank_pair.run(_save_objects, str(checkpoint_dir), mode)
    metadata = StockFsspecReader(checkpoint_dir).read_metadata()
    stored = Counter(index.fqn for index in metadata.storage_data)
    assert set(stored.values()) == {1}
    assert_loads_everywhere(checkpoint_dir, OBJECTS)
    for found in rank_pair.run(_load_objects, str(checkpoint_dir)):
        assert_same(found, OBJECTS)


def _save_objects(path: str, mode: str) -> None:
    if mode == "sync":
        ranks.save(path, dict(OBJECTS))
        return
    writer = MPFsspecWriter(path, num_workers=1)
    group = ranks.group(0, 1)
    dcp.async_save(dict(OBJECTS), storage_writer=writer, process_group=group).result()


def _load_objects(path: str) -> dict[str, Any]:
    return ranks.load(path, blank(OBJECTS))


def test_save_keeps_the_object_that_stock_keeps_when_ranks_hold_different_ones(
    rank_pair: RankPair, checkpoint_dir: Path, tmp_path: Path
) -> None:
    """A15: random states of ranks under one key are the usual case."""
    stock = tmp_path / "stock"
    rank_pair.run(_save_different_objects, str(checkpoint_dir), str(stock))
    like = {f"seed{n}": -1 for n in range(6)}
    expected = load_into(dict(like), StockFsspecReader(stock))
    assert set(expected.values()) <= {0, 1}
    assert_loads_everywhere(checkpoint_dir, expected)


def _save_different_objects(ours: str, stock: str) -> None:
    state = {f"seed{n}": dist.get_rank() for n in range(6)}
    ranks.save(ours, state)
    dcp.save(state, storage_writer=StockFsspecWriter(stock))


# -- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("single", [True, False], ids=["a file a worker", "a file a tensor"])
def test_names_tell_rank_number_and_save_when_two_ranks_save(
    single: bool, num_workers: int, rank_pair: RankPair, checkpoint_dir: Path
) -> None:
    """Invariant 3: `__{rank}_{n}.{save8}.distcp`, numbered from 0 on every rank."""
    found = _names_of_save(rank_pair, checkpoint_dir, 1, single, num_workers)
    # Three tensors and an object a rank.
    num_files = num_workers if single else len(state_of_rank(1, 0))
    numbers = sorted((int(name[1]), int(name[2])) for name in found)
    assert numbers == [(rank, n) for rank in range(2) for n in range(num_files)]
    assert len({(name[1], name[3]) for name in found}) == 2, "one save8 a rank"


@pytest.mark.parametrize("single", [True, False], ids=["a file a worker", "a file a tensor"])
def test_names_are_new_when_a_directory_is_saved_to_again(
    single: bool, rank_pair: RankPair, checkpoint_dir: Path
) -> None:
    """Invariant 3: nothing old is written over; `.metadata` names what is there, no more."""
    first = _names_of_save(rank_pair, checkpoint_dir, 1, single, 2)
    second = _names_of_save(rank_pair, checkpoint_dir, 2, single, 2)
    assert len(first) == len(second)
    assert not {name[3] for name in first} & {name[3] for name in second}


def _names_of_save(
    rank_pair: RankPair, path: Path, number: int, single: bool, num_workers: int
) -> list[re.Match[str]]:
    """Save on both ranks; the files that are there then, which are those that are named."""
    rank_pair.run(_save_files, str(path), number, single, num_workers)
    assert_loads_everywhere(path, state_of_ranks(number))
    storage = StockFsspecReader(path).read_metadata().storage_data
    names = shard_names(path)
    assert sorted({info.relative_path for info in storage.values()}) == names
    matches = [NAME.fullmatch(name) for name in names]
    assert all(matches), names
    return [match for match in matches if match]


def _save_files(path: str, number: int, single: bool, num_workers: int) -> None:
    state = state_of_rank(number, dist.get_rank())
    ranks.save(path, state, single_file_per_rank=single, num_workers=num_workers)
