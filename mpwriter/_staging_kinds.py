"""What a resolved value is to the stream loader: a plain tensor, or bytes.

Runs in: trainer.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from typing import Any

import torch

from mpwriter._types import ItemSpec

__all__ = [
    "bytes_of",
    "check_memory",
    "dtype_name",
    "is_plain",
    "serialized",
    "tensor_spec",
]


def tensor_spec(dtype: torch.dtype, shape: Sequence[int], nbytes: int, key: str = "") -> ItemSpec:
    """The spec of a plain tensor."""
    return ItemSpec(dtype_name(dtype), tuple(shape), nbytes, key)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a detached tensor is a plain strided one: its bytes and a shape say it all."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def check_memory(tensor: torch.Tensor) -> None:
    """Look that every element is there: copying by address would end the process, or read on.

    Meta and zero tensors have no memory; FSDP frees the storage of a tensor that is still there.
    """
    extent = tensor.numel()
    if extent and not tensor.is_contiguous():
        extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    needed_bytes = (tensor.storage_offset() + extent) * tensor.itemsize
    held_bytes = tensor.untyped_storage().nbytes() if tensor.data_ptr() else 0
    if extent and held_bytes < needed_bytes:
        raise ValueError(
            f"its storage on {tensor.device} has {held_bytes} bytes, {needed_bytes} are needed"
        )


def serialized(tensor: torch.Tensor) -> memoryview:
    """What the stock writer would put into the file for a tensor that is not plain.

    Raises:
        TypeError: it is sparse. Stock raises too; a load would leave its target as it was.
    """
    if tensor.layout not in (torch.strided, torch.jagged):
        raise TypeError(f"{tensor.layout} tensors cannot be loaded into place")
    tensor = tensor.cpu()
    if tensor.untyped_storage().size() != tensor.nbytes:
        tensor = tensor.clone()  # minimal storage
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getbuffer()


def bytes_of(resolved: Any) -> memoryview:
    if isinstance(resolved, io.BytesIO):
        return resolved.getbuffer()
    return memoryview(resolved).cast("B")
