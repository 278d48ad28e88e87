"""Why there is no checkpoint where one was expected, and how DCP is told so.

Runs in: trainer.

DCP's loader takes any error of `read_metadata()` for "saved without collectives", asks for the
rank's own metadata, and when that fails too raises an AssertionError. So the second answer is an
object that looks like metadata and raises the true error at whatever is done with it: in
`set_up_storage_reader`, or before, in a planner that looks into it. Both run where DCP sends a
rank's error to all ranks. torch 2.7 asks once and lets the error through.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from mpwriter._compat import HAS_RANK_METADATA
from mpwriter._faults import error_record
from mpwriter._storage import Location, is_temporary_name
from mpwriter.errors import IncompleteCheckpointError, MPWriterError

__all__ = ["UnreadableMetadata", "explain_absence", "renewed"]

_RANK_METADATA = re.compile(r"__\d+\.metadata")
_WHO_LOADS_IT = (
    "and each rank can load what it has saved itself"
    if HAS_RANK_METADATA
    else "which this torch cannot load"
)
_SHARD = re.compile(r"__\d+_\d+.*\.(distcp|safetensors)")


def renewed(error: MPWriterError) -> MPWriterError:
    """Make an equal error without traceback: one that is kept must not keep frames alive."""
    rebuild, arguments = error.__reduce__()[:2]
    return rebuild(*arguments)  # type: ignore[no-any-return]


class UnreadableMetadata(Metadata):
    """Stands for metadata that could not be read; its fields raise why."""

    _FIELDS = frozenset(Metadata.__dataclass_fields__)

    def __init__(self, error: MPWriterError) -> None:
        self._error = renewed(error)

    def __getattribute__(self, name: str) -> Any:
        if name in UnreadableMetadata._FIELDS:
            raise self.error()
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        return f"<unreadable metadata: {self._error}>"

    def error(self) -> MPWriterError:
        """Make the error to raise, a new one each time."""
        return renewed(self._error)


def explain_absence(location: Location, name: str) -> IncompleteCheckpointError:
    """Look around and say why the metadata file `name` is not there. Never raises.

    Thread safety: any thread.
    """
    path = f"{location.display}/{name}"
    return IncompleteCheckpointError(
        f"no complete checkpoint at {location.display}: {_reason(location, name)}", path=path
    )


def _reason(location: Location, name: str) -> str:
    try:
        with contextlib.suppress(NotImplementedError):
            location.fs.invalidate_cache(location.root)
        entries = _entries(location)
    except (FileNotFoundError, NotADirectoryError):
        return "there is no such directory"
    except Exception as error:  # listing may be forbidden where reading is allowed
        record = error_record(error, location.display, fs=location.fs)
        return f"there is no {name} (its directory cannot be listed: {record.text})"
    if entries is None:
        return "that is a file, not a directory"
    if not entries:
        return "the directory is empty"
    if entries.get(name) == "directory":
        return f"{name} is a directory, not a file"
    return _reason_by_names(set(entries), name)


def _entries(location: Location) -> dict[str, str] | None:
    """Names in the directory with their types; None where it is a file."""
    listed = location.fs.ls(location.root, detail=True)
    root = location.root.strip("/")
    if len(listed) == 1 and listed[0]["name"].strip("/") == root and listed[0]["type"] == "file":
        return None
    names = {entry["name"].rstrip("/"): str(entry.get("type")) for entry in listed}
    # An object store may list the prefix itself, as an empty object.
    return {n.rsplit("/", 1)[-1]: kind for n, kind in names.items() if n.strip("/") != root}


def _reason_by_names(names: set[str], name: str) -> str:
    shards = sum(bool(_SHARD.fullmatch(n)) for n in names)
    temporary = sorted(n for n in names if _is_temporary_metadata(n))
    of_ranks = sorted(n for n in names if _RANK_METADATA.fullmatch(n))
    if of_ranks and name not in of_ranks:
        return (
            f"there is no {name}, but {len(of_ranks)} files of single ranks ({of_ranks[0]}...): it "
            f"was saved with use_collectives=False, {_WHO_LOADS_IT}"
        )
    if temporary:
        return (
            f"there is no {name}, only {temporary[0]} and {shards} shard files: the save was "
            "interrupted, or is not done yet"
        )
    if shards:
        return (
            f"there are {shards} shard files but no {name}: the save was interrupted, or is not "
            "done yet"
        )
    return f"there is no {name} among its {len(names)} entries"


def _is_temporary_metadata(name: str) -> bool:
    return "metadata" in name and (name.endswith(".metadata.tmp") or is_temporary_name(name))
