"""What scripts/train.py trains: a small decoder-only transformer on the sources of Python.

Nothing in here is about checkpoints.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

__all__ = ["Transformer", "batch_of_step", "read_text", "shard"]

NUM_BYTES = 256  # the vocabulary


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        # -1: under tensor parallelism a rank has only some of the heads.
        query, key, value = (
            part(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return x


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int, num_layers: int, num_heads: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Loss of predicting each byte but the first; `text` is (sequences, length + 1)."""
        before, after = text[:, :-1], text[:, 1:]
        x = self.bytes(before) + self.places(torch.arange(before.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        loss: torch.Tensor = functional.cross_entropy(scores.flatten(0, 1), after.flatten())
        return loss


def shard(model: Transformer, mesh: DeviceMesh) -> None:
    """Spread a model over the ranks: tensor parallel along "tp", FSDP2 along the other dimensions.

    Args:
        mesh: dimensions "shard" and, where they are wanted, "replicate" (HSDP) before it and "tp"
            behind it.

    On CPUs take torch 2.8 or newer: the gloo of 2.7 adds gradients up where FSDP asks for their
    mean, and refuses to for HSDP.
    """
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        plan = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
        for block in model.blocks:
            parallelize_module(
                block, mesh["tp"], {**plan, "out": RowwiseParallel(), "down": RowwiseParallel()}
            )
    data_mesh = mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=data_mesh)
    fully_shard(model, mesh=data_mesh)


def read_text(num_bytes: int = 4 << 20) -> torch.Tensor:
    """Up to this many bytes of the standard library's own sources."""
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(text) >= num_bytes:
            break
        text += path.read_bytes()
    return torch.frombuffer(bytearray(text[:num_bytes]), dtype=torch.uint8)


def batch_of_step(
    text: torch.Tensor, seed: int, step: int, size: int, length: int, part: slice
) -> torch.Tensor:
    """A rank's part of the sequences of one step.

    They depend on the step and on nothing before it, and are cut from a batch that is the same on
    any number of ranks: a resumed run reads on where the killed one would have.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - length - 1, (size,), generator=generator)[part]
    return torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long()
