"""Tensors that are spread over two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from mpwriter import FsspecReader, MPFsspecWriter
from mpwriter._compat import StockFsspecReader, StockFsspecWriter
from tests import ranks
from tests.ranks import RankPair
from tests.states import assert_loads_everywhere, assert_same, load_into, save_with

SCALAR_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def _full(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that tell every element apart, the same on both ranks."""
    numel = max(1, torch.Size(shape).numel())
    return (torch.arange(torch.Size(shape).numel()) % (numel + 1)).reshape(shape).to(dtype)


def _spread(full: torch.Tensor, *placements: Placement, mesh_shape: tuple[int, ...] = (2,)) -> Any:
    mesh = ranks.mesh(*mesh_shape)
    if not full.dim():  # gloo of torch 2.7 cannot send every dtype, and there is nothing to send
        return DTensor.from_local(full.clone(), mesh, list(placements), run_check=False)
    return distribute_tensor(full.clone(), mesh, list(placements))


def _sharded_state() -> dict[str, Any]:
    """Of every shape that has been trouble: empty shards, one element, no dimension."""
    state: dict[str, Any] = {
        f"scalar.{dtype}": _spread(torch.tensor(1).to(dtype), Replicate())
        for dtype in SCALAR_DTYPES
    }
    for shape in ((1,), (1, 7), (5, 3), (0, 4), (64, 33)):
        state[f"rows.{shape}"] = _spread(_full(shape), Shard(0))
    state["columns"] = _spread(_full((5, 3)), Shard(1))
    state["grid"] = _spread(_full((5, 3)), Shard(0), Shard(1), mesh_shape=(2, 1))
    state["hybrid"] = _spread(_full((5, 3)), Replicate(), Shard(0), mesh_shape=(1, 2))
    state["copied"] = _spread(_full((3, 3)), Replicate())
    state["plain"] = torch.arange(9.0)
    return state


def _whole(state: dict[str, Any]) -> dict[str, Any]:
    """What one process loads of it."""
    return {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in state.items()
    }


def _zeroed(state: dict[str, Any]) -> dict[str, Any]:
    return {key: torch.zeros_like(value) for key, value in state.items()}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_save_round_trips_when_tensors_are_spread(
    mode: str, rank_pair: RankPair, checkpoint_dir: Path
) -> None:
    """E01, E02, E03: the same values on two ranks, on one, and with the readers of stock."""
    whole, *_ = rank_pair.run(_save_and_load, str(checkpoint_dir), mode)
    assert_loads_everywhere(checkpoint_dir, whole)


def _save_and_load(path: str, mode: str) -> dict[str, Any]:
    state = _sharded_state()
    writer = MPFsspecWriter(path, num_workers=2)
    if mode == "sync":
        dcp.save(state, storage_writer=writer)
    else:
        saved = _save_later(state, writer)
        for value in state.values():
            _local(value).zero_()
        saved.result()
        state = _sharded_state()
    found = ranks.load(path, _zeroed(state))
    for key, value in state.items():
        assert_same(_local(found[key]), _local(value), key)
    return _whole(state)


def _save_later(state: dict[str, Any], writer: MPFsspecWriter) -> Any:
    return dcp.async_save(state, storage_writer=writer, process_group=ranks.group(0, 1))


def test_save_has_the_tensors_of_stock_when_they_are_spread(
    rank_pair: RankPair, checkpoint_dir: Path, tmp_path: Path
) -> None:
    """E03: tensor by tensor, shard by shard: the same keys, shapes, offsets and values."""
    whole, *_ = rank_pair.run(_save_both, str(checkpoint_dir), str(tmp_path / "stock"))
    ours = FsspecReader(checkpoint_dir).read_metadata().state_dict_metadata
    stock = StockFsspecReader(tmp_path / "stock").read_metadata().state_dict_metadata
    assert ours == stock
    blank = {key: torch.zeros_like(value) for key, value in whole.items()}
    found = load_into(blank, FsspecReader(tmp_path / "stock"))
    assert_same(found, whole, "stock checkpoint with our reader")


def _save_both(ours: str, stock: str) -> dict[str, Any]:
    state = _sharded_state()
    ranks.save(ours, state)
    dcp.save(state, storage_writer=StockFsspecWriter(stock))
    return _whole(state)


