"""A filesystem that throws away what is written: a save without the cost of a disk.

Runs in: both; free of torch. `--url discard://` names it, in the benchmark only.
"""

from __future__ import annotations

import io
import os
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

__all__ = ["PROTOCOL", "DiscardFileSystem", "register"]

PROTOCOL = "discard"


def register() -> None:
    """Let fsspec know the protocol in this process; a worker gets the filesystem as an object."""
    fsspec.register_implementation(PROTOCOL, DiscardFileSystem, clobber=True)


class _Discarded(io.RawIOBase):
    """Takes everything at once, as /dev/null does, and knows how much that was."""

    def __init__(self) -> None:
        self._position = self._end = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._end}[whence]
        self._position = base + offset
        return self._position

    def write(self, payload: Any) -> int:
        nbytes = memoryview(payload).nbytes
        self._position += nbytes
        self._end = max(self._end, self._position)
        return nbytes


class DiscardFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Holds nothing, so that nothing can be loaded from it."""

    protocol = PROTOCOL

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if "r" in mode:
            raise FileNotFoundError(2, "nothing is kept here", path)
        return _Discarded()

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        raise FileNotFoundError(2, "nothing is kept here", path)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        return []

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """There is nothing to make."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """There is nothing to make."""

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        """There is nothing to move."""

    def _rm(self, path: str) -> None:
        """There is nothing to remove."""
