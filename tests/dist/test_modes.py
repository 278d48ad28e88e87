"""DCP's ways of saving: without collectives, apart, with cached plans, with copies on all ranks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from mpwriter import MPFsspecWriter
from mpwriter._compat import (
    HAS_RANK_METADATA,
    StockFsspecReader,
    StockFsspecWriter,
    end_checkpoint_process,
)
from tests import fakes, ranks
from tests.fault_table import state_of_rank, state_of_ranks
from tests.ranks import Failure, RankPair
from tests.saves import assert_holds, names_in, save, small_state
from tests.states import assert_loads_everywhere, shard_bytes

needs_rank_metadata = pytest.mark.skipif(
    not HAS_RANK_METADATA, reason="this torch always uses collectives"
)


@needs_rank_metadata
def test_save_makes_metadata_of_each_rank_when_collectives_are_off(
    rank_pair: RankPair, checkpoint_dir: Path
) -> None:
    """Invariant 17: every rank commits for itself, and loads what it has saved."""
    for number in (1, 2):
        rank_pair.run(_save_without_collectives, str(checkpoint_dir), number)
        metadata = [name for name in names_in(checkpoint_dir) if name.endswith("metadata")]
        assert metadata == ["__0.metadata", "__1.metadata"]
        assert len(names_in(checkpoint_dir)) == 4, "the old shards go"
        rank_pair.run(_load_own, str(checkpoint_dir), number)


@needs_rank_metadata
def test_save_without_collectives_refuses_when_there_is_a_common_checkpoint(
    rank_pair: RankPair, checkpoint_dir: Path
) -> None:
    """Invariant 17: its old values would be what a load finds."""
    save(checkpoint_dir, small_state(1))
    for failure in rank_pair.run(_failure_without_collectives, str(checkpoint_dir)):
        assert failure is not None and "use_collectives=False" in failure.text
    assert_holds(checkpoint_dir, small_state(1))


@needs_rank_metadata
def test_save_takes_the_place_of_what_ranks_have_saved_on_their_own(
    rank_pair: RankPair, checkpoint_dir: Path
) -> None:
    """Nothing would load that again, and it would lie there for good."""
    rank_pair.run(_save_without_collectives, str(checkpoint_dir), 1)
    failures = rank_pair.run(_failure_without_overwriting, str(checkpoint_dir))
    assert all(f is not None and "holds a checkpoint already" in f.text for f in failures)
    rank_pair.run(_load_own, str(checkpoint_dir), 1)
    rank_pair.run(_save_together, str(checkpoint_dir), 2)
    names = names_in(checkpoint_dir)
    assert [name for name in names if name.endswith("metadata")] == [".metadata"]
    assert len(names) == 3
    assert_holds(checkpoint_dir, state_of_ranks(2))


def test_save_warns_when_ranks_do_not_share_the_directory(
    rank_pair: RankPair, tmp_path: Path
) -> None:
    """Shards on disks of their own are in nobody's way, until somebody loads."""
    for protocol in ("file", "objectlike"):
        told = rank_pair.run(_warnings_of_save_apart, f"{protocol}://{tmp_path}/{protocol}")
        assert told[1] == []
        (text,) = told[0]
        assert "cannot be loaded from" in text and str(tmp_path) in text
        assert ("__1_0." in text) == (protocol == "file")
    assert rank_pair.run(_warnings_of_save_apart, f"{tmp_path}/shared", True) == [[], []]


def test_ranks_save_apart_when_told_that_they_are_alone(
    rank_pair: RankPair, tmp_path: Path
) -> None:
    """`no_dist=True`: each is rank 0 of its own checkpoint."""
    rank_pair.run(_save_alone, str(tmp_path))
    for rank in range(2):
        assert_holds(tmp_path / str(rank), state_of_rank(1, rank))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_saves_hold_their_own_values_when_plans_are_cached(
    mode: str, rank_pair: RankPair, tmp_path: Path
) -> None:
    """Invariant 14: a cached plan is that of the first save; the names of files are not."""
    rank_pair.run(_save_with_cached_plans, str(tmp_path), mode)
    for number in range(3):
        assert_holds(tmp_path / str(number), state_of_ranks(number))


def test_saves_hold_their_own_values_when_a_checkpoint_process_writes(
    rank_pair: RankPair, tmp_path: Path
) -> None:
    """G05: DCP's process mode; the processes of both ranks are one group of their own."""
    rank_pair.run(_save_in_process, str(tmp_path))
    for number in range(2):
        assert_holds(tmp_path / str(number), state_of_ranks(number))


