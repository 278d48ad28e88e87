"""owned://, a local disk whose every instance belongs to one thread of one process.

As an SFTP client does, that freezes when several threads use it. Importable in a worker.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

__all__ = ["OwnedFileSystem"]


class OwnedFile:
    """A file of an owned:// filesystem."""

    def __init__(self, fs: OwnedFileSystem, file: Any) -> None:
        self._fs = fs
        self._file = file

    def __getattr__(self, name: str) -> Any:
        if name in ("write", "flush", "close", "read", "seek", "tell", "fileno", "readinto"):
            self._fs.check_owner(name)
        return getattr(self._file, name)

    def __enter__(self) -> OwnedFile:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()


class OwnedFileSystem(LocalFileSystem):
    """The first (process, thread) that calls an instance is the only one that may.

    Args:
        log: a file that gets a line for every new owner.
    """

    protocol = "owned"

    def __init__(self, log: str, **options: Any) -> None:
        super().__init__(**options)
        self.log = log
        self.owner: tuple[int, int] | None = None

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, str):
            path = path.removeprefix("owned://")
        return super()._strip_protocol(path)

    def check_owner(self, call: str) -> None:
        caller = (os.getpid(), threading.get_ident())
        if self.owner is None:
            self.owner = caller
            with open(self.log, "a") as log:
                log.write(f"{os.getpid()}\n")
        if self.owner != caller:
            raise AssertionError(f"{call}() by {caller}, but {self.owner} owns this instance")

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        self.check_owner("open")
        return OwnedFile(self, super()._open(path, mode, **kwargs))

    def info(self, path: Any, **kwargs: Any) -> Any:
        self.check_owner("info")
        return super().info(path, **kwargs)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.check_owner("makedirs")
        super().makedirs(path, exist_ok=exist_ok)

    def rm_file(self, path: str) -> None:
        self.check_owner("rm_file")
        super().rm_file(path)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        self.check_owner("mv")
        os.replace(self._strip_protocol(path1), self._strip_protocol(path2))


fsspec.register_implementation(OwnedFileSystem.protocol, OwnedFileSystem, clobber=True)
