"""Saves a model in every layout and way, and loads it into every layout; for torchrun.

    torchrun --nproc-per-node 4 layouts.py FOLDER

Rank 0 prints a line for each load that gave back every bit. The first error ends the job.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]

from train_model import Transformer, shard  # noqa: E402

from mpwriter import FsspecReader, MPFsspecWriter  # noqa: E402
from mpwriter._compat import HAS_ASYNC_STAGING, StockFsspecReader  # noqa: E402
from tests.states import assert_same  # noqa: E402
from tests.torchrun.jobs import GLOO_AVERAGES  # noqa: E402

# Sizes of the mesh by number of ranks.
LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    2: {"fsdp": {"shard": 2}, "tp": {"shard": 1, "tp": 2}, "hsdp": {"replicate": 2, "shard": 1}},
    4: {
        "fsdp": {"shard": 4},
        "fsdp and tp": {"shard": 2, "tp": 2},
        "hsdp": {"replicate": 2, "shard": 2},
    },
}

if not GLOO_AVERAGES:
    for by_name in LAYOUTS.values():
        del by_name["hsdp"]


class Trained:
    """A model and its optimizer after a step; no two seeds have a value in common."""

    def __init__(self, sizes: dict[str, int], seed: int) -> None:
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        torch.manual_seed(seed)
        # 20: four ranks have uneven parts of it, and of 5.
        self.model: nn.Module = Transformer(20, 1, 4, 5)
        shard(self.model, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 * seed, foreach=False)
        self.model(torch.arange(12).reshape(2, 6)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def whole(self) -> Any:
        """All values, on rank 0."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_state_dict(self.model, self.optimizer, options=options)

    def wipe(self) -> None:
        """So that a load that brings nothing is seen."""
        for parameter in self.model.parameters():
            parameter.data.fill_(7)
            for value in self.optimizer.state[parameter].values():
                value.fill_(7)

    def load(self, reader: Any) -> None:
        state = self.state()
        dcp.load(state, storage_reader=reader)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def save(state: dict[str, Any], path: str, group: Any) -> None:
    dcp.save(state, storage_writer=MPFsspecWriter(path))


def save_asynchronously(state: dict[str, Any], path: str, group: Any) -> None:
    writer = MPFsspecWriter(path, single_file_per_rank=False)
    dcp.async_save(state, storage_writer=writer, process_group=group).result()


def save_with_late_copy(state: dict[str, Any], path: str, group: Any) -> None:
    writer = MPFsspecWriter(path, async_staging=True)
    response = dcp.async_save(state, storage_writer=writer, process_group=group)
    response.staging_completion.result()
    response.upload_completion.result()
    writer.close()


WAYS: list[Callable[..., None]] = [save, save_asynchronously]
WAYS += [save_with_late_copy] if HAS_ASYNC_STAGING else []


def loads(target: str, layouts: list[str]) -> Iterator[tuple[str, Callable[..., None], type]]:
    """Layout, way and reader of each load into `target`: every layout, and its own in every way."""
    yield from ((layout, save, FsspecReader) for layout in layouts if layout != target)
    yield from ((target, way, FsspecReader) for way in WAYS)
    yield target, save, StockFsspecReader


def described(layout: str, way: Callable[..., None], target: str, reader: type) -> str:
    return f"{layout}, {way.__name__} -> {target}, {reader.__module__.partition('.')[0]}"


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    group = dist.new_group()
    layouts = LAYOUTS[dist.get_world_size()]
    saved: dict[str, Any] = {}
    for number, (layout, sizes) in enumerate(layouts.items()):
        trained = Trained(sizes, seed=number + 1)
        for way in WAYS:
            way(trained.state(), f"{folder}/{layout}, {way.__name__}", group)
        saved[layout] = trained.whole()
    for target, sizes in layouts.items():
        trained = Trained(sizes, seed=99)
        for layout, way, reader in loads(target, list(layouts)):
            trained.wipe()
            trained.load(reader(f"{folder}/{layout}, {way.__name__}"))
            found = trained.whole()
            if dist.get_rank() == 0:
                assert_same(found, saved[layout], f"{layout}, {way.__name__}")
                print("ok:", described(layout, way, target, reader), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
