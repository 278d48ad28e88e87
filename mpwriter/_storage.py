"""Places: from a URL to a filesystem and a path, and what is there.

Runs in: both. Torch-free. Other modules take everything about storage from here; the writing of
files is in `mpwriter._sink`, what an exception means in `mpwriter._faults`.
"""

from __future__ import annotations

import errno
import inspect
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs
from fsspec.registry import available_protocols, get_filesystem_class

from mpwriter._credentials import renew_client
from mpwriter._faults import (
    as_storage_error,
    error_record,
    is_absence,
    is_transient,
    stale_shard_names,
)
from mpwriter._filesystems import (
    forget_listings,
    has_directories,
    is_local,
    pickled_filesystem,
    protocol_of,
    refusal,
    remove_file,
    unwrap,
    warn_unless_atomic,
)
from mpwriter._publish import is_temporary_name, sync_directory, temporary_name
from mpwriter._sink import Sink, open_sink, write_file

__all__ = [
    "Location",
    "Sink",
    "as_storage_error",
    "error_record",
    "file_exists",
    "is_temporary_name",
    "is_transient",
    "locate",
    "make_directories",
    "open_sink",
    "pickled_filesystem",
    "read_file",
    "refusal",
    "remove_files",
    "stale_shard_names",
    "sync_directory",
    "temporary_name",
    "warn_unless_atomic",
    "write_file",
]

# How long a directory that another process made may stay invisible (attribute caches of NFS,
# virtiofs: 3 s by default).
_VISIBLE_S = 5.0
_VISIBLE_POLL_S = 0.05

# A URL whose second slash is gone: str(Path("s3://b/x")) is "s3:/b/x".
_FOLDED_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):/(?!/)")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
# Their "user" is the container: abfs://container@account.dfs.core.windows.net/path.
_CONTAINER_SCHEMES = frozenset({"abfs", "abfss", "az", "wasb", "wasbs"})

_COLONS = "__mpwriter_colons__"
# Of these, "?" and "#" belong to the path; fsspec would make options of what follows them.
# Source: fsspec.utils.infer_storage_options, as used by SFTPFileSystem._get_kwargs_from_urls.
_PATH_SCHEMES = frozenset({"sftp", "ssh"})
_LITERALS = {"?": "__mpwriter_question__", "#": "__mpwriter_hash__"}


@dataclass(frozen=True)
class Location:
    """A directory, or a prefix of keys, on a filesystem.

    Attributes:
        fs: the fsspec filesystem, without dir:: and caches around it.
        root: the directory as `fs` names it, absolute, without a slash at the end.
        display: the same for people: without user info, password or query.
    """

    fs: Any
    root: str
    display: str

    def child(self, name: str) -> str:
        """Path of the file `name`, as `fs` names it."""
        return f"{self.root.rstrip('/')}/{name}"


def locate(
    path: str | os.PathLike[str], options: Mapping[str, Any], *, writable: bool = False
) -> Location:
    """Find the filesystem of a path or URL. Touches no file.

    Args:
        path: local path (`~` is the home directory, a relative one counts from the working
            directory of this moment), or any fsspec URL, chained ones included. A local path is
            taken literally: `#`, `%20`, `[x]` and `::` have no meaning in it.
        options: storage options for the filesystem.
        writable: refuse filesystems that cannot be written to file by file.

    Returns:
        The Location.

    Raises:
        TypeError: `path` is neither a string nor a path.
        ValueError: an empty path, a URL that pathlib has folded, an unknown protocol, or an
            archive where `writable`.
        ImportError: the package of that filesystem is not installed.
    """
    text = _as_text(path)
    fs, root = _resolve(text, dict(options))
    if getattr(fs, "asynchronous", False):
        raise ValueError("a filesystem with asynchronous=True cannot be used from here")
    fs, root = unwrap(fs, root)
    if writable and "AbstractArchiveFileSystem" in {base.__name__ for base in type(fs).__mro__}:
        raise ValueError(
            f"{protocol_of(fs)}:// holds many files in one archive, which cannot be written by"
            " several processes or replaced atomically; save to a directory"
        )
    root = (root.rstrip("/") or "/") if root else root
    renew_client(fs)
    return Location(fs, root, root if is_local(fs) else _display(text))


def _as_text(path: Any) -> str:
    if isinstance(path, (str, bytes, os.PathLike)):
        text = os.fsdecode(path)
    elif hasattr(path, "storage_options") and hasattr(path, "protocol"):
        text = str(path)  # universal_pathlib.UPath, which is no PathLike unless it is local
    else:
        raise TypeError(f"path must be str or os.PathLike, not {type(path).__name__}")
    if not text:
        raise ValueError("path is empty")
    for part in text.split("::"):
        folded = _FOLDED_URL.match(part)
        if folded is None or folded[1] in ("file", "local") or os.path.isdir(f"{folded[1]}:"):
            continue
        if not isinstance(path, (str, bytes)) or folded[1] in available_protocols():
            raise ValueError(
                f"{text!r} is a URL that has lost a slash, as pathlib.Path does to it; pass"
                f" {folded[1]}://... as a str"
            )
    return text


def _resolve(text: str, options: dict[str, Any]) -> tuple[Any, str]:
    scheme = _SCHEME.match(text)
    if scheme is not None and scheme[1] in _PATH_SCHEMES and "::" not in text:
        for character, name in _LITERALS.items():
            text = text.replace(character, name)
        fs, root = url_to_fs(text, **options)
        root = str(root)
        for character, name in _LITERALS.items():
            root = root.replace(name, character)
        return fs, root
    if "::" not in text or _is_chain(text):
        fs, root = url_to_fs(text, **options)
        return fs, str(root)
    # fsspec would take any "::" for the link of a chain and use what stands before it.
    fs, root = url_to_fs(text.replace("::", _COLONS), **options)
    return fs, str(root).replace(_COLONS, "::")


