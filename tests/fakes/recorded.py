"""recorded:// and recordedfault://, local disks whose changes are written down; see `recording`.

recorded:// is fsspec's own LocalFileSystem in the workers, since mpwriter does more with that than
with classes of others. recordedfault:// obeys a FaultPlan as well, and is the same everywhere.

Importable in a worker, as fault:// is.
"""

from __future__ import annotations

import io
import itertools
import os
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tests.fakes.filesystems import FaultFileSystem
from tests.fakes.recording import covered, follow, turn

__all__ = ["RecordedFaultFileSystem", "RecordedFileSystem"]

# A crash can come between the pieces of a write. Of a large one they are larger.
PIECE_BYTES, LARGE_PIECE_BYTES = 1024, 256 * 1024

_numbers = itertools.count()


class _RecordedFile(io.FileIO):
    """A file open for writing, without a buffer."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._handle = f"{os.getpid()}.{next(_numbers)}"
        with turn(path) as note:
            super().__init__(path, "wb")
            note("open", path, handle=self._handle)

    def write(self, chunk: Any) -> int:
        piece = memoryview(chunk).cast("B")
        piece = piece[: PIECE_BYTES if len(piece) < 8 * PIECE_BYTES else LARGE_PIECE_BYTES]
        with turn(self._path) as note:
            offset = self.tell()
            taken = super().write(piece)
            note(
                "write", self._path, handle=self._handle, offset=offset, chunk=bytes(piece[:taken])
            )
        return taken

    def truncate(self, size: int | None = None) -> int:
        with turn(self._path) as note:
            size = super().truncate(size)
            note("truncate", self._path, handle=self._handle, offset=size)
        return size

    def close(self) -> None:
        if self.closed:
            return
        with turn(self._path) as note:
            super().close()
            note("close", self._path, handle=self._handle)


_real_open = LocalFileSystem._open


def _recorded_open(fs: LocalFileSystem, path: str, mode: str = "rb", **kwargs: Any) -> Any:
    path = fs._strip_protocol(path)
    if "r" in mode or not covered(path):
        return _real_open(fs, path, mode, **kwargs)
    if mode != "wb":
        raise NotImplementedError(f"files opened with {mode!r} are not recorded")
    return io.BufferedWriter(_RecordedFile(path))


def _plain(recording: str, options: dict[str, Any]) -> LocalFileSystem:
    """fsspec's own local filesystem, recorded."""
    follow(recording)
    setattr(LocalFileSystem, "_open", _recorded_open)  # noqa: B010
    return LocalFileSystem(**options)


class _Recorded(LocalFileSystem):
    def __init__(self, recording: str, **options: Any) -> None:
        super().__init__(**options)
        self._recording = recording, options
        follow(recording)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, str):
            # fsspec of early 2025 strips "file" only, whatever the subclass is called.
            path = path.removeprefix(f"{cls.protocol}://")
        return super()._strip_protocol(path)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        return _recorded_open(self, path, mode, **kwargs)


class RecordedFileSystem(_Recorded):
    """A local disk whose changes are written down.

    Args:
        recording: folder of the Recording.
    """

    protocol = "recorded"

    def __reduce__(self) -> Any:
        return _plain, self._recording


class RecordedFaultFileSystem(FaultFileSystem, _Recorded):
    """The same with faults. Its files are moved by `mv`, not by os.replace from outside."""

    protocol = "recordedfault"


for _class in (RecordedFileSystem, RecordedFaultFileSystem):
    fsspec.register_implementation(_class.protocol, _class, clobber=True)
