"""Tensors on two ranks that are spread in other ways than by a plain DTensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from mpwriter import FsspecReader, MPFsspecWriter
from mpwriter._compat import HAS_RANK_METADATA, StockFsspecReader, StockFsspecWriter
from tests import ranks
from tests.ranks import RankPair
from tests.saves import names_in
from tests.states import assert_loads_everywhere, assert_same, blank, load_into

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

WHOLE = torch.arange(30.0).reshape(5, 6)


class _Rows(torch.Tensor):
    """Every second row of a tensor, as chunks of one row: it says itself how it is saved."""

    whole_shape: torch.Size
    first: int

    @staticmethod
    def of(whole: torch.Tensor, first: int) -> _Rows:
        rows = whole[first::2].clone().as_subclass(_Rows)
        rows.whole_shape, rows.first = whole.shape, first
        return rows

    def size(self) -> torch.Size:  # type: ignore[override]
        """Of the whole, which DCP compares with the checkpoint's."""
        return self.whole_shape

    def _chunks(self) -> list[ChunkStorageMetadata]:
        sizes = torch.Size([1, *self.whole_shape[1:]])
        return [
            ChunkStorageMetadata(offsets=torch.Size([self.first + 2 * n, 0]), sizes=sizes)
            for n in range(len(self))
        ]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=properties, size=self.whole_shape
                ),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        number = (index.offset[0] - self.first) // 2
        return self.as_subclass(torch.Tensor)[number : number + 1]


def _columns(whole: torch.Tensor) -> Any:
    """A DTensor whose rank 0 holds two shards, as row-wise and table-wise embeddings have it."""
    rank = dist.get_rank()
    starts = [(0, 1), (1, 3)] if rank == 0 else [(3, 6)]
    shards = [whole[:, start:stop].clone() for start, stop in starts]
    wrapper = LocalShardsWrapper(shards, [(0, start) for start, _ in starts])
    return DTensor.from_local(
        wrapper,
        ranks.mesh(2),
        [Shard(1)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _sharded(whole: torch.Tensor) -> Any:
    """A ShardedTensor of 4 rows and 1, with the shard of rank 1 first in the tensor."""
    start, stop = (1, 5) if dist.get_rank() == 0 else (0, 1)
    shard = LocalShard.from_tensor_and_offsets(
        whole[start:stop].clone(), [start, 0], dist.get_rank()
    )
    return init_from_local_shards([shard], *whole.shape)


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "rows": lambda whole: _Rows.of(whole, dist.get_rank()),
    "sharded tensor": _sharded,
}
if HAS_RANK_METADATA:  # torch 2.7 cannot save such a DTensor: its own writer ends the process
    KINDS["columns"] = _columns


def _locals(value: Any) -> list[torch.Tensor]:
    """The tensors of this rank in it."""
    if isinstance(value, _Rows):
        return [value.as_subclass(torch.Tensor)]
    if isinstance(value, DTensor):
        local: Any = value.to_local()
        return list(local.local_shards())
    return [shard.tensor for shard in value.local_shards()]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_save_round_trips_when_a_tensor_is_in_pieces_of_its_own_making(
    kind: str, mode: str, rank_pair: RankPair, checkpoint_dir: Path
) -> None:
    """E03: custom `__create_write_items__`, several shards a rank, ShardedTensor."""
    rank_pair.run(_save_and_load, kind, str(checkpoint_dir), mode)
    assert_loads_everywhere(checkpoint_dir, {"value": WHOLE})


def _save_and_load(kind: str, path: str, mode: str) -> None:
    state = {"value": KINDS[kind](WHOLE)}
    if mode == "sync":
        ranks.save(path, state)
    else:
        writer = MPFsspecWriter(path, num_workers=1)
        saved = dcp.async_save(state, storage_writer=writer, process_group=ranks.group(0, 1))
        for tensor in _locals(state["value"]):
            tensor.zero_()
        saved.result()
    target = {"value": KINDS[kind](torch.full_like(WHOLE, -1))}
    ranks.load(path, target)
    assert_same(_locals(target["value"]), _locals(KINDS[kind](WHOLE)))


@pytest.mark.parametrize("kind", KINDS)
def test_save_has_the_chunks_of_stock_when_a_tensor_is_in_pieces(
    kind: str, rank_pair: RankPair, checkpoint_dir: Path, tmp_path: Path
) -> None:
    """E03: offsets, sizes and properties; the stock checkpoint loads with our reader."""
    stock = tmp_path / "stock"
    rank_pair.run(_save_both, kind, str(checkpoint_dir), str(stock))
    _assert_same_items(checkpoint_dir, stock)
    target = blank({"value": WHOLE})
    assert_same(load_into(target, FsspecReader(stock)), {"value": WHOLE})


def _save_both(kind: str, ours: str, stock: str) -> None:
    state = {"value": KINDS[kind](WHOLE)}
    ranks.save(ours, state)
    dcp.save(state, storage_writer=StockFsspecWriter(stock))


def _assert_same_items(ours: Path, stock: Path) -> None:
    found = StockFsspecReader(ours).read_metadata()
    expected = StockFsspecReader(stock).read_metadata()
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data.keys() == expected.storage_data.keys()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_save_ends_as_stock_when_a_tensor_is_partial(
    mode: str, rank_pair: RankPair, checkpoint_dir: Path, tmp_path: Path
) -> None:
    """E03: no sum is made. Where stock refuses, both ranks do with its error, and write nothing."""
    stock = tmp_path / "stock"
    found = rank_pair.run(_save_partial, str(checkpoint_dir), str(stock), mode)
    for ours, theirs in found:
        assert ours == theirs
    if found[0][1] is None:
        _assert_same_items(checkpoint_dir, stock)
        expected = load_into(blank({"value": WHOLE}), StockFsspecReader(stock))
        assert_loads_everywhere(checkpoint_dir, expected)
    else:
        assert names_in(checkpoint_dir) == []


def _save_partial(ours: str, stock: str, mode: str) -> tuple[Any, Any]:
    local = WHOLE + dist.get_rank()
    state = {"value": DTensor.from_local(local, ranks.mesh(2), [Partial()], run_check=False)}
    if mode == "sync":
        failure = ranks.caught(ranks.save, ours, state)
    else:
        failure = ranks.caught(_save_later, state, ours)
    other = ranks.caught(dcp.save, state, storage_writer=StockFsspecWriter(stock))
    return failure and failure.kinds, other and other.kinds


def _save_later(state: dict[str, Any], path: str) -> None:
    writer = MPFsspecWriter(path, num_workers=1)
    dcp.async_save(state, storage_writer=writer, process_group=ranks.group(0, 1)).result()
