"""A file that nobody sees until it is complete: what the kinds of it share.

Runs in: both. Torch-free. See `mpwriter._sink`.
"""

from __future__ import annotations

import contextlib
import errno
import io
from collections.abc import Callable
from typing import Any

from mpwriter._filesystems import forget_listings
from mpwriter._publish import told_position, wait_or_raise

__all__ = ["Sink"]

# The largest piece handed to one write(): file objects of stores copy what they are given.
_MAX_WRITE_BYTES = 16 * 2**20


class Sink:
    """One file on its way. Made by `open_sink`; for one thread at a time.

    Whoever holds it calls `publish` or `discard`; a Sink that is dropped is discarded.

    Attributes:
        path: the final name.
        position: bytes written so far.
        progressed: called when bytes have gone out, where that is not when `write` returns.
    """

    progressed: Callable[[], None] | None = None

    def __init__(self, fs: Any, path: str, opened_path: str | None, **open_options: Any) -> None:
        self.path = path
        self.position = 0
        self._fs = fs
        self._settled = False
        self._broken = False
        self._needs_bytes = False
        self._file: Any = None
        if opened_path is not None:
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
        forget_listings(self._fs, self.path)

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
