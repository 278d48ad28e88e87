"""The files of a checkpoint's directory, and the metadata among them.

Runs in: trainer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata

from mpwriter import _metadata
from mpwriter._faults import as_storage_error, is_absence
from mpwriter._fetch_file import retried
from mpwriter._filesystems import forget_listings
from mpwriter._leftovers import is_of_a_save, is_shard_of_save
from mpwriter._publish import is_temporary_name
from mpwriter._reader_absence import explain_absence
from mpwriter._storage import Location, read_file
from mpwriter.errors import IncompleteCheckpointError

__all__ = ["MetadataFile", "kind_of", "listed", "read_metadata", "size_of"]

_RANK_METADATA = re.compile(r"__\d+\.metadata")
_STOCK_SHARD = re.compile(r"__\d+_\d+\.(distcp|safetensors)")
_RETRIES = 3


class MetadataFile(NamedTuple):
    """One metadata file that was read.

    Attributes:
        nbytes: of the file.
        has_checksum: whether it ends in our trailer, whose CRC then was right.
    """

    content: Metadata
    nbytes: int
    has_checksum: bool


def listed(location: Location) -> dict[str, int | None]:
    """Names and sizes of the files right in the directory; None where a size is not known.

    Raises:
        IncompleteCheckpointError: there is no such directory.
        StorageError: it cannot be listed.
    """
    fs, root = location.fs, location.root
    forget_listings(fs, root)
    try:
        entries = fs.ls(root, detail=True)
    except Exception as error:
        if is_absence(error):
            raise explain_absence(location, _metadata.METADATA_NAME) from error
        raise as_storage_error(error, "list", location.display, fs) from error
    found: dict[str, int | None] = {}
    for entry in entries:
        name = str(entry["name"]).rstrip("/")
        # A pipe or a device is none: to open one may wait for ever.
        if entry.get("type", "file") == "file" and name.strip("/") != root.strip("/"):
            found[name.rsplit("/", 1)[-1]] = _as_size(entry.get("size"))
    return dict(sorted(found.items()))


def size_of(
    location: Location, name: str, sizes: Mapping[str, int | None]
) -> tuple[bool, int | None]:
    """Whether there is a file of that name, and its size as far as it is known."""
    size = sizes.get(name)
    if size is not None or (name not in sizes and "/" not in name):
        return name in sizes, size
    # In a directory below, or listed without its size.
    try:
        return True, _as_size(location.fs.info(location.child(name)).get("size"))
    except Exception as error:
        return name in sizes or not is_absence(error), None


def _as_size(value: Any) -> int | None:
    return value if type(value) is int else None


def read_metadata(location: Location, sizes: Mapping[str, int | None]) -> dict[str, MetadataFile]:
    """The common metadata, or those of single ranks where there is none.

    Args:
        location: of the checkpoint.
        sizes: of the files in it.

    Raises:
        CorruptCheckpointError: damaged; StorageError: cannot be read.
    """
    names = [_metadata.METADATA_NAME]
    if _metadata.METADATA_NAME not in sizes:
        names = [name for name in sizes if _RANK_METADATA.fullmatch(name)]
    return {name: _read_one(location, name) for name in names}


def _read_one(location: Location, name: str) -> MetadataFile:
    path = f"{location.display}/{name}"
    raw = retried(
        lambda: read_file(location.fs, location.child(name)),
        path=path,
        fs=location.fs,
        retries=_RETRIES,
        missing=lambda: IncompleteCheckpointError(f"{path} has just gone", path=path),
    )
    metadata = _metadata.loads(raw, path)
    return MetadataFile(metadata, len(raw), _metadata.has_trailer(raw))


def kind_of(name: str) -> str:
    """What a file that no metadata names seems to be."""
    if is_temporary_name(name):
        return "temporary file"
    if is_shard_of_save(name) or _STOCK_SHARD.fullmatch(name):
        return "shard of another save"
    if is_of_a_save(name):
        return "metadata"
    return "other"
