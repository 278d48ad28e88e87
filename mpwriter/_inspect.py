"""What a checkpoint holds, by its metadata and the list of its files; no shard is read.

Runs in: trainer. Reads checkpoints of ours and of the stock writers.

    inspect_checkpoint(url) -> Checkpoint
        .keys         by key: shape, dtype, chunks, files
        .files        what the metadata names, with the sizes it needs and those there are
        .others       what else lies in the directory
        .findings     why a load of all keys would fail; none: complete
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from mpwriter import _metadata
from mpwriter._fetch_plan import chunk_of
from mpwriter._inspect_files import MetadataFile, kind_of, listed, read_metadata, size_of
from mpwriter._reader_absence import explain_absence
from mpwriter._storage import Location, locate

__all__ = [
    "Checkpoint",
    "Finding",
    "StoredFile",
    "StoredKey",
    "StoredPart",
    "inspect",
    "inspect_checkpoint",
]

_MAX_NAMED_KEYS = 3


class Finding(NamedTuple):
    """What is wrong with one item or file; `key`, `file` are "" where it is none of one."""

    file: str
    key: str
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in self if part)


@dataclass(frozen=True)
class StoredPart:
    """One stored item: a whole object, or one chunk of a tensor.

    Attributes:
        offsets, sizes: of the chunk in its tensor, in elements; empty for an object.
        dtype: of the tensor; None for an object, and for a chunk that the metadata does not have.
        is_object: whether it is one.
        file: name; start, nbytes: where in it, bytes, with the container.
        descriptors: of the transforms that the bytes went through.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str | None
    is_object: bool
    file: str
    start: int
    nbytes: int
    descriptors: tuple[str, ...]

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


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
        """Bytes of the parts in their files; keys that are tied count each for itself."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class StoredFile:
    """One file of the directory.

    Attributes:
        nbytes: its size; None where it is missing, or its size is not known.
        needed_bytes: up to where the metadata says that it reaches; 0 where it names it not.
        kind: "shard", "metadata", "shard of another save", "temporary file" or "other".
        exists: whether it is there.
    """

    name: str
    nbytes: int | None
    needed_bytes: int
    num_parts: int
    kind: str
    exists: bool = True


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, or what is left of one. See the module's docstring.

    Attributes:
        url: without credentials.
        writer: "mpwriter", "stock", or "unknown" where there is no metadata.
        metadata_checked: whether each metadata file has a checksum, which then was right.
    """

    url: str
    location: Location = field(repr=False)
    save_id: str | None
    writer: str
    metadata_checked: bool
    keys: tuple[StoredKey, ...]
    files: tuple[StoredFile, ...]
    others: tuple[StoredFile, ...]
    findings: tuple[Finding, ...]

    @property
    def is_complete(self) -> bool:
        return not self.findings

    @property
    def problems(self) -> tuple[str, ...]:
        """The findings as text."""
        return tuple(map(str, self.findings))

    @property
    def parts(self) -> Iterable[StoredPart]:
        return (part for key in self.keys for part in key.parts)


def inspect_checkpoint(url: str | os.PathLike[str], **storage_options: Any) -> Checkpoint:
    """Look at a checkpoint.

    Args:
        url: its directory, any fsspec URL.
        **storage_options: for the filesystem.

    Returns:
        Also for a directory in which shards lie, but no metadata: then `findings` says so.

    Raises:
        StorageError: the directory or the metadata cannot be read; IncompleteCheckpointError:
            there is no such directory, or nothing of a checkpoint in it.
        CorruptCheckpointError: the metadata is damaged.
        TypeError, ValueError, ImportError: as FsspecReader.

    Thread safety: any thread.
    """
    location = locate(url, storage_options)
    sizes = listed(location)
    metadata = read_metadata(location, sizes)
    keys = tuple(_keys(metadata))
    files = tuple(_files(keys, sizes, location))
    known = {file.name for file in files} | set(metadata)
    others = tuple(
        StoredFile(name, nbytes, 0, 0, kind_of(name))
        for name, nbytes in sizes.items()
        if name not in known
    )
    if not metadata and all(file.kind == "other" for file in others):
        raise explain_absence(location, _metadata.METADATA_NAME)
    checked = bool(metadata) and all(each.has_checksum for each in metadata.values())
    first = next(iter(metadata.values()), None)
    stored = None if first is None else first.content.storage_meta
    return Checkpoint(
        url=location.display,
        location=location,
        save_id=getattr(stored, "save_id", None),
        writer="mpwriter" if checked else "stock" if metadata else "unknown",
        metadata_checked=checked,
        keys=keys,
        files=files,
        others=others,
        findings=tuple(_findings(metadata, keys, files)),
    )


