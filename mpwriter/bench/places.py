"""Where the benchmark's checkpoints go, on any fsspec filesystem.

Runs in: trainer.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

__all__ = ["Place", "open_place", "parse_storage_options"]


@dataclass(frozen=True)
class Place:
    """A directory of the benchmark's own; everything in it may be removed.

    Attributes:
        url: of that directory.
        storage_options: for every open; kept out of `repr`, since keys stand in there.
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def local_path(self) -> str | None:
        """The directory's path, None where it is not on a local filesystem."""
        fs, path = self._locate(self.url)
        return path if type(fs) is LocalFileSystem else None

    def fresh_url(self) -> str:
        """A checkpoint URL that nothing has used before, so that nothing cached helps."""
        return f"{self.url}/{secrets.token_hex(6)}"

    def remove(self, url: str) -> None:
        """Remove the checkpoint at `url`, if there is one."""
        fs, path = self._locate(url)
        fs.invalidate_cache()  # other processes wrote there
        if fs.exists(path):
            fs.rm(path, recursive=True)

    def _locate(self, url: str) -> tuple[fsspec.AbstractFileSystem, str]:
        fs, path = url_to_fs(url, **self.storage_options)
        return fs, path


@contextmanager
def open_place(url: str | None, storage_options: Mapping[str, Any]) -> Iterator[Place]:
    """A new directory below `url` (default: the temporary directory), removed at the end."""
    parent = tempfile.gettempdir() if url is None else url
    if "://" not in parent:
        parent = os.path.abspath(os.path.expanduser(parent))
    if not parent.endswith("://"):
        parent = parent.rstrip("/") + "/"
    place = Place(f"{parent}mpwriter-bench-{secrets.token_hex(4)}", storage_options)
    if place.local_path is not None:
        os.makedirs(place.local_path)
    try:
        yield place
    finally:
        place.remove(place.url)


def parse_storage_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Read `key=value` pairs as a command line gives them.

    A value is taken as JSON where it is JSON (numbers, true, objects), else as a string; dots in
    a key nest: `client_kwargs.endpoint_url=http://127.0.0.1:8333`.

    Raises:
        ValueError: a pair has no `=`, or a key stands below one that has a value already.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"a storage option is written key=value: {key!r} has no value")
        *parents, leaf = key.split(".")
        target = options
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise ValueError(f"storage option {key!r}: {parent!r} has a value already")
        target[leaf] = _value(text)
    return options


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
