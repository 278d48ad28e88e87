"""The only module that touches private names of torch.

Runs in: trainer. Every name here says which torch versions have it and what happens without it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint.filesystem as _dcp_filesystem
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING
from torch.distributed._shard.sharded_tensor.metadata import (
    TensorProperties as ShardedTensorProperties,
)
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
    "METADATA_ENUMS",
    "ExtensionRegistry",
    "SerializationFormat",
    "ShardedTensorProperties",
    "StockFsspecReader",
    "StockFsspecWriter",
    "StorageInfo",
    "StoragePrefix",
    "StreamTransformExtension",
    "map_shared_storage",
    "narrow_tensor_by_index",
    "storage_info",
]

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