@pytest.mark.parametrize("loads_on", [1, 2])
def test_load_reshards_when_the_ranks_are_others(
    loads_on: int, rank_pair: RankPair, checkpoint_dir: Path
) -> None:
    """E03: what one process has saved on two ranks, and by other dimensions."""
    full = {"matrix": _full((7, 5)), "row": _full((1, 6)), "one": _full((1,))}
    if loads_on == 2:
        save_with(MPFsspecWriter(checkpoint_dir), full)
        found = rank_pair.run(_load_spread, str(checkpoint_dir))
        for one in found:
            assert_same(one, full)
    else:
        rank_pair.run(_save_spread, str(checkpoint_dir))
        assert_loads_everywhere(checkpoint_dir, full)


def _load_spread(path: str) -> dict[str, Any]:
    target = {
        "matrix": _spread(torch.zeros(7, 5), Shard(1)),
        "row": _spread(torch.zeros(1, 6), Shard(0)),
        "one": _spread(torch.zeros(1), Replicate()),
    }
    return _whole(ranks.load(path, target))


def _save_spread(path: str) -> None:
    state = {
        "matrix": _spread(_full((7, 5)), Shard(0)),
        "row": _spread(_full((1, 6)), Shard(0)),
        "one": _spread(_full((1,)), Shard(0)),
    }
    ranks.save(path, state)


@pytest.mark.parametrize("owner", [None, 0, 1], ids=["nobody", "rank 0", "rank 1"])
def test_save_works_when_a_rank_has_nothing(
    owner: int | None, rank_pair: RankPair, checkpoint_dir: Path
) -> None:
    """E02: also the coordinator; an empty plan makes no file and no hang."""
    rank_pair.run(_save_of_one, str(checkpoint_dir), owner)
    expected = {} if owner is None else {"weight": torch.arange(5.0)}
    assert_loads_everywhere(checkpoint_dir, expected)
    files = {path.name.split("_")[2] for path in checkpoint_dir.glob("*.distcp")}
    assert files == (set() if owner is None else {str(owner)})


def _save_of_one(path: str, owner: int | None) -> None:
    state = {"weight": torch.arange(5.0)} if owner == dist.get_rank() else {}
    ranks.save(path, state, num_workers=2)


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 13)
        self.second = torch.nn.Linear(13, 1)

    def forward(self, batch: torch.Tensor) -> Any:
        return self.second(torch.relu(self.first(batch)))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_save_round_trips_when_the_model_is_fully_sharded(
    mode: str, rank_pair: RankPair, checkpoint_dir: Path
) -> None:
    """E01, E02: FSDP2 and its optimizer, by get_state_dict, into another model; as stock."""
    rank_pair.run(_train_and_save, str(checkpoint_dir), mode)
    ours = FsspecReader(checkpoint_dir).read_metadata().state_dict_metadata
    stock = StockFsspecReader(f"{checkpoint_dir}.stock").read_metadata().state_dict_metadata
    assert ours == stock


def _trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = _Model()
    for layer in (model.first, model.second, model):
        fully_shard(layer, mesh=ranks.mesh(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def _train_and_save(path: str, mode: str) -> None:
    model, optimizer = _trained(1)
    state = _state_of(model, optimizer)
    if mode == "sync":
        ranks.save(path, state)
    else:
        _save_later(state, MPFsspecWriter(path, num_workers=1)).result()
    dcp.save(state, storage_writer=StockFsspecWriter(f"{path}.stock"))

    other, its_optimizer = _trained(2)
    target = _state_of(other, its_optimizer)
    ranks.load(path, target)
    set_state_dict(
        other,
        its_optimizer,
        model_state_dict=target["model"],
        optim_state_dict=target["optimizer"],
    )
    _assert_same_parameters(other, model)
    for one, another in zip(its_optimizer.state.values(), optimizer.state.values(), strict=True):
        for name, value in another.items():
            assert torch.equal(_local(one[name]), _local(value)), name


def _assert_same_parameters(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    for (name, one), (_, other) in zip(
        found.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert torch.equal(_local(one), _local(other)), name


def _local(value: Any) -> torch.Tensor:
    tensor = value.to_local() if isinstance(value, DTensor) else value
    assert isinstance(tensor, torch.Tensor)
    return tensor.detach()
