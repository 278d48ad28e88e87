"""Which item goes into which file. Pure functions over DCP's write items.

Runs in: trainer.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Sequence

from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

__all__ = ["item_nbytes", "shard_name", "shard_rank", "split_into_buckets"]

# Source: DEFAULT_SUFFIX of torch/distributed/checkpoint/filesystem.py.
_TORCH_SUFFIX = ".distcp"
_SAFETENSORS_SUFFIX = ".safetensors"

# A bytes item's size is known only when it is resolved. Most are a few hundred bytes (a step
# count, a learning rate); this keeps them spread over the buckets like small tensors.
_BYTES_ITEM_NBYTES = 1024


def item_nbytes(item: WriteItem) -> int:
    """Bytes of the chunk that this rank writes (not of the whole tensor it belongs to)."""
    tensor = item.tensor_data
    if tensor is None or item.type == WriteItemType.BYTE_IO:
        return _BYTES_ITEM_NBYTES
    return math.prod(tensor.chunk.sizes) * tensor.properties.dtype.itemsize


def split_into_buckets(items: Sequence[WriteItem], num_buckets: int) -> list[list[int]]:
    """Spread items over at most `num_buckets` files, evenly by bytes.

    Longest processing time first: the largest remaining item goes to the lightest bucket.

    Args:
        items: the write items of one rank's plan.
        num_buckets: files wanted, at least 1.

    Returns:
        Positions in `items`; every bucket holds at least one. Within a bucket smallest items
        first, so that the first bytes of a file are on their way as soon as the first copies
        from an accelerator have landed; items of one size in the plan's order.
    """
    sizes = [item_nbytes(item) for item in items]
    num_buckets = min(num_buckets, len(items))
    by_size = sorted(range(len(items)), key=sizes.__getitem__)
    if num_buckets <= 1:
        return [by_size] if by_size else []
    buckets: list[list[int]] = [[] for _ in range(num_buckets)]
    heap = [(0, number) for number in range(num_buckets)]
    for position in reversed(by_size):
        load, number = heap[0]
        buckets[number].append(position)
        # Items of no bytes count as one, or they would all go to the same bucket.
        heapq.heapreplace(heap, (load + max(1, sizes[position]), number))
    return [bucket[::-1] for bucket in buckets]


def shard_name(rank: int, number: int, save_id: str, *, safetensors: bool = False) -> str:
    """`__{rank}_{number}.{save8}.distcp`: no two saves share a name, so none overwrites another."""
    suffix = _SAFETENSORS_SUFFIX if safetensors else _TORCH_SUFFIX
    return f"__{rank}_{number}.{save_id[:8]}{suffix}"


def shard_rank(prefix: str) -> int:
    """The rank in a plan's storage prefix `__{rank}_`, as the stock writer writes it."""
    match = re.fullmatch(r"__(\d+)_", prefix)
    if match is None:
        raise ValueError(f"a storage prefix like '__0_' was expected, got {prefix!r}")
    return int(match.group(1))
