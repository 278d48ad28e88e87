"""What has to be known of an fsspec filesystem beyond its interface.

Runs in: both. Torch-free, and imports no filesystem but the local one: the others are told by
the names of their classes, so that a worker starts with what its job needs and nothing else.

    publishing(fs)   how a complete file gets its name
    --------------   ---------------------------------
    "local"          temporary name beside it, rename(2)
    "rename"         temporary name beside it, the filesystem's own atomic rename (SFTP)
    "commit"         open(autocommit=False), commit() or discard() (s3fs, gcsfs)
    "close"          nothing is visible before close() (adlfs)
    "move"           temporary name beside it, whatever move there is
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations, register_implementation, registry
from fsspec.spec import AbstractFileSystem

from mpwriter._credentials import Crossing

__all__ = [
    "attributes_of",
    "forget_in_transaction",
    "forget_listings",
    "has_directories",
    "is_local",
    "make_known",
    "own_move",
    "pickled_filesystem",
    "pickled_kind",
    "present",
    "protocol_of",
    "publishing",
    "refusal",
    "remove_file",
    "unwrap",
    "warn_unless_atomic",
]

_logger = logging.getLogger(__name__)

# (first part of the module, class) of filesystems and of what their subclasses inherit.
_PUBLISHING = {
    # Source: S3File.commit/discard and GCSFile.commit/discard; both keep an upload that nobody
    # sees and can be thrown away. autocommit=False elsewhere is a file in a temp folder (local),
    # in the server's /tmp (sftp), or is ignored (adlfs).
    ("s3fs", "S3FileSystem"): "commit",
    ("gcsfs", "GCSFileSystem"): "commit",
    # Source: AzureBlobFile._async_upload_chunk stages blocks; commit_block_list in close() makes
    # the blob, and blocks never committed are dropped by the service. A move is a copy that may
    # still run when the source is removed, so the final name is written to.
    ("adlfs", "AzureBlobFileSystem"): "close",
    # Source: SFTPFileSystem.mv and SSHFileSystem._mv call posix-rename@openssh.com.
    ("fsspec", "SFTPFileSystem"): "rename",
    ("sshfs", "SSHFileSystem"): "rename",
}
# Nothing but keys: a directory is not made, and makedirs would make a bucket.
_KEYS_ONLY = {
    ("s3fs", "S3FileSystem"),
    ("gcsfs", "GCSFileSystem"),
    ("adlfs", "AzureBlobFileSystem"),
    ("ossfs", "OSSFileSystem"),
}

_warned: set[str] = set()
_warned_lock = threading.Lock()


def _lineage(fs: Any) -> list[tuple[str, str]]:
    return [(base.__module__.partition(".")[0], base.__name__) for base in type(fs).__mro__]


def attributes_of(fs: Any) -> dict[str, Any]:
    """The instance's own attributes.

    fsspec's caching filesystems answer `fs.__dict__` with that of the filesystem they wrap.
    """
    try:
        attributes: dict[str, Any] = object.__getattribute__(fs, "__dict__")
    except AttributeError:
        return {}
    return attributes


def is_local(fs: Any) -> bool:
    """Whether paths of `fs` are paths of this machine that os.replace and os.fsync take."""
    return isinstance(fs, LocalFileSystem)


def publishing(fs: Any) -> str:
    """Which row of the table above holds for `fs`.

    A filesystem class that mpwriter does not know can say so itself, by a class attribute
    `mpwriter_publishing` with one of those words.
    """
    declared = getattr(type(fs), "mpwriter_publishing", None)
    if isinstance(declared, str):
        return declared
    if is_local(fs):
        return "local"
    for base in _lineage(fs):
        if base in _PUBLISHING:
            return _PUBLISHING[base]
    return "move"


def has_directories(fs: Any) -> bool:
    """False where names are only keys of a bucket."""
    return _KEYS_ONLY.isdisjoint(_lineage(fs))


def protocol_of(fs: Any) -> str:
    """The first name of the filesystem's protocol."""
    protocol = type(fs).protocol
    return str(protocol if isinstance(protocol, str) else protocol[0])


def own_move(fs: Any) -> bool:
    """Whether `fs.mv` is more than fsspec's copy and delete (which also expands `*` and `[x]`)."""
    return getattr(type(fs), "mv", None) not in (AbstractFileSystem.mv, None)


def unwrap(fs: Any, path: str) -> tuple[Any, str]:
    """See through the wrappers that only rename paths or cache reads.

    Args:
        fs: any fsspec filesystem.
        path: as `fs` names it.

    Returns:
        The filesystem beneath dir:: and the caching ones, and the path as that one names it. A
        read cache is left out on purpose: it would give the `.metadata` of an earlier save.

    Raises:
        ValueError: a caching filesystem that also compresses.
    """
    while True:
        if type(fs).__name__ == "DirFileSystem" and type(fs).__module__.startswith("fsspec."):
            path = fs._join(path)
        elif ("fsspec", "CachingFileSystem") in _lineage(fs):
            if attributes_of(fs).get("compression"):
                raise ValueError(
                    f"{protocol_of(fs)}:: with compression= is not supported for checkpoints"
                )
        else:
            return fs, path
        fs = attributes_of(fs)["fs"]