@pytest.mark.parametrize("to_lowest", [False, True])
def test_save_writes_one_copy_when_both_ranks_hold_the_same(
    to_lowest: bool, rank_pair: RankPair, checkpoint_dir: Path
) -> None:
    """A15: replicated values go to one rank, to the lowest one where that is asked for."""
    rank_pair.run(_save_replicated, str(checkpoint_dir), to_lowest)
    state = small_state(1, num_tensors=6, numel=10_000)
    assert_loads_everywhere(checkpoint_dir, state)
    assert shard_bytes(checkpoint_dir) < 1.2 * 6 * 10_000 * 4
    if to_lowest:
        assert {path.name[:4] for path in checkpoint_dir.glob("*.distcp")} == {"__0_"}


def test_save_keeps_the_value_that_stock_keeps_when_ranks_hold_different_ones(
    rank_pair: RankPair, checkpoint_dir: Path, tmp_path: Path
) -> None:
    """A15: one copy, the same rank's, in both."""
    rank_pair.run(_save_contradiction, str(checkpoint_dir), str(tmp_path / "stock"))
    found = []
    for path in (checkpoint_dir, tmp_path / "stock"):
        target = {"weight": torch.full((1000,), -1.0)}
        dcp.load(target, storage_reader=StockFsspecReader(path), no_dist=True)
        found.append(target["weight"])
    assert torch.equal(*found) and found[0][0] in (0, 1)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_files_of_ranks_differ_when_every_tensor_has_its_own(
    num_workers: int, rank_pair: RankPair, checkpoint_dir: Path
) -> None:
    """G04: `single_file_per_rank=False`."""
    rank_pair.run(_save_in_many_files, str(checkpoint_dir), num_workers)
    assert_loads_everywhere(checkpoint_dir, state_of_ranks(1))
    names = [name.split(".")[0] for name in names_in(checkpoint_dir) if name != ".metadata"]
    assert sorted(names) == [f"__{rank}_{number}" for rank in range(2) for number in range(4)]


# -- on the ranks -------------------------------------------------------------------------------


def _save_without_collectives(path: str, number: int) -> None:
    ranks.save(path, state_of_rank(number, dist.get_rank()), use_collectives=False)


def _failure_without_collectives(path: str) -> Failure | None:
    return ranks.caught(_save_without_collectives, path, 2)


def _failure_without_overwriting(path: str) -> Failure | None:
    state = state_of_rank(2, dist.get_rank())
    return ranks.caught(ranks.save, path, state, overwrite=False)


def _save_together(path: str, number: int) -> None:
    ranks.save(path, state_of_rank(number, dist.get_rank()))


def _warnings_of_save_apart(path: str, together: bool = False) -> list[str]:
    assert fakes.__all__  # they have registered their protocols in this process
    rank = dist.get_rank()
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("mpwriter").addHandler(handler)
    try:
        ranks.save(path if together else f"{path}/{rank}", state_of_rank(1, rank))
    finally:
        logging.getLogger("mpwriter").removeHandler(handler)
    texts = [record.getMessage() for record in records]
    return [text for text in texts if "loaded" in text]  # objectlike:// has a warning of its own


def _load_own(path: str, number: int) -> None:
    state = state_of_rank(number, dist.get_rank())
    for key, value in ranks.load(path, state_of_rank(0, dist.get_rank())).items():
        same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
        assert same(value, state[key]), key


def _save_alone(folder: str) -> None:
    rank = dist.get_rank()
    writer = MPFsspecWriter(f"{folder}/{rank}", num_workers=1)
    dcp.save(state_of_rank(1, rank), storage_writer=writer, no_dist=True)


def _save_with_cached_plans(folder: str, mode: str) -> None:
    writer = MPFsspecWriter(f"{folder}/unused", num_workers=2)
    group = ranks.group(0, 1)
    for number in range(3):
        options = {
            "checkpoint_id": f"{folder}/{number}",
            "storage_writer": writer,
            # As trainers do it: a planner a save; the cache is of its class.
            "planner": DefaultSavePlanner(enable_plan_caching=True),
            "process_group": group,
        }
        state = state_of_rank(number, dist.get_rank())
        if mode == "sync":
            dcp.save(state, **options)
        else:
            dcp.async_save(state, **options).result()


def _save_in_process(folder: str) -> None:
    try:
        for number in range(2):
            state = state_of_rank(number, dist.get_rank())
            saved: Any = dcp.async_save(
                state,
                storage_writer=MPFsspecWriter(f"{folder}/{number}", num_workers=1),
                process_group=ranks.group(0, 1),
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
            saved.result()
    finally:
        end_checkpoint_process()


def _save_replicated(path: str, to_lowest: bool) -> None:
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=to_lowest)
    ranks.save(path, small_state(1, num_tensors=6, numel=10_000), planner=planner)


def _save_contradiction(ours: str, stock: str) -> None:
    state = {"weight": torch.full((1000,), float(dist.get_rank()))}
    ranks.save(ours, state)
    dcp.save(state, storage_writer=StockFsspecWriter(stock))


def _save_in_many_files(path: str, num_workers: int) -> None:
    state: dict[str, Any] = state_of_rank(1, dist.get_rank())
    ranks.save(path, state, single_file_per_rank=False, num_workers=num_workers)
