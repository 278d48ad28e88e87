"""State dicts of all kinds, their targets, and what of them has to be equal after a load."""

from __future__ import annotations

import copy
import math
import os
import random
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from mpwriter import FsspecReader
from mpwriter._compat import StockFsspecReader, StockFsspecWriter

__all__ = [
    "READERS",
    "STOCK_WRITERS",
    "UNSET",
    "Tied",
    "assert_loads_everywhere",
    "assert_same",
    "bits",
    "blank",
    "load_into",
    "mixed_items",
    "outcome",
    "random_bits",
    "save_with",
    "shard_bytes",
    "shard_names",
]

State = dict[str, Any]
Where = str | os.PathLike[str]

READERS: Mapping[str, Callable[[Any], StorageReader]] = {
    "ours": FsspecReader,
    "stock fsspec": StockFsspecReader,
    "stock filesystem": FileSystemReader,
}

STOCK_WRITERS: Mapping[str, Callable[[Any], StorageWriter]] = {
    "fsspec, 1 thread": lambda path: StockFsspecWriter(path, thread_count=1, sync_files=False),
    "fsspec, 4 threads": lambda path: StockFsspecWriter(path, thread_count=4, sync_files=False),
    "filesystem": lambda path: FileSystemWriter(path, sync_files=False),
}

UNSET = "not loaded"
"""What stands in a target for every object."""

_FILLER = 0xA5  # bytes of a blank tensor


class Tied(torch.nn.Module):
    """Two of its three weights are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(2000, 256)
        self.head = torch.nn.Linear(256, 2000, bias=False)
        self.head.weight = self.embedding.weight
        self.other = torch.nn.Linear(256, 100)


def mixed_items(number: int) -> State:
    """Tensors of many sizes, every fifth item an object."""
    state: State = {}
    for n in range(number):
        state[f"item{n}"] = torch.randn(1 + 37 * n % 5000) if n % 5 != 1 else {"value", str(n)}
    return state


def random_bits(
    dtype: torch.dtype, shape: tuple[int, ...], seed: int | str = 0, *, spare: int = 0
) -> torch.Tensor:
    """A contiguous tensor of random bits: NaNs too, but no odd booleans, which `copy_` evens out.

    Args:
        spare: elements of its storage before and behind it.
    """
    numel = math.prod(shape)
    content = random.Random(f"{dtype} {shape} {seed}").randbytes(
        (numel + 2 * spare) * dtype.itemsize
    )
    if dtype is torch.bool:
        content = bytes(byte & 1 for byte in content)
    storage = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8).untyped_storage()
    if not content:
        storage = torch.UntypedStorage(0)
    stride = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(storage, spare, shape, stride)


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, without torch's own copying."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return b""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    size = tensor.itemsize
    return np.ndarray(
        tuple(tensor.shape),
        dtype=np.dtype((np.void, size)),
        buffer=storage,
        offset=tensor.storage_offset() * size,
        strides=tuple(step * size for step in tensor.stride()),
    ).tobytes()


def assert_same(found: Any, expected: Any, where: str = "state") -> None:
    """Tensors equal to the last bit, objects equal and of one type, at every depth."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), f"{where}: {found!r}"
        assert found.dtype == expected.dtype, where
        assert found.shape == expected.shape, where
        assert bits(found) == bits(expected), where
    elif isinstance(expected, dict):
        assert type(found) is type(expected), where
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected), where
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected)):
            assert_same(one, other, f"{where}[{number}]")
    elif isinstance(expected, np.ndarray):
        assert type(found) is np.ndarray and found.dtype == expected.dtype, where
        assert np.array_equal(found, expected), where
    else:
        assert type(found) is type(expected), f"{where}: {found!r}"
        assert found == expected, f"{where}: {found!r}"


def _is_traversed(value: Any) -> bool:
    """Whether the default planner looks for values in it, instead of pickling it whole."""
    if isinstance(value, dict):
        return True
    return isinstance(value, list) and any(
        isinstance(entry, torch.Tensor) or _is_traversed(entry) for entry in value
    )


def blank(value: Any) -> Any:
    """A target of the same structure in which nothing has its value yet."""
    if isinstance(value, torch.Tensor):
        target = torch.empty(value.shape, dtype=value.dtype)
        if target.numel():
            torch.empty(0, dtype=torch.uint8).set_(target.untyped_storage()).fill_(_FILLER)
        return target
    if not _is_traversed(value):
        return UNSET
    target = copy.copy(value)
    for key in value if isinstance(value, dict) else range(len(value)):
        target[key] = blank(value[key])
    return target


def save_with(writer: StorageWriter, state: State, planner: SavePlanner | None = None) -> Any:
    """`dcp.save` in this process alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)


def load_into(
    target: State, reader: StorageReader | None, planner: LoadPlanner | None = None, **kwargs: Any
) -> State:
    """`dcp.load` in this process alone; returns the target."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, storage_reader=reader, planner=planner, no_dist=True, **kwargs)
    return target


def assert_loads_everywhere(path: Where, state: State) -> None:
    """Our reader and both of stock give back every bit."""
    for name, reader in READERS.items():
        assert_same(load_into(blank(state), reader(path)), state, name)


def outcome(action: Callable[[], Any]) -> Any:
    """What an action gives, or the type and text of the exception that a rank raised."""
    try:
        return action()
    except CheckpointException as error:
        cause = error.failures[0][0]
        return type(cause), str(cause)
    except Exception as error:
        return type(error), str(error)


def shard_names(path: Where) -> list[str]:
    """The files of a checkpoint except `.metadata`, hidden ones too."""
    return sorted(name for name in os.listdir(path) if name != ".metadata")


def shard_bytes(path: Where) -> int:
    """Bytes on disk except those of `.metadata`."""
    return sum((Path(path) / name).stat().st_size for name in shard_names(path))