def remove_file(fs: Any, path: str) -> None:
    """Remove one file, `path` taken literally (fs.rm would expand `*` and `[x]`).

    Raises:
        FileNotFoundError: there is none.
        OSError: as the filesystem has it.
    """
    try:
        fs.rm_file(path)
    except NotImplementedError:  # webhdfs and others have only rm
        fs.rm(path)


def refusal(fs: Any) -> str | None:
    """Say why a worker process cannot serve `fs`, or give None.

    Args:
        fs: as `locate` gives it.

    Returns:
        The reason, fit to follow "writing in the trainer, because".

    Raises:
        Nothing.
    """
    wrapped = fs
    while wrapped is not None:
        if ("fsspec", "MemoryFileSystem") in _lineage(wrapped):
            return "memory:// lives in the memory of one process"
        if ("fsspec", "AbstractArchiveFileSystem") in _lineage(wrapped):
            return f"an archive ({protocol_of(wrapped)}://) is written by one process"
        wrapped = attributes_of(wrapped).get("fs")
    try:
        pickled = pickled_filesystem(fs)
    except Exception as exc:
        return f"the {protocol_of(fs)} filesystem cannot be pickled: {type(exc).__name__}: {exc}"
    if b"__main__" in pickled:
        # A worker never imports the user's __main__: it may have no import guard.
        return f"{type(fs).__qualname__} or one of its storage options is defined in __main__"
    return None


def pickled_filesystem(fs: Any) -> bytes:
    """Pickle `fs` for `StartJob.filesystem`. Holds credentials: never logged.

    Raises:
        Exception: whatever pickling it raises; `refusal` says it in words.
    """
    return pickle.dumps(Crossing(fs))


def pickled_kind(fs: Any) -> bytes | None:
    """The filesystem's class for `make_known`; None where it cannot be sent."""
    try:
        return pickle.dumps(type(fs))
    except Exception:
        return None


def make_known(kind: bytes) -> None:
    """In another process: register a class that the user's program has registered in its own.

    Importing its module may have done that already, and a protocol that is known stays as it is.
    """
    try:
        loaded = pickle.loads(kind)
    except Exception as exc:
        _logger.debug("a filesystem's class is not to be had here: %s", exc)
        return
    protocols = loaded.protocol
    for protocol in (protocols,) if isinstance(protocols, str) else protocols:
        if protocol not in known_implementations and protocol not in registry:
            register_implementation(protocol, loaded)


def warn_unless_atomic(fs: Any) -> None:
    """Log one warning for each protocol where a crash can leave a file half moved.

    For the trainer, before the first file; the workers stay silent. Thread-safe.
    """
    if publishing(fs) != "move" or ("fsspec", "MemoryFileSystem") in _lineage(fs):
        return
    protocol = protocol_of(fs)
    with _warned_lock:
        if protocol in _warned:
            return
        _warned.add(protocol)
    _logger.warning(
        "%s://: no atomic rename is known for this filesystem. Files are written under a temporary"
        " name and moved; a crash within the move of .metadata can lose the checkpoint in that"
        " directory.",
        protocol,
    )


def forget_in_transaction(fs: Any, file: Any) -> None:
    """Take `file` out of the list that `fs.open(..., autocommit=False)` put it on.

    fsspec keeps it there for the next transaction of that filesystem to commit: a leak, and a
    second commit of a file that was discarded.
    Source: AbstractFileSystem.open, `self.transaction.files.append(f)`.
    """
    files = getattr(getattr(fs, "_transaction", None), "files", None)
    for _ in range(100):
        try:
            files.remove(file)  # type: ignore[union-attr]
        except (IndexError, RuntimeError):
            continue  # another thread changed the deque meanwhile
        except (ValueError, AttributeError):
            pass
        return


def forget_listings(fs: Any, path: str) -> None:
    """Let `fs` ask its storage about `path` again, whatever listings it keeps. Never raises.

    The one that tells of a file is that of its directory. adlfs forgets what it is told to and no
    more, so that a `.metadata` which another process has replaced keeps its old length.
    Source: AzureBlobFileSystem.invalidate_cache; s3fs and gcsfs go up to the bucket by themselves.
    """
    for listed in (path, path.rstrip("/").rpartition("/")[0]):
        if listed:
            with contextlib.suppress(Exception):
                fs.invalidate_cache(listed)


def present(fs: Any, path: str) -> bool:
    """Whether something has this name, never from a listing cache; False also on an error."""
    forget_listings(fs, path)
    try:
        fs.info(path)
    except Exception:
        return False
    return True
