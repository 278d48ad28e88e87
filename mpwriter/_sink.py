"""Files that nobody sees until they are complete.

Runs in: both. Torch-free.

    open_sink -> Sink.write ... -> publish    the whole file, under its final name
                                `-> discard    nothing, at any point, also after a failed publish

How depends on the filesystem, see `mpwriter._filesystems.publishing`:

    local, rename, move   RenamedSink     temporary name beside the target, then a rename
    commit                CommittedSink   the filesystem's own unpublished file
    close                 ClosedSink      the final name; it exists from close() on

fsspec's `with fs.open(...)` is not used for writing: on an exception it closes the file, and so
publishes a partial object.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from mpwriter._direct import DirectWriter
from mpwriter._filesystems import forget_in_transaction, is_local, publishing, remove_file, unwrap
from mpwriter._leftovers import Hold
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
    told_position,
    wait_or_raise,
)
from mpwriter._types import MIN_DIRECT_BYTES

__all__ = ["Sink", "open_sink", "write_file"]

# The largest piece handed to one write(): file objects of stores copy what they are given.
_MAX_WRITE_BYTES = 16 * 2**20


class Sink:
    """One file on its way. Made by `open_sink`; for one thread at a time.

    Whoever holds it calls `publish` or `discard`; a Sink that is dropped is discarded.

    Attributes:
        path: the final name.
        position: bytes written so far.
    """

    def __init__(self, fs: Any, path: str, opened_path: str, **open_options: Any) -> None:
        self.path = path
        self.position = 0
        self._fs = fs
        self._settled = False
        self._broken = False
        self._needs_bytes = False
        self._file: Any = None
        self._file = fs.open(opened_path, "wb", **open_options)

    def write(self, chunk: bytes | bytearray | memoryview) -> None:
        """Append all of `chunk`; it may be reused as soon as this returns.

        A memoryview goes to the file object as it is, so for a local file nothing is copied.

        Args:
            chunk: contiguous bytes of any format.

        Raises:
            OSError: the filesystem's own, or EIO where the file takes no more bytes. Then only
                `discard` is left.
            ValueError: published or discarded already, or an earlier write failed.
        """
        self._require_open()
        view = memoryview(chunk)
        if not view.nbytes:
            return
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        self._broken = True  # until all of it is out
        for start in range(0, len(view), _MAX_WRITE_BYTES):
            self._write_piece(view[start : start + _MAX_WRITE_BYTES])
        self._broken = False

    def publish(self) -> None:
        """Make the file visible under its final name, complete, and durable if asked for.

        Raises:
            OSError: the filesystem's own. Then `discard` is due.
            ValueError: published or discarded already, or a write failed.
        """
        self._require_open()
        self._broken = True
        self._publish()
        self._settled = True
        self._file = None
        with contextlib.suppress(Exception):
            self._fs.invalidate_cache(self.path)

    def discard(self) -> None:
        """Leave nothing visible. Idempotent; does nothing after `publish`; never raises.

        Where the very last step of `publish` failed (fsync of the directory) the complete file
        keeps its name.
        """
        if self._settled:
            return
        self._settled = True
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(Exception):
                self._discard(file)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.discard()

    def _publish(self) -> None:
        raise NotImplementedError

    def _discard(self, file: Any) -> None:
        raise NotImplementedError

    def _require_open(self) -> None:
        if self._settled:
            raise ValueError(f"{self.path} is published or discarded")
        if self._broken:
            raise ValueError(f"an earlier write to {self.path} failed")

    def _write_piece(self, view: memoryview) -> None:
        num_stalls = 0
        while view:
            error: OSError | None = None
            try:
                num_written = self._file.write(bytes(view) if self._needs_bytes else view)
            except TypeError:
                # Some file objects take nothing but bytes.
                if self._needs_bytes:
                    raise
                self._needs_bytes = True
                continue
            except (InterruptedError, BlockingIOError) as exc:
                error = exc
                num_written = self._taken(getattr(exc, "characters_written", 0))
            else:
                if num_written is None:
                    # paramiko and others: all. A raw stream: "would have blocked".
                    raw = isinstance(self._file, io.RawIOBase)
                    num_written = self._taken(len(view)) if raw else len(view)
            if not 0 <= num_written <= len(view):
                raise OSError(
                    errno.EIO, f"write() took {num_written} of {len(view)} bytes", self.path
                )
            self.position += num_written
            view = view[num_written:]
            num_stalls = 0 if num_written else num_stalls + 1
            if num_stalls:
                wait_or_raise(num_stalls, error, self.path)

    def _taken(self, default: int) -> int:
        """How much the file took in a write that did not say so."""
        told = told_position(self._file)
        return default if told is None else told - self.position

    def _check_position(self) -> None:
        told = told_position(self._file)
        if told is not None and told != self.position:
            raise OSError(
                errno.EIO, f"{self.position} bytes were written, the file has {told}", self.path
            )


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
