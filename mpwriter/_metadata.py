"""The pickled `.metadata` file: writing it, and reading it through an exact list of names.

Runs in: trainer.

    +--------------------------+---------+---------+-------+--------+
    | pickle, up to its STOP   | magic   | version | crc32 | length |
    | (all that stock reads)   | 8 bytes | u32     | u32   | u64    |
    +--------------------------+---------+---------+-------+--------+

All numbers are little-endian. `length` counts the bytes of the pickle, its STOP included; `crc32`
covers the pickle, then magic, version and length. The stock readers stop at STOP and never see the
trailer; their own files have none, so a file that ends exactly at STOP is read without a check.
Whatever else stands after STOP is damage.

Both ways go through the list of `mpwriter._metadata_classes`. A name outside it is neither written,
so that a checkpoint can be read where mpwriter or the trainer's own code is not installed, nor
looked up when read: whole modules are never allowed, and dotted names cannot match.
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any, cast
from zlib import crc32

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mpwriter._compat import StorageInfo
from mpwriter._metadata_classes import NAMES, REDUCERS
from mpwriter.errors import CorruptCheckpointError

__all__ = [
    "METADATA_NAME",
    "TRAILER_NBYTES",
    "dumps",
    "has_trailer",
    "loads",
    "metadata_name",
    "share_equal_parts",
]

# Source: _metadata_fn of torch/distributed/checkpoint/filesystem.py.
METADATA_NAME = ".metadata"

_MAGIC = b"mpwrmeta"
_VERSION = 1
_TRAILER = struct.Struct("<8sIIQ")
_COVERED = struct.Struct("<8sIQ")
TRAILER_NBYTES = _TRAILER.size

# Protocol 4 is what pickle.dump of Python 3.8 to 3.13 writes, so what every stock reader has seen.
_PROTOCOL = 4


def metadata_name(rank: int | None = None) -> str:
    """The file that holds a checkpoint's metadata, or that of one rank saved on its own."""
    return METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"


def dumps(metadata: Metadata) -> bytes:
    """Pickle `metadata` and put the trailer behind it.

    Args:
        metadata: left as it is; its paths should be str (see invariant 2 of the design).

    Raises:
        MPWriterError: it holds an object of a class that is not on the list, or such a class.

    Thread safety: any thread.
    """
    sink = io.BytesIO()
    _Pickler(sink, _PROTOCOL).dump(metadata)
    length = sink.tell()
    crc = crc32(_COVERED.pack(_MAGIC, _VERSION, length), crc32(sink.getbuffer()))
    sink.write(_TRAILER.pack(_MAGIC, _VERSION, crc, length))
    return sink.getvalue()


def share_equal_parts(metadata: Metadata) -> None:
    """Let equal sizes, chunks and tensor properties of a checkpoint be the same object, in place.

    A pickle holds an object once, however often it is met: for 20,000 tensors of a few shapes the
    file is half as long and written in half the time. Nothing compares differently afterwards.
    """
    sizes: dict[torch.Size, torch.Size] = {}
    properties: dict[Any, TensorProperties] = {}
    chunks: dict[tuple[torch.Size, torch.Size], ChunkStorageMetadata] = {}
    for entry in metadata.state_dict_metadata.values():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        found = entry.properties
        kind = (
            found.dtype,
            found.layout,
            found.requires_grad,
            found.memory_format,
            found.pin_memory,
        )
        entry.properties = properties.setdefault(kind, found)
        entry.size = sizes.setdefault(entry.size, entry.size)
        for number, chunk in enumerate(entry.chunks):
            chunk.offsets = sizes.setdefault(chunk.offsets, chunk.offsets)
            chunk.sizes = sizes.setdefault(chunk.sizes, chunk.sizes)
            entry.chunks[number] = chunks.setdefault((chunk.offsets, chunk.sizes), chunk)
    for index in metadata.storage_data or ():
        if index.offset is not None:
            # Frozen, but its hash and what it is equal to stay the same.
            shared = sizes.setdefault(index.offset, index.offset)
            object.__setattr__(index, "offset", shared)


