"""The only module that touches private names of torch.

Runs in: trainer. Every name here says which torch versions have it and what happens without it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint.filesystem as _dcp_filesystem
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed._shard.sharded_tensor.api import ShardedTensor, ShardedTensorBase
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING
from torch.distributed._shard.sharded_tensor.metadata import (
    TensorProperties as ShardedTensorProperties,
)
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint import _async_process_executor, state_dict_saver
from torch.distributed.checkpoint._extension import (
    ExtensionRegistry,
    StreamTransformExtension,
)

# The stock classes on fsspec, which ours are measured against; private in every torch so far.
from torch.distributed.checkpoint._fsspec_filesystem import (
    FsspecReader as StockFsspecReader,
)
from torch.distributed.checkpoint._fsspec_filesystem import (
    FsspecWriter as StockFsspecWriter,
)
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.storage import StorageReader
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:

    class SerializationFormat(Enum):
        TORCH_SAVE = "torch_save"
        SAFETENSORS = "safetensors"

elif hasattr(_dcp_filesystem, "SerializationFormat"):  # torch 2.8 up
    SerializationFormat = _dcp_filesystem.SerializationFormat
else:

    class SerializationFormat(Enum):
        """What a shard file holds; torch 2.7 has no such enum."""

        TORCH_SAVE = "torch_save"
        SAFETENSORS = "safetensors"


__all__ = [
    "DCP_VERSION",
    "HAS_ASYNC_STAGING",
    "HAS_RANK_METADATA",
    "METADATA_ENUMS",
    "SENDS_WHERE_IT_SAVES",
    "ExtensionRegistry",
    "SerializationFormat",
    "ShardedTensor",
    "ShardedTensorProperties",
    "StockFsspecReader",
    "StockFsspecWriter",
    "StorageInfo",
    "StoragePrefix",
    "StreamTransformExtension",
    "can_be_storage_id",
    "copy_each",
    "end_checkpoint_process",
    "inner_tensors",
    "map_shared_storage",
    "narrow_tensor_by_index",
    "reduce_storage",
    "rewrap",
    "storage_info",
    "with_shards",
]

# torch 2.9 up: `stage()` may return a future, and async_save then an AsyncSaveResponse.
HAS_ASYNC_STAGING = hasattr(state_dict_saver, "AsyncSaveResponse")

# Whether dcp.load falls back to what a rank saved with use_collectives=False; torch 2.7 does not.
HAS_RANK_METADATA = "kwargs" in inspect.signature(StorageReader.read_metadata).parameters

# Whether process mode sends a state from the thread that saves it; torch 2.7 has a queue for it.
SENDS_WHERE_IT_SAVES = hasattr(_async_process_executor._AsyncCheckpointProcess, "_send")

# The record that the stock readers look for in Metadata.storage_data; pickled by this name.
StorageInfo = _dcp_filesystem._StorageInfo
StoragePrefix = _dcp_filesystem._StoragePrefix

# Named in pickled metadata. The second one, like ShardedTensorProperties, is from before torch 2.3.
METADATA_ENUMS: tuple[type[Enum], ...] = (_MEM_FORMAT_ENCODING, MEM_FORMAT_ENCODING)

# Source: CURRENT_DCP_VERSION of torch/distributed/checkpoint/filesystem.py; torch 2.7 has none.
DCP_VERSION: str = getattr(_dcp_filesystem, "CURRENT_DCP_VERSION", "1.0.0")


def storage_info(
    relative_path: str, offset: int, length: int, descriptors: Sequence[str] | None = None
) -> Any:
    """Where one item lies: `length` bytes at `offset` of the file `relative_path`."""
    if descriptors:
        return StorageInfo(relative_path, offset, length, list(descriptors))
    return StorageInfo(relative_path, offset, length)


def map_shared_storage(fd: int, nbytes: int) -> torch.UntypedStorage:
    """Map `nbytes` of `fd` as a torch shared-memory storage.

    torch dups `fd` for its own use: the caller keeps its descriptor and closes it.
    """
    make: Any = torch.UntypedStorage
    storage: torch.UntypedStorage = make._new_shared_fd_cpu(fd, nbytes)
    return storage


def can_be_storage_id(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether the stock FsspecWriter would take this checkpoint id."""
    return bool(StockFsspecWriter.validate_checkpoint_id(checkpoint_id))