inspect = inspect_checkpoint
"""Its public name."""


def _keys(metadata: Mapping[str, MetadataFile]) -> Iterator[StoredKey]:
    """All keys by name; ranks that saved on their own may have the same ones."""
    entries: dict[str, Any] = {}
    parts: dict[str, list[StoredPart]] = {}
    for content, *_ in metadata.values():
        entries = {**content.state_dict_metadata, **entries}
        for index, place in (content.storage_data or {}).items():
            part = _part(index, content.state_dict_metadata.get(index.fqn), place)
            parts.setdefault(index.fqn, []).append(part)
    for key in sorted(entries.keys() | parts.keys()):
        entry, shape, dtype = entries.get(key), None, None
        if isinstance(entry, TensorStorageMetadata):
            shape, dtype = tuple(entry.size), _dtype(entry)
        yield StoredKey(key, shape, dtype, tuple(parts.get(key, ())))


def _dtype(entry: TensorStorageMetadata) -> str:
    return str(entry.properties.dtype).removeprefix("torch.")


def _part(index: MetadataIndex, entry: Any, place: Any) -> StoredPart:
    chunk = chunk_of(entry, index)
    return StoredPart(
        offsets=() if chunk is None else tuple(chunk.offsets),
        sizes=() if chunk is None else tuple(chunk.sizes),
        dtype=None if chunk is None else _dtype(entry),
        is_object=not isinstance(entry, TensorStorageMetadata),
        file=place.relative_path,
        start=place.offset,
        nbytes=place.length,
        # torch before 2.7 writes no transform_descriptors.
        descriptors=tuple(getattr(place, "transform_descriptors", None) or ()),
    )


def _files(
    keys: Iterable[StoredKey], sizes: Mapping[str, int | None], location: Location
) -> Iterator[StoredFile]:
    needed: dict[str, tuple[int, int]] = {}
    for key in keys:
        for part in key.parts:
            most, number = needed.get(part.file, (0, 0))
            needed[part.file] = max(most, part.stop), number + 1
    for name, (most, number) in sorted(needed.items()):
        exists, nbytes = size_of(location, name, sizes)
        yield StoredFile(name, nbytes, most, number, "shard", exists)


def _findings(
    metadata: Mapping[str, MetadataFile], keys: Iterable[StoredKey], files: Iterable[StoredFile]
) -> Iterator[Finding]:
    if not metadata:
        yield Finding("", "", f"there is no {_metadata.METADATA_NAME}")
    for file in files:
        if not file.exists:
            yield Finding(file.name, "", f"missing: {_named(file, keys)} should be in it")
        elif file.nbytes is not None and file.nbytes < file.needed_bytes:
            text = f"cut off: expected {file.needed_bytes} bytes, found {file.nbytes}"
            yield Finding(file.name, "", text)
    chunks: dict[str, set[tuple[int, ...]]] = {}
    for content, *_ in metadata.values():
        for name, entry in content.state_dict_metadata.items():
            found = {tuple(chunk.offsets) for chunk in getattr(entry, "chunks", ())}
            chunks.setdefault(name, set()).update(found)
    for key in keys:
        unplaced = chunks.get(key.key, set()) - {part.offsets for part in key.parts}
        if not key.parts and not unplaced and key.shape is None:
            yield Finding("", key.key, "the metadata does not say where it is stored")
        for offsets in sorted(unplaced):
            text = f"the metadata does not say where its chunk at {list(offsets)} is stored"
            yield Finding("", key.key, text)


def _named(file: StoredFile, keys: Iterable[StoredKey]) -> str:
    """The first of the keys that lie in a file, and how many more."""
    named = [key.key for key in keys if any(part.file == file.name for part in key.parts)]
    more = len(named) - _MAX_NAMED_KEYS
    text = ", ".join(map(repr, named[:_MAX_NAMED_KEYS]))
    return f"{text} and {more} keys more" if more > 0 else text