def _is_chain(text: str) -> bool:
    """Whether the first part of `text` names a filesystem that is layered over another."""
    protocol = text.split("::", 1)[0].split("://", 1)[0]
    if protocol not in available_protocols():
        return False
    for base in get_filesystem_class(protocol).__mro__:
        if base.__name__ == "ChainedFileSystem":
            return True
        if base is not object and {"fo", "target_protocol"} & set(
            inspect.signature(base.__init__).parameters
        ):
            return True
    return False


def _display(text: str) -> str:
    parts = []
    for part in text.split("::"):
        scheme = _SCHEME.match(part)
        if scheme is not None:
            user, at, rest = part[scheme.end() :].partition("@")
            if at and "/" not in user:
                keep = scheme[1] in _CONTAINER_SCHEMES
                part = scheme[0] + (user.partition(":")[0] + "@" if keep else "") + rest
            if scheme[1] not in _PATH_SCHEMES:
                part = part.partition("?")[0]
        parts.append(part)
    return "::".join(parts).rstrip("/")


def file_exists(fs: Any, path: str) -> bool:
    """Whether `path` is a file; a directory of that name is none.

    Asks the storage, never a listing cache, and not fs.exists, which takes every error for "no".

    Raises:
        OSError: it cannot be known (no permission, no connection).
    """
    fs, path = unwrap(fs, path)
    forget_listings(fs, path)
    kind = _kind(fs, path)
    return kind is not None and kind != "directory"


def _kind(fs: Any, path: str) -> str | None:
    """The `type` of fsspec's info; None where there is nothing."""
    try:
        return str(fs.info(path).get("type", "file"))
    except Exception as exc:
        if is_absence(exc):
            return None
        raise


def read_file(fs: Any, path: str) -> bytes:
    """Read a whole file as it is now, not as a listing cache remembers it.

    Raises:
        FileNotFoundError: there is none.
        OSError: as the filesystem has it.
    """
    fs, path = unwrap(fs, path)
    forget_listings(fs, path)
    try:
        at_once = _read_at_once(fs, path)
        if at_once is not None:
            return at_once
        with fs.open(path, "rb") as file:
            return bytes(file.read())
    except Exception as exc:
        if is_absence(exc) and not isinstance(exc, OSError):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from exc
        raise


def _read_at_once(fs: Any, path: str) -> bytes | None:
    """The file by one request, where opening it takes two or three; None where that does not work.

    s3fs would also list what may not be listed, to be told that a key is missing.
    """
    if not isinstance(fs, AsyncFileSystem) or type(fs)._cat_file is AsyncFileSystem._cat_file:
        return None
    try:
        # From 0: without a range s3fs asks for the size first.
        return bytes(fs.cat_file(path, start=0))
    except (FileNotFoundError, PermissionError):
        raise
    except Exception:  # an empty file has no range; anything else comes again when it is opened
        return None


def make_directories(location: Location, *, sync_files: bool = False) -> None:
    """Make the directory of a location, with its parents; no matter who else does so.

    On object stores nothing is done: there are no directories, and a missing bucket is an error
    to report, not to repair.

    Args:
        location: where.
        sync_files: make the directory durable, on a local disk.

    Raises:
        NotADirectoryError: a file is in the way.
        OSError: as the filesystem has it.
    """
    fs, root = location.fs, location.root
    if not has_directories(fs):
        return
    durable = sync_files and is_local(fs)
    # One by one, so that a process that is killed leaves at most one name that is not durable. The
    # first is there already: whoever made it may not have come to the sync, or not know of any.
    for directory in _from_the_first_that_is_there(root) if durable else [root]:
        if directory == root or not os.path.isdir(directory):
            _make_directory(fs, directory)
        if durable:
            sync_directory(os.path.dirname(directory))


def _make_directory(fs: Any, path: str) -> None:
    try:
        fs.makedirs(path, exist_ok=True)
    except NotImplementedError:
        return
    except FileExistsError:
        # NFS, Lustre and others say so to all but one of the processes that make it at the same
        # time, and may not show it to them for a while.
        if not _wait_for_directory(fs, path):
            raise
    if _kind(fs, path) == "file":
        raise NotADirectoryError(errno.ENOTDIR, "a file is in the way of the directory", path)


def _from_the_first_that_is_there(path: str) -> list[str]:
    """The lowest existing directory of a path, and those that are missing below it."""
    found = [path]
    while not os.path.isdir(found[0]) and found[0] != os.path.dirname(found[0]):
        found.insert(0, os.path.dirname(found[0]))
    return found


def _wait_for_directory(fs: Any, path: str) -> bool:
    """Wait until something is seen at `path`; a file there is the caller's to refuse."""
    deadline_s = time.monotonic() + _VISIBLE_S
    while _kind(fs, path) is None:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_VISIBLE_POLL_S)
        forget_listings(fs, path)
    return True


def remove_files(location: Location, names: Iterable[str]) -> list[str]:
    """Remove files of a directory, as far as possible.

    Args:
        location: the directory.
        names: of files in it, taken literally. One that is not there counts as removed.

    Returns:
        The names that could not be removed.

    Raises:
        Nothing: a left-over file never fails a save.
    """
    kept = []
    for name in names:
        try:
            remove_file(location.fs, location.child(name))
        except Exception as exc:
            if not is_absence(exc):
                kept.append(name)
    return kept
