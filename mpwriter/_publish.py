"""The steps by which a written file gets its name, or none.

Runs in: both. Torch-free. Nothing here holds state; `mpwriter._sink` puts the steps in order.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import time
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from mpwriter._filesystems import is_local, own_move, present, publishing, remove_file

__all__ = [
    "abandon",
    "disarm",
    "flush_file",
    "is_buffered",
    "is_temporary_name",
    "move_file",
    "refuse_directory",
    "require_directory",
    "sync_directory",
    "sync_file",
    "temporary_name",
    "told_position",
    "wait_or_raise",
]

# EINTR, EAGAIN and writes of 0 bytes in a row; the waits between them double from 10 ms, 0.6 s
# altogether. What lasts longer is for the retry of the whole file.
_MAX_STALLS = 6
_FIRST_STALL_S = 0.01

# fsync of what cannot be synced: pipes, /dev/null, directories of some network filesystems.
_NOTHING_TO_SYNC = frozenset(
    {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EROFS}
)

_TEMPORARY_SUFFIX = ".tmp"


def temporary_name(name: str, token: str) -> str:
    """Name under which the file `name` is written by the save `token`.

    Hidden, and the same at every try, so that a retry overwrites what a killed worker left.
    """
    return f".{name.lstrip('.')}.{token}{_TEMPORARY_SUFFIX}"


def is_temporary_name(name: str) -> bool:
    """Whether `temporary_name` makes such names: what a killed process may leave behind."""
    return name.startswith(".") and name.endswith(_TEMPORARY_SUFFIX) and name.count(".") >= 3


def refuse_directory(fs: Any, path: str) -> None:
    """Look that no directory has the name of the file.

    A move would put the file *into* it: shutil.move does so, and so does LocalFileSystem.mv.

    Raises:
        IsADirectoryError: one has.
    """
    if os.path.isdir(path) if is_local(fs) else fs.isdir(path):
        raise IsADirectoryError(errno.EISDIR, "a directory is in the way of the file", path)


def require_directory(fs: Any, path: str) -> None:
    """Look that a local directory is still there, where fsspec would make it again (auto_mkdir).

    Whoever removed it has removed the files of this save that were in it.

    Raises:
        FileNotFoundError: it is not.
    """
    if getattr(fs, "auto_mkdir", False) and not os.path.isdir(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def wait_or_raise(num_stalls: int, error: OSError | None, path: str) -> None:
    """Wait a little before the next try, longer each time.

    Args:
        num_stalls: tries without progress so far, from 1.
        error: what the last try raised, None if it took 0 bytes.
        path: for the message.

    Raises:
        OSError: it has been tried often enough: `error`, or EIO.
    """
    if num_stalls > _MAX_STALLS:
        raise error or OSError(errno.EIO, "the file takes no more bytes", path)
    time.sleep(_FIRST_STALL_S * 2 ** (num_stalls - 1))


def told_position(file: Any) -> int | None:
    """What `file.tell()` says; None where the file object does not know."""
    try:
        told = file.tell()
    except Exception:
        return None
    return told if isinstance(told, int) else None


def flush_file(file: Any, path: str) -> None:
    """Call `file.flush()` where there is one; EINTR and EAGAIN are tried again."""
    flush = getattr(file, "flush", None)
    num_stalls = 0
    while flush is not None:
        try:
            flush()
            return
        except (InterruptedError, BlockingIOError) as exc:
            num_stalls += 1
            wait_or_raise(num_stalls, exc, path)


def sync_file(file: Any) -> None:
    """Call fsync on the file where it is one of this machine.

    Raises:
        OSError: the disk failed.
    """
    try:
        fd = file.fileno()
    except (AttributeError, NotImplementedError, io.UnsupportedOperation):
        return  # an object of a store: durable once it is closed. Never os.sync().
    if isinstance(fd, int) and fd >= 0:
        _sync_fd(fd)


def sync_directory(path: str) -> None:
    """Call fsync on a local directory, so that a rename in it lasts.

    Raises:
        OSError: the disk failed. Silent where directories cannot be opened or synced.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return  # write and search permission are enough to put files there
    try:
        _sync_fd(fd)
    finally:
        os.close(fd)


def _sync_fd(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno not in _NOTHING_TO_SYNC:
            raise


def move_file(fs: Any, temporary: str, path: str) -> None:
    """Put the file `temporary` under the name `path`, over an old file of that name.

    Raises:
        OSError: as the filesystem has it; an old file is still there, unless the filesystem
            moves by copying and failed in the middle of it.
    """
    if is_local(fs) and type(fs).mv is LocalFileSystem.mv:
        os.replace(temporary, path)
    elif not own_move(fs):
        _copy_and_remove(fs, temporary, path)
    elif publishing(fs) == "move":
        _move_over(fs, temporary, path)
    else:
        fs.mv(temporary, path)


def _copy_and_remove(fs: Any, temporary: str, path: str) -> None:
    """What fsspec's own mv does, without its expansion of `*` and `[x]` in names."""
    there_before = present(fs, path)
    try:
        fs.cp_file(temporary, path)
    except BaseException:
        if not there_before:
            with contextlib.suppress(Exception):
                remove_file(fs, path)
        raise
    with contextlib.suppress(Exception):
        # The file is published; a left-over is no reason to fail the save.
        remove_file(fs, temporary)


def _move_over(fs: Any, temporary: str, path: str) -> None:
    """Rename over an old file where the server may refuse to.

    The old file is moved aside, not removed: it comes back if the new one cannot take its place.
    Source: SMB and many FTP servers raise; WebHDFS answers false, which fsspec does not look at.
    """
    try:
        fs.mv(temporary, path)
    except Exception:
        if not (present(fs, temporary) and present(fs, path)):
            raise
    else:
        if not present(fs, temporary):
            return
        if not present(fs, path):
            raise OSError(errno.EIO, "the rename of the written file did nothing", path)
    aside = f"{temporary}.old"
    fs.mv(path, aside)
    try:
        fs.mv(temporary, path)
    except BaseException:
        fs.mv(aside, path)
        raise
    with contextlib.suppress(Exception):
        remove_file(fs, aside)


def is_buffered(file: Any) -> bool:
    """Whether it is fsspec's AbstractBufferedFile, whose close() and __del__ publish."""
    return any(
        base.__name__ == "AbstractBufferedFile" and base.__module__ == "fsspec.spec"
        for base in type(file).__mro__
    )


def abandon(file: Any) -> None:
    """Throw an unpublished file away; afterwards neither close() nor __del__ publishes it."""
    try:
        file.discard()
    finally:
        disarm(file)


def disarm(file: Any) -> None:
    """Mark a settled AbstractBufferedFile as closed, and free its buffer.

    Left open, its __del__ would close it: s3fs then starts one more upload, and a file that
    commits by itself is published.
    """
    for name, value in (("closed", True), ("buffer", None)):
        with contextlib.suppress(Exception):
            setattr(file, name, value)
