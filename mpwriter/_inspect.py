"""What a checkpoint holds, by its metadata and the list of its files; no shard is read.

Runs in: trainer. Reads checkpoints of ours and of the stock writers.

    inspect_checkpoint(url) -> Checkpoint
        .tensors, .objects     by key: shape, dtype, chunks, files
        .files                 what the metadata names, with the sizes it needs and those there are
        .others                what else lies in the directory
        .problems              why a load of all keys would fail; none: complete
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from mpwriter import _metadata
from mpwriter._faults import as_storage_error, is_absence
from mpwriter._fetch_plan import chunk_of
from mpwriter._filesystems import forget_listings
from mpwriter._leftovers import is_of_a_save, is_shard_of_save
from mpwriter._publish import is_temporary_name
from mpwriter._storage import Location, locate, read_file
from mpwriter.errors import IncompleteCheckpointError

__all__ = [
    "Checkpoint",
    "StoredFile",
    "StoredKey",
    "StoredPart",
    "inspect_checkpoint",
]

_RANK_METADATA = re.compile(r"__\d+\.metadata")


@dataclass(frozen=True)
class StoredPart:
    """One stored item: a whole object, or one chunk of a tensor.

    Attributes:
        offsets, sizes: of the chunk in its tensor, in elements; empty for an object.
        file: name; start, nbytes: where in it, bytes, with the container.
        descriptors: of the transforms that the bytes went through.
        entry: of the key in the metadata.
        index: its place in the metadata.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    nbytes: int
    descriptors: tuple[str, ...]
    entry: Any = field(repr=False, compare=False)
    index: MetadataIndex = field(repr=False, compare=False)


