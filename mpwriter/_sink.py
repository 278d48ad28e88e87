"""Files that nobody sees until they are complete.

Runs in: both. Torch-free.

    open_sink -> Sink.write ... -> publish    the whole file, under its final name
                                `-> discard    nothing, at any point, also after a failed publish

How depends on the filesystem, see `mpwriter._filesystems.publishing`:

    local, rename, move   RenamedSink     temporary name beside the target, then a rename
    commit                MultipartSink   s3fs: parts side by side (see `mpwriter._multipart`)
                          CommittedSink   the filesystem's own unpublished file
    close                 ClosedSink      the final name; it exists from close() on

fsspec's `with fs.open(...)` is not used for writing: on an exception it closes the file, and so
publishes a partial object.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from mpwriter._direct import DirectWriter
from mpwriter._filesystems import forget_in_transaction, is_local, publishing, remove_file, unwrap
from mpwriter._leftovers import Hold
from mpwriter._multipart import MultipartSink, sends_parts
from mpwriter._publish import (
    abandon,
    disarm,
    flush_file,
    is_buffered,
    move_file,
    refuse_directory,
    require_directory,
    sync_directory,
    sync_file,
    temporary_name,
)
from mpwriter._sink_base import Sink
from mpwriter._sink_pipeline import pipelined
from mpwriter._types import MIN_DIRECT_BYTES

__all__ = ["Sink", "open_sink", "write_file"]


class RenamedSink(Sink):
    """Writes to a temporary name beside the target and moves it there."""

    def __init__(self, fs: Any, path: str, *, token: str, sync_files: bool) -> None:
        self._local = is_local(fs)
        self._sync_files = sync_files
        if self._local:
            path = fs._strip_protocol(path)
            require_directory(fs, os.path.dirname(path))
        refuse_directory(fs, path)
        name = path.rpartition("/")[2]
        self._temporary = path[: len(path) - len(name)] + temporary_name(name, token)
        self._hold = Hold()
        # Where the bytes have to be on the disk at the end anyway, and nobody else's class is to
        # see them pass.
        direct = sync_files and type(fs) is LocalFileSystem
        self._direct = DirectWriter(self._temporary) if direct else None
        super().__init__(fs, path, self._temporary)
        self._file = pipelined(self._file)
        while self._local and not self._hold.take(self._temporary, self._file):
            self._file.close()  # it has been taken for a killed save's, and has no name any more
            self._file = fs.open(self._temporary, "wb")

    def _write_piece(self, view: memoryview) -> None:
        if self._direct is not None and len(view) >= MIN_DIRECT_BYTES:
            written = self._direct.write(view, self.position)
            if written:
                self.position += written
                self._file.seek(self.position)
                view = view[written:]
        super()._write_piece(view)

    def _publish(self) -> None:
        flush_file(self._file, self.path)
        self._check_position()
        if self._sync_files:
            sync_file(self._file)
        self._let_go()
        self._file.close()
        refuse_directory(self._fs, self.path)
        move_file(self._fs, self._temporary, self.path)
        self._hold.release()
        if self._local and self._sync_files:
            sync_directory(os.path.dirname(self.path))

    def _let_go(self) -> None:
        if self._direct is not None:
            self._direct.close()

    def _discard(self, file: Any) -> None:
        with contextlib.suppress(Exception):
            self._let_go()
            if is_buffered(file):
                abandon(file)
            else:
                file.close()
        try:
            remove_file(self._fs, self._temporary)
        except FileNotFoundError:
            pass
        except Exception:
            if self._local:
                os.remove(self._temporary)
        finally:
            self._hold.release()


class CommittedSink(Sink):
    """The filesystem keeps the upload apart until commit(): s3fs and gcsfs."""

    def __init__(self, fs: Any, path: str) -> None:
        super().__init__(fs, path, path, autocommit=False)
        forget_in_transaction(fs, self._file)

    def _publish(self) -> None:
        self._check_position()
        # An s3fs file of which no part was sent yet is one PutObject for commit() alone; close()
        # would start a multipart upload of one part first.
        # Source: S3File.commit, `elif not self.parts`.
        whole = type(self._file).__module__.startswith("s3fs.") and self._file.offset is None
        if not whole:
            self._file.close()
        self._file.commit()
        disarm(self._file)

    def _discard(self, file: Any) -> None:
        abandon(file)


class ClosedSink(Sink):
    """Nothing is visible before close(), which publishes: adlfs."""

    def __init__(self, fs: Any, path: str) -> None:
        super().__init__(fs, path, path)

    def _publish(self) -> None:
        self._check_position()
        self._file.close()

    def _discard(self, file: Any) -> None:
        abandon(file)


def open_sink(fs: Any, path: str, *, token: str, sync_files: bool) -> Sink:
    """Open a file for writing that is not visible under `path` before it is published.

    Args:
        fs: any fsspec filesystem.
        path: final name, as `Location.child` gives it.
        token: part of temporary names; differs between saves.
        sync_files: whether `publish` calls fsync on the file and its directory where there is a
            file descriptor. Never a host-wide sync.

    Returns:
        A Sink, which the caller publishes or discards.

    Raises:
        IsADirectoryError: `path` is a directory.
        OSError: as the filesystem has it: no such directory, no permission.
    """
    fs, path = unwrap(fs, path)
    kind = publishing(fs)
    if kind == "commit":
        if sends_parts(fs):
            return MultipartSink(fs, path)
        return CommittedSink(fs, path)
    if kind == "close":
        return ClosedSink(fs, path)
    return RenamedSink(fs, path, token=token, sync_files=sync_files)


def write_file(fs: Any, path: str, payload: bytes, *, token: str, sync_files: bool) -> None:
    """Write a small file at once, swapping it over an old one of that name.

    Args:
        fs, path, token, sync_files: as for `open_sink`.
        payload: the whole file.

    Raises:
        IsADirectoryError: `path` is a directory.
        OSError: as the filesystem has it. An old file is still there, as far as the filesystem
            can replace files atomically.
    """
    sink = open_sink(fs, path, token=token, sync_files=sync_files)
    try:
        sink.write(payload)
        sink.publish()
    except BaseException:
        sink.discard()
        raise
