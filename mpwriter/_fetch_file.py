"""Byte ranges of one shard file, read in order.

Runs in: trainer.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from fsspec.asyn import AsyncFileSystem

from mpwriter._faults import error_record, is_absence, is_transient
from mpwriter._fetch_plan import ByteRange, StoredItem
from mpwriter._storage import Location
from mpwriter.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    MPWriterError,
    StorageError,
)

__all__ = [
    "Buffer",
    "ShardFile",
    "check_sizes",
    "cut_off",
    "missing",
    "retried",
    "storage_error",
    "timed_out",
]

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

# Where in memory an item lies, modulo this, is where it lies in its file: payloads that are aligned
# there are aligned here.
_ALIGNMENT_BYTES = 64

# What is asked for at once where requests can be on their way side by side.
_AHEAD_BYTES = 8 << 20

_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0


class Buffer:
    """Memory for one range at a time, kept warm from one to the next. Not thread-safe."""

    def __init__(self) -> None:
        self._block = bytearray()

    def room(self, start: int, nbytes: int) -> memoryview:
        """Give room for `nbytes` bytes that lie at `start` in their file.

        Returns:
            A writable view; the next call gives the same memory again.
        """
        if len(self._block) < nbytes + _ALIGNMENT_BYTES:
            self._block = bytearray()  # given back before more is taken
            self._block = bytearray(nbytes + _ALIGNMENT_BYTES)
        address = torch.frombuffer(self._block, dtype=torch.uint8).data_ptr()
        skipped = (start - address) % _ALIGNMENT_BYTES
        return memoryview(self._block)[skipped : skipped + nbytes]


class ShardFile:
    """One shard file, opened when it is first read. Not thread-safe: one thread reads one file.

    Args:
        location: of the checkpoint.
        name: of the file in it.
        buffer: where its bytes go.
        retries: how often a read is tried again after an error that may pass.
    """

    def __init__(self, location: Location, name: str, buffer: Buffer, *, retries: int) -> None:
        self.display = f"{location.display}/{name}"
        self._fs = location.fs
        self._path = location.child(name)
        self._retries = retries
        self._buffer = buffer
        self._stream: Any = None

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def read(self, span: ByteRange) -> memoryview:
        """Read one range.

        Returns:
            Its bytes, writable; good until the buffer is used again.

        Raises:
            IncompleteCheckpointError: the file is missing.
            CorruptCheckpointError: it ends before the range does; the key is that of the first
                item that is cut off.
            StorageError: it cannot be read.
        """
        view = retried(
            lambda: self._fill(span),
            path=self.display,
            fs=self._fs,
            retries=self._retries,
            missing=lambda: missing(self.display, span.items[0]),
            before_retry=self._close,
        )
        end = span.start + len(view)
        if end < span.stop:
            raise cut_off(self.display, next(i for i in span.items if i.stop > end), end)
        return view

    def _fill(self, span: ByteRange) -> memoryview:
        """Read what there is of `span`."""
        if self._stream is None:
            self._stream = _open(self._fs, self._path)
        # Known for nearly every filesystem: no memory is claimed for bytes that do not exist.
        size = getattr(self._stream, "size", None)
        stop = min(span.stop, size) if isinstance(size, int) else span.stop
        view = self._buffer.room(span.start, max(0, stop - span.start))
        if len(view):
            self._stream.seek(span.start)
        filled = 0
        while filled < len(view):
            count = _read_into(self._stream, view[filled:])
            if not count:
                break
            filled += count
        return view[:filled]

    def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            try:
                stream.close()
            except Exception as error:  # only read from: nothing is lost, the first error counts
                _logger.debug("closing %s: %s", self.display, type(error).__name__)


def _open(fs: Any, path: str) -> Any:
    # Ranges are exact and in order. fsspec's read-ahead would fetch up to 50 MiB more than one
    # small item needs; the filesystems that go over a network take this option.
    options = {"cache_type": "none"} if isinstance(fs, AsyncFileSystem) else {}
    return fs.open(path, "rb", **options)


def _read_into(stream: Any, view: memoryview) -> int:
    if hasattr(stream, "readv"):
        return _read_ahead_into(stream, view[:_AHEAD_BYTES])
    if hasattr(stream, "readinto"):
        return stream.readinto(view) or 0
    chunk = stream.read(len(view))
    view[: len(chunk)] = chunk
    return len(chunk)


def _read_ahead_into(stream: Any, view: memoryview) -> int:
    """For paramiko, which otherwise asks for 32 KiB and waits for the answer, again and again."""
    start = stream.tell()
    try:
        [chunk] = stream.readv([(start, len(view))])
    except EOFError:  # the file is shorter, or the server is gone, which this says then
        stream.seek(start)
        chunk = stream.read(len(view))
    view[: len(chunk)] = chunk
    return len(chunk)


def check_sizes(location: Location, files: Mapping[str, Sequence[ByteRange]]) -> None:
    """Look at the size of every file before any of it is read.

    Args:
        location: of the checkpoint.
        files: what `plan_reads` gave.

    Raises:
        IncompleteCheckpointError: one is missing.
        CorruptCheckpointError: one is too short.
        StorageError: one cannot be looked at.

    Thread safety: any thread.
    """
    for name, spans in files.items():
        last = max((item for span in spans for item in span.items), key=lambda item: item.stop)
        _check_size(location, name, last)


def _check_size(location: Location, name: str, last: StoredItem) -> None:
    path, display, fs = location.child(name), f"{location.display}/{name}", location.fs
    size = retried(
        lambda: fs.info(path).get("size"),
        path=display,
        fs=fs,
        retries=0,
        missing=lambda: missing(display, last),
    )
    if isinstance(size, int) and size < last.stop:
        raise cut_off(display, last, size)


def missing(display: str, item: StoredItem) -> IncompleteCheckpointError:
    return IncompleteCheckpointError(
        f"{item.key}: its shard file is missing: {display} (has the checkpoint been removed or "
        "overwritten since its metadata was read?)",
        path=display,
        key=item.key,
    )


def cut_off(display: str, item: StoredItem, end: int) -> CorruptCheckpointError:
    held = max(0, end - item.offset)
    return CorruptCheckpointError(
        f"{item.key}: its shard file is cut off: {display}: expected {item.length} bytes at "
        f"{item.offset}, found {held}",
        path=display,
        key=item.key,
    )


def timed_out(display: str, item: StoredItem, timeout_s: float) -> StorageError:
    """What to raise for a read that does not end."""
    return StorageError(
        f"cannot read {display}: no answer for {timeout_s:g} s, at {item.key!r}",
        errno=errno.ETIMEDOUT,
        path=display,
        original_type="TimeoutError",
        worker_traceback="",
    )


def retried(
    operation: Callable[[], _T],
    *,
    path: str,
    fs: Any,
    retries: int,
    missing: Callable[[], MPWriterError],
    before_retry: Callable[[], None] | None = None,
) -> _T:
    """Run `operation`, again where an error may pass, with growing pauses.

    Args:
        operation: calls the filesystem; safe to repeat.
        path: of the file, for errors; fs: its filesystem, whose secrets are kept out of errors.
        retries: further tries after the first.
        missing: makes the error for a file that does not exist.
        before_retry: called before each further try.

    Raises:
        MPWriterError: what `missing` made, or StorageError.

    Thread safety: that of `operation`.
    """
    attempt = 0
    while True:
        try:
            return operation()
        except Exception as error:  # filesystems raise more than OSError
            if is_absence(error):
                raise missing() from error
            if attempt >= retries or not is_transient(error):
                raise storage_error(error, path, fs) from error
            _logger.debug("reading %s again after %s", path, type(error).__name__)
        time.sleep(min(_MAX_DELAY_S, _FIRST_DELAY_S * 2**attempt))
        attempt += 1
        if before_retry is not None:
            before_retry()


def storage_error(error: BaseException, path: str, fs: Any) -> StorageError:
    """Tell a filesystem's exception as ours, with its type, number and text."""
    record = error_record(error, path, fs=fs)
    return StorageError(
        f"cannot read {record.path}: {record.type_name}: {record.text}",
        errno=record.errno,
        path=record.path,
        original_type=record.type_name,
        worker_traceback="",
    )