@dataclass(frozen=True)
class StoredKey:
    """One key of the state dict.

    Attributes:
        shape, dtype: of the whole tensor; None for an object.
        parts: where it is.
    """

    key: str
    shape: tuple[int, ...] | None
    dtype: str | None
    parts: tuple[StoredPart, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class StoredFile:
    """One file of the directory.

    Attributes:
        nbytes: its size; None where there is no such file, or its size is not known.
        needed_bytes: up to where the metadata says that it reaches; 0 where it names it not.
        kind: "shard", "metadata", "shard of another save", "temporary file" or "other".
    """

    name: str
    nbytes: int | None
    needed_bytes: int
    num_parts: int
    kind: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, or what is left of one. See the module's docstring."""

    url: str
    location: Location = field(repr=False)
    save_id: str | None
    writer: str
    keys: tuple[StoredKey, ...]
    files: tuple[StoredFile, ...]
    others: tuple[StoredFile, ...]
    problems: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        return not self.problems

    @property
    def parts(self) -> Iterable[StoredPart]:
        return (part for key in self.keys for part in key.parts)


def inspect_checkpoint(url: str | os.PathLike[str], **storage_options: Any) -> Checkpoint:
    """Look at a checkpoint.

    Args:
        url: its directory, any fsspec URL.
        **storage_options: for the filesystem.

    Returns:
        Also for a directory in which no metadata file lies: then `problems` says so.

    Raises:
        StorageError: the directory or the metadata cannot be read; IncompleteCheckpointError:
            there is no such directory, or it is empty.
        CorruptCheckpointError: the metadata is damaged.
        TypeError, ValueError, ImportError: as FsspecReader.
    """
    location = locate(url, storage_options)
    sizes = _listed(location)
    metadata = _read_metadata(location, sizes)
    places = _places(metadata)
    keys = tuple(_keys(metadata, places))
    named = _files(keys, sizes, location)
    problems = [] if metadata else [f"there is no {_metadata.METADATA_NAME}"]
    problems += [problem for file in named if (problem := _problem(file)) is not None]
    problems += [
        f"{key.key}: the metadata does not say where {what} is stored"
        for key in keys
        for what in _unplaced(key)
    ]
    known = {file.name for file in named} | set(metadata)
    others = tuple(
        StoredFile(name, nbytes, 0, 0, _kind(name)) for name, nbytes in sizes.items()
        if name not in known
    )  # fmt: skip
    if not metadata and not others:
        raise IncompleteCheckpointError(
            f"no checkpoint at {location.display}: the directory is empty", path=location.display
        )
    first = next(iter(metadata.values()), None)
    save_id = getattr(first.storage_meta, "save_id", None) if first is not None else None
    return Checkpoint(
        location.display,
        location,
        save_id,
        _writer(named, metadata, location),
        keys,
        tuple(named),
        others,
        tuple(problems),
    )


def _listed(location: Location) -> dict[str, int | None]:
    """Names and sizes of the files right in the directory."""
    fs, root = location.fs, location.root
    forget_listings(fs, root)
    try:
        entries = fs.ls(root, detail=True)
    except Exception as error:
        if is_absence(error):
            raise IncompleteCheckpointError(
                f"no checkpoint at {location.display}: there is no such directory",
                path=location.display,
            ) from error
        raise as_storage_error(error, "list", location.display, fs) from error
    found: dict[str, int | None] = {}
    for entry in entries:
        name = str(entry["name"]).rstrip("/")
        if entry.get("type") != "directory" and name.strip("/") != root.strip("/"):
            size = entry.get("size")
            found[name.rsplit("/", 1)[-1]] = size if isinstance(size, int) else None
    return dict(sorted(found.items()))


def _read_metadata(location: Location, sizes: Mapping[str, Any]) -> dict[str, Metadata]:
    """The common metadata, or those of single ranks where there is none."""
    names = [_metadata.METADATA_NAME]
    if _metadata.METADATA_NAME not in sizes:
        names = [name for name in sizes if _RANK_METADATA.fullmatch(name)]
    found = {}
    for name in names:
        path = f"{location.display}/{name}"
        try:
            raw = read_file(location.fs, location.child(name))
        except Exception as error:
            raise as_storage_error(error, "read", path, location.fs) from error
        found[name] = _metadata.loads(raw, path)
    return found


def _places(metadata: Mapping[str, Metadata]) -> dict[str, list[tuple[MetadataIndex, Any, Any]]]:
    """By key: index, entry and storage info of everything stored."""
    found: dict[str, list[tuple[MetadataIndex, Any, Any]]] = {}
    for each in metadata.values():
        for key in each.state_dict_metadata:
            found.setdefault(key, [])
        for index, place in (each.storage_data or {}).items():
            entry = each.state_dict_metadata.get(index.fqn)
            found.setdefault(index.fqn, []).append((index, entry, place))
    return found


def _keys(
    metadata: Mapping[str, Metadata], places: Mapping[str, list[tuple[MetadataIndex, Any, Any]]]
) -> Iterable[StoredKey]:
    entries: dict[str, Any] = {}
    for each in metadata.values():
        for key, entry in each.state_dict_metadata.items():
            entries.setdefault(key, entry)
    for key in sorted(places):
        tensor = entries.get(key)
        shape = dtype = None
        if isinstance(tensor, TensorStorageMetadata):
            shape = tuple(tensor.size)
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
        parts = tuple(_part(index, entry, place) for index, entry, place in places[key])
        yield StoredKey(key, shape, dtype, parts)


def _part(index: MetadataIndex, entry: Any, place: Any) -> StoredPart:
    chunk = chunk_of(entry, index)
    return StoredPart(
        tuple(chunk.offsets) if chunk is not None else (),
        tuple(chunk.sizes) if chunk is not None else (),
        place.relative_path,
        place.offset,
        place.length,
        # torch before 2.7 writes no transform_descriptors.
        tuple(getattr(place, "transform_descriptors", None) or ()),
        entry,
        index,
    )


def _files(
    keys: Iterable[StoredKey], sizes: Mapping[str, int | None], location: Location
) -> list[StoredFile]:
    needed: dict[str, tuple[int, int]] = {}
    for key in keys:
        for part in key.parts:
            most, number = needed.get(part.file, (0, 0))
            needed[part.file] = max(most, part.start + part.nbytes), number + 1
    return [
        StoredFile(name, _size(name, sizes, location), most, number, "shard")
        for name, (most, number) in sorted(needed.items())
    ]


def _size(name: str, sizes: Mapping[str, int | None], location: Location) -> int | None:
    """A file's size; one in a directory below is asked for by itself."""
    if name in sizes or "/" not in name:
        return sizes.get(name)
    try:
        size = location.fs.info(location.child(name)).get("size")
    except Exception:
        return None
    return size if isinstance(size, int) else None


def _problem(file: StoredFile) -> str | None:
    if file.nbytes is None:
        return f"{file.name}: missing ({file.num_parts} items lie in it)"
    if file.nbytes < file.needed_bytes:
        return f"{file.name}: cut off: {file.nbytes} bytes, {file.needed_bytes} are needed"
    return None


def _unplaced(key: StoredKey) -> Iterable[str]:
    if key.shape is None:
        return [] if key.parts else ["it"]
    if not key.parts:
        return ["it"]
    entry = key.parts[0].entry
    chunks = getattr(entry, "chunks", ())
    placed = {part.offsets for part in key.parts}
    return [
        f"its chunk at {tuple(chunk.offsets)}"
        for chunk in chunks
        if tuple(chunk.offsets) not in placed
    ]


def _kind(name: str) -> str:
    if is_temporary_name(name):
        return "temporary file"
    if is_shard_of_save(name) or re.fullmatch(r"__\d+_\d+\.(distcp|safetensors)", name):
        return "shard of another save"
    if is_of_a_save(name) or name == _metadata.METADATA_NAME:
        return "metadata"
    return "other"


def _writer(
    files: Iterable[StoredFile], metadata: Mapping[str, Metadata], location: Location
) -> str:
    if not metadata:
        return "unknown"
    names = [file.name for file in files]
    if names:
        return "mpwriter" if all(map(is_shard_of_save, names)) else "stock"
    raw = read_file(location.fs, location.child(next(iter(metadata))))
    return "mpwriter" if raw[-_metadata.TRAILER_NBYTES :][:8] == b"mpwrmeta" else "stock"
