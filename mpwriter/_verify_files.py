"""The shard files that `mpwriter._verify_units` has open.

Runs in: trainer.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from mpwriter._decode import ContainerError
from mpwriter._fetch_file import _open, _read_into, retried
from mpwriter._fetch_source import Lane
from mpwriter._storage import Location
from mpwriter.errors import IncompleteCheckpointError

__all__ = ["OpenFiles"]

_logger = logging.getLogger(__name__)
_RETRIES = 3


class OpenFiles:
    """Files that are open for as long as units of them are left. Thread-safe but for `close`.

    Args:
        lane: None where one thread reads.
        counts: by file, its units.
    """

    def __init__(self, location: Location, lane: Lane | None, counts: dict[str, int]) -> None:
        self._location = location
        self._lane = lane
        self._counts = counts
        self._open: dict[str, Any] = {}
        self._lock = threading.Lock()

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fill `view`.

        Raises:
            ContainerError: the file ends before; MPWriterError: it cannot be read.
        """
        path = f"{self._location.display}/{name}"
        count = retried(
            lambda: self._source(name).read_into(offset, view),
            path=path,
            fs=self._location.fs,
            retries=_RETRIES,
            missing=lambda: IncompleteCheckpointError("missing: it has just gone", path=path),
        )
        if count < len(view):
            raise ContainerError(f"expected {len(view)} bytes at {offset}, found {count}")

    def _source(self, name: str) -> Any:
        with self._lock:
            if name not in self._open:
                path = self._location.child(name)
                lane = self._lane
                self._open[name] = (
                    _StreamSource(self._location.fs, path) if lane is None else lane.open(path)
                )
            return self._open[name]

    def done_with(self, name: str) -> None:
        """One unit is over."""
        with self._lock:
            self._counts[name] -= 1
            if not self._counts[name] and name in self._open:
                self._open.pop(name).close()

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


class _StreamSource:
    """A file object of a filesystem that one thread reads."""

    def __init__(self, fs: Any, path: str) -> None:
        self._path = path
        self._stream = _open(fs, path)

    def read_into(self, offset: int, view: memoryview) -> int:
        self._stream.seek(offset)
        filled = 0
        while filled < len(view):
            count = _read_into(self._stream, view[filled:])
            if not count:
                break
            filled += count
        return filled

    def close(self) -> None:
        try:
            self._stream.close()
        except Exception as error:  # only read from: nothing is lost
            _logger.debug("closing %s: %s", self._path, type(error).__name__)
