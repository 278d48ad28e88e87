"""What killed saves have left in a checkpoint's directory: found, told from the living, removed.

Runs in: both. Torch-free.

    left-over                             removed by the next commit in that directory
    --------------------------------      --------------------------------------------
    temporary file, local filesystem      at once: whoever writes one holds a lock on it (flock),
                                          which ends with its process
    temporary file, elsewhere, where      once it is older than LEFTOVER_AGE_S
    there are no locks, or of another
    rank where each commits on its own
    shard that no metadata file names     once it is older than LEFTOVER_AGE_S: the save it
                                          belongs to may be waiting for its other ranks
    metadata that a rank committed on     at once, with its shards, by a commit of all ranks: every
    its own                               load finds theirs instead

    writer                                sweeper
    ------                                -------
    open the temporary file               open it, lock it (or leave it: somebody is alive)
    lock it                               remove it, while locked
    still the file of that name?          unlock
      no: it was swept; open it again

Ranks that commit on their own are at work at the same time, maybe on machines that do not see each
other's locks (BeeGFS, FUSE and others keep flock to one machine). Only names that this package
makes are looked at.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

from mpwriter._faults import stale_shard_names
from mpwriter._filesystems import is_local, remove_file

__all__ = ["LEFTOVER_AGE_S", "Hold", "is_of_a_save", "is_shard_of_save", "sweep"]

_logger = logging.getLogger(__name__)

# A day: longer than any rank waits for the others (timeout_s bounds that), and than clocks differ.
LEFTOVER_AGE_S = 24 * 3600.0

# A sweeper has a file locked for the time of one unlink. What holds it longer is the stuck writer
# of an earlier try, which nothing can be done about.
_LOCK_TRIES = 20
_LOCK_PAUSE_S = 0.005

_TOKEN = "[0-9a-f]{8}"
_SHARD = rf"__\d+_\d+\.{_TOKEN}\.(?:distcp|safetensors)"
_RANK_METADATA = r"__\d+\.metadata"
_METADATA = rf"(?:\.metadata|{_RANK_METADATA})"
_SHARD_NAME = re.compile(_SHARD)
_METADATA_NAME = re.compile(_METADATA)
_RANK_METADATA_NAME = re.compile(_RANK_METADATA)
# See `temporary_name`. What was moved aside (".tmp.old") may be the last copy: never removed.
_TEMPORARY_NAME = re.compile(rf"\.(?:metadata|__\d+\.metadata|{_SHARD})\.{_TOKEN}\.tmp")

# Where fsspec's filesystems put the time of the last change.
_TIME_KEYS = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


def is_shard_of_save(name: str) -> bool:
    """Whether `name` is a shard's, with the save's id in it: no other save writes a file of it."""
    return _SHARD_NAME.fullmatch(name) is not None


def is_of_a_save(name: str) -> bool:
    """The same, or that of a metadata file."""
    return is_shard_of_save(name) or _METADATA_NAME.fullmatch(name) is not None


class Hold:
    """Marks a local temporary file as in use for as long as this process lives, or to `release`.

    A lock of its own, not of the file object that writes: that one is closed before the rename.
    """

    def __init__(self) -> None:
        self._fd = -1

    def take(self, path: str, file: Any) -> bool:
        """Lock a file that was just opened for writing.

        Args:
            path: of the file.
            file: the file object. Some make their file only when they are closed.

        Returns:
            False where it has been swept meanwhile: it must be opened again.

        Raises:
            Nothing: where there are no locks, the sweeper goes by age.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return not _has_no_name(file)
        except OSError:
            return True
        self._fd = fd
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOCK_PAUSE_S)
            except OSError:
                break
        with contextlib.suppress(OSError):
            if os.fstat(fd).st_nlink == 0:
                self.release()
                return False
        return True

    def release(self) -> None:
        """Let go. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.release()


def _has_no_name(file: Any) -> bool:
    try:
        return os.fstat(file.fileno()).st_nlink == 0
    except Exception:
        return False


def sweep(
    fs: Any,
    root: str,
    named: Iterable[str],
    *,
    rank: int | None = None,
    now_s: float | None = None,
) -> list[str]:
    """Remove what earlier saves left in a directory. See above for what and when.

    Args:
        fs: the filesystem.
        root: the checkpoint's directory.
        named: shards of the checkpoint that was just committed.
        rank: that has committed on its own; None: all of them together.
        now_s: seconds since 1970; None: by this machine's clock.

    Returns:
        The names of the files that were removed.

    Raises:
        Nothing: where listing is not allowed nothing is removed.
    """
    try:
        with contextlib.suppress(NotImplementedError):
            fs.invalidate_cache(root)
        entries = {_name(entry): entry for entry in fs.ls(root, detail=True)}
        now_s = time.time() if now_s is None else now_s
        orphans = _orphans(fs, root, entries, set(named), now_s)
    except Exception as exc:
        _logger.debug("what earlier saves left in %s cannot be listed: %s", root, exc)
        return []
    removed = [name for name in orphans if _removed(fs, f"{root}/{name}")]
    if rank is None:
        removed += _remove_superseded(fs, root, entries, set(named))
    own = (".",) if rank is None else (f".__{rank}_", f".__{rank}.")
    for name, entry in entries.items():
        if _TEMPORARY_NAME.fullmatch(name) and _is_file(entry):
            due = name.startswith(own) or _is_old(entry, now_s)
            if due and _removed_if_abandoned(fs, f"{root}/{name}", entry, now_s):
                removed.append(name)
    return removed


def _orphans(
    fs: Any, root: str, entries: Mapping[str, Mapping[str, Any]], named: set[str], now_s: float
) -> list[str]:
    """Old shards that no metadata file in the directory names."""
    old = [
        name
        for name, entry in entries.items()
        if _SHARD_NAME.fullmatch(name) and name not in named and _is_old(entry, now_s)
    ]
    if not old:
        return []
    for name in entries:
        if _METADATA_NAME.fullmatch(name):  # of all ranks, or of one saved on its own
            named |= stale_shard_names(fs.cat_file(f"{root}/{name}"))
    return [name for name in old if name not in named]


def _remove_superseded(
    fs: Any, root: str, entries: Mapping[str, Mapping[str, Any]], named: set[str]
) -> list[str]:
    """Remove the checkpoints of single ranks; the metadata last, so that a rest can be found."""
    removed: list[str] = []
    for name, entry in entries.items():
        if not _RANK_METADATA_NAME.fullmatch(name) or not _is_file(entry):
            continue
        try:
            shards = stale_shard_names(fs.cat_file(f"{root}/{name}"))
        except Exception as exc:
            _logger.debug("%s/%s cannot be read, and stays: %s", root, name, exc)
            continue
        if not shards:  # it may be anything
            continue
        present = [shard for shard in sorted(shards - named) if shard in entries]
        gone = [shard for shard in present if _removed(fs, f"{root}/{shard}")]
        removed += gone
        if gone == present and _removed(fs, f"{root}/{name}"):
            removed.append(name)
    return removed


def _removed_if_abandoned(fs: Any, path: str, entry: Mapping[str, Any], now_s: float) -> bool:
    """Remove a temporary file that nobody writes any more; a local one while it is locked."""
    if not is_local(fs):
        return _is_old(entry, now_s) and _removed(fs, path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        abandoned = True
    except BlockingIOError:
        abandoned = False
    except OSError:  # no locks here
        abandoned = _is_old(entry, now_s)
    try:
        return abandoned and _removed(fs, path)
    finally:
        os.close(fd)


def _removed(fs: Any, path: str) -> bool:
    try:
        remove_file(fs, path)
    except FileNotFoundError:
        return True
    except Exception as exc:
        _logger.debug("%s of an earlier save cannot be removed: %s", path, exc)
        return False
    return True


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


def _is_file(entry: Mapping[str, Any]) -> bool:
    return entry.get("type", "file") == "file" and not entry.get("islink", False)


def _is_old(entry: Mapping[str, Any], now_s: float) -> bool:
    """Whether a file was last changed more than LEFTOVER_AGE_S ago; no where it is not known."""
    changed_s = _changed_s(entry)
    return _is_file(entry) and changed_s is not None and now_s - changed_s > LEFTOVER_AGE_S


def _changed_s(entry: Mapping[str, Any]) -> float | None:
    for key in _TIME_KEYS:
        value = entry.get(key)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    return None