# -- staging -----------------------------------------------------------------------------------


def inner_tensors(tensor: torch.Tensor) -> list[str] | None:
    """Attributes that hold the inner tensors of a wrapper subclass (DTensor); None for others."""
    if not is_traceable_wrapper_subclass(tensor):
        return None
    wrapper: Any = tensor
    names: list[str] = list(wrapper.__tensor_flatten__()[0])
    # Some list attributes that are no tensors; those are passed on as they are.
    return [name for name in names if isinstance(getattr(tensor, name), torch.Tensor)]


def rewrap(tensor: torch.Tensor, inner: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The same wrapper around other inner tensors of the same shapes and strides."""
    wrapper: Any = tensor
    names, context = wrapper.__tensor_flatten__()
    values = {name: inner.get(name, getattr(tensor, name)) for name in names}
    rebuilt: torch.Tensor = type(wrapper).__tensor_unflatten__(
        values, context, tensor.size(), tensor.stride()
    )
    return rebuilt


def with_shards(sharded: ShardedTensor, tensors: Sequence[torch.Tensor]) -> ShardedTensor:
    """The same sharded tensor around other local tensors, in the order of its local shards."""
    shards = [
        Shard(tensor, shard.metadata)
        for tensor, shard in zip(tensors, sharded.local_shards(), strict=True)
    ]
    base: Any = ShardedTensorBase  # its constructor compares no ranks and no devices
    rebuilt: ShardedTensor = base._init_from_local_shards_and_global_metadata(
        shards, sharded.metadata(), sharding_spec=sharded.sharding_spec()
    )
    # The id is the original's: it is taken off a global map when that goes.
    own = ("_local_shards", "_sharded_tensor_id")
    vars(rebuilt).update((k, v) for k, v in vars(sharded).items() if k not in own)
    return rebuilt


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensor by tensor, in one call: 1 us a tensor where a loop takes 2."""
    torch._foreach_copy_(targets, sources)


# -- the process of AsyncCheckpointerType.PROCESS ----------------------------------------------


def end_checkpoint_process() -> None:
    """End DCP's checkpoint process, if there is one; takes up to 5 s. A later save starts another.

    DCP itself never does: a process that has died fails every save that follows.
    """
    _async_process_executor._CHECKPOINT_PROCESS = None  # its __del__ asks it to end, and waits


# -- pickling ----------------------------------------------------------------------------------


def reduce_storage(value: object) -> tuple[Any, ...] | None:
    """How to pickle the CPU storage of a tensor, bytes and all; None for everything else.

    torch's own way for tensors that are pickled, but not by torch.save, cannot be undone for those
    of the newer dtypes (uint16, float8): `_rebuild_tensor_v3` wants the typed storage that only
    torch.load makes. Seen in 2.7 to 2.13.
    """
    storage: Any = value
    if isinstance(value, torch.storage.TypedStorage):
        return _typed_storage, (storage.untyped(), storage.dtype)
    if isinstance(storage, torch.UntypedStorage) and storage.device.type == "cpu":
        content = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        return _storage_of, (content.numpy().tobytes(),)
    return None


def _typed_storage(storage: Any, dtype: torch.dtype) -> Any:
    make: Any = torch.storage.TypedStorage
    return make(wrap_storage=storage.untyped(), dtype=dtype, _internal=True)


def _storage_of(content: bytes) -> Any:
    make: Any = torch.storage.TypedStorage
    tensor = torch.empty(0, dtype=torch.uint8)
    if content:  # torch.frombuffer wants some
        tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return make(wrap_storage=tensor.untyped_storage(), dtype=torch.uint8, _internal=True)
