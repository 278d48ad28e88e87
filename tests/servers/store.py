"""A place where checkpoints go, with all that a test has to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import fsspec

__all__ = ["Store", "try_store"]


@dataclass(frozen=True)
class Store:
    """A storage server, or a place without one.

    Attributes:
        name: "s3" and so on.
        root: URL of a folder or bucket that is there, and empty at first; without "/" at its end.
        options: storage options, for the writer and the reader.
        secrets: texts in the options that must never be shown.
        serves_workers: whether worker processes can write there.
        has_directories: whether names are more than keys.
        of_reader: the options of somebody who may read there and not write; None where the server
            makes no such difference.
    """

    name: str
    root: str
    options: Mapping[str, Any] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    serves_workers: bool = True
    has_directories: bool = False
    of_reader: Mapping[str, Any] | None = None

    def filesystem(self) -> Any:
        """A filesystem of its own, that remembers nothing."""
        fs, _ = fsspec.url_to_fs(self.root, **self.options, skip_instance_cache=True)
        return fs

    def path(self, url: str) -> str:
        """What the filesystem calls the place at `url`."""
        return str(self.filesystem()._strip_protocol(url))

    def names(self, url: str) -> list[str]:
        """Of all files at a URL and below, relative to it, as the server has them now."""
        fs, path = self.filesystem(), self.path(url).rstrip("/")
        try:
            found = fs.find(path)
        except FileNotFoundError:
            return []
        return sorted(name[len(path) + 1 :] for name in found if name.startswith(f"{path}/"))


def try_store(store: Store) -> None:
    """Write a file, read and remove it.

    Raises:
        Exception: as the filesystem has it.
    """
    fs, path = store.filesystem(), f"{store.path(store.root)}/ready"
    fs.pipe_file(path, b"yes")
    assert fs.cat_file(path) == b"yes"
    fs.rm_file(path)