def loads(raw: bytes, path: str) -> Metadata:
    """Read what `dumps`, or a stock writer, made.

    Args:
        raw: the whole file.
        path: names the file in errors.

    Returns:
        A new object at every call; nothing of it is shared.

    Raises:
        CorruptCheckpointError: damaged, cut off, not metadata at all, or it names a class that is
            not on the list. Nothing of a file whose trailer does not fit is unpickled.

    Thread safety: any thread.
    """
    length = _checked_length(raw, path)
    stream = io.BytesIO(raw if length is None else memoryview(raw)[:length])
    try:
        metadata = _Unpickler(stream, path).load()
    except CorruptCheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise _corrupt(path, f"not readable ({type(error).__name__}: {error})") from error
    surplus = (len(raw) if length is None else length) - stream.tell()
    if surplus:
        raise _corrupt(path, f"{surplus} bytes after its end are not a valid trailer")
    _check_kinds(metadata, path)
    if length is None:
        _check_fields(metadata, path)
    return cast(Metadata, metadata)


def has_trailer(raw: bytes) -> bool:
    """Whether the bytes of a whole metadata file end in a trailer; `loads` tells if it fits."""
    return len(raw) >= TRAILER_NBYTES and raw[-TRAILER_NBYTES:][: len(_MAGIC)] == _MAGIC


def _corrupt(path: str, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"the checkpoint's metadata is damaged: {path}: {what}", path=path
    )


def _checked_length(raw: bytes, path: str) -> int | None:
    """Length of the pickle by a trailer whose CRC fits; None where there is no trailer."""
    if not has_trailer(raw):
        return None
    magic, version, crc, length = _TRAILER.unpack(raw[-TRAILER_NBYTES:])
    if version != _VERSION:
        raise _corrupt(path, f"trailer version {version}, this mpwriter knows {_VERSION}")
    if length != len(raw) - TRAILER_NBYTES:
        held = len(raw) - TRAILER_NBYTES
        raise _corrupt(path, f"holds {held} bytes, its trailer says {length}")
    found = crc32(_COVERED.pack(magic, version, length), crc32(memoryview(raw)[:length]))
    if found != crc:
        raise _corrupt(path, f"CRC-32 is {found:08x}, its trailer says {crc:08x}")
    return int(length)


def _check_kinds(metadata: Any, path: str) -> None:
    """Look at the kinds of the objects that the loaders rely on."""
    if type(metadata) is not Metadata:
        raise _corrupt(path, f"holds a {type(metadata).__name__}, not a Metadata")
    entries = getattr(metadata, "state_dict_metadata", None)
    kinds = (TensorStorageMetadata, BytesStorageMetadata)
    if not isinstance(entries, dict) or not all(isinstance(e, kinds) for e in entries.values()):
        raise _corrupt(path, "its state_dict_metadata is not a dictionary of stored values")
    places = metadata.storage_data
    if places is not None and not (
        isinstance(places, dict)
        and all(isinstance(index, MetadataIndex) for index in places)
        and all(isinstance(place, StorageInfo) for place in places.values())
    ):
        raise _corrupt(path, "its storage_data does not say where in which file the values are")


def _check_fields(metadata: Metadata, path: str) -> None:
    """Look into the objects of a file without CRC: there a flipped bit can rename a field."""
    try:
        sound = all(map(_is_sound_entry, metadata.state_dict_metadata.values())) and all(
            type(place.relative_path) is str
            and type(place.offset) is int
            and type(place.length) is int
            for place in (metadata.storage_data or {}).values()
        )
    except (AttributeError, TypeError) as error:
        raise _corrupt(path, str(error)) from error
    if not sound:
        raise _corrupt(path, "fields of its records are not what they should be")


def _is_sound_entry(entry: TensorStorageMetadata | BytesStorageMetadata) -> bool:
    if isinstance(entry, BytesStorageMetadata):
        return True
    return (
        type(entry.size) is torch.Size
        and type(entry.properties.dtype) is torch.dtype
        and all(len(chunk.offsets) == len(chunk.sizes) for chunk in entry.chunks)
    )


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return REDUCERS[type(value)](value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, path: str) -> None:
        super().__init__(stream)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        try:
            return NAMES[module, name]()
        except KeyError:
            pass
        if module == "torch" and "." not in name:
            why = f"this torch ({torch.__version__}) may be older than the one that wrote it"
        else:
            why = "only the classes that torch.distributed.checkpoint writes are loaded"
        raise CorruptCheckpointError(
            f"the checkpoint's metadata names {module}.{name}, which is not on the list of what "
            f"it may name: {self._path}: {why}",
            path=self._path,
        )
