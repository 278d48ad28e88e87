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

from mpwriter.bench.ranks import ALONE, Ranks, ignore_termination

__all__ = ["Place", "open_place", "parse_storage_options"]


@dataclass(frozen=True)
class Place:
    """A directory of the benchmark's own; everything in it may be removed.

    Attributes:
        url: of that directory.
        storage_options: for every open; kept out of `repr`, since keys stand in there.
        ranks: who saves there together.
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    ranks: Ranks = field(default=ALONE, repr=False)

    @property
    def local_path(self) -> str | None:
        """The directory's path, None where it is not on a local filesystem."""
        fs, path = self._locate(self.url)
        return path if type(fs) is LocalFileSystem else None

    def fresh_url(self) -> str:
        """A checkpoint URL that nothing has used before, so that nothing cached helps."""
        return f"{self.url}/{self.ranks.shared(secrets.token_hex(6))}"

    def own_file(self, path: str) -> str:
        """A file of this rank's own beside `path`; that itself where there are no other ranks."""
        return path if self.ranks.alone else f"{path}.rank{self.ranks.rank}"

    def remove(self, url: str) -> None:
        """Remove the checkpoint at `url`, if there is one, once all ranks are through with it."""
        self.ranks.barrier()
        if not self.ranks.alone:
            self._remove(self.own_file(url))
        if self.ranks.is_first:
            self._remove(url)

    def close(self) -> None:
        """Remove all of it, whatever the other ranks are doing."""
        if self.ranks.is_first:
            ignore_termination(self.ranks)
            self._remove(self.url)

    def _remove(self, url: str) -> None:
        fs, path = self._locate(url)
        fs.invalidate_cache()  # other processes wrote there
        if fs.exists(path):
            fs.rm(path, recursive=True)

    def _locate(self, url: str) -> tuple[fsspec.AbstractFileSystem, str]:
        fs, path = url_to_fs(url, **self.storage_options)
        return fs, path


@contextmanager
def open_place(
    url: str | None, storage_options: Mapping[str, Any], ranks: Ranks = ALONE
) -> Iterator[Place]:
    """A new directory below `url` (default: the temporary directory), removed at the end."""
    parent = tempfile.gettempdir() if url is None else url
    if "://" not in parent:
        parent = os.path.abspath(os.path.expanduser(parent))
    if not parent.endswith("://"):
        parent = parent.rstrip("/") + "/"
    name = ranks.shared(f"mpwriter-bench-{secrets.token_hex(4)}")
    place = Place(f"{parent}{name}", storage_options, ranks)
    if place.local_path is not None and ranks.is_first:
        os.makedirs(place.local_path)
    try:
        ranks.barrier()
        yield place
        ranks.barrier()
    finally:
        place.close()


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
