"""Saves to a store of any kind, and what has to be there afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from mpwriter import FsspecReader, MPFsspecWriter
from tests.servers import Store
from tests.states import assert_same, blank, load_into, save_with

__all__ = [
    "NO_MEMORY",
    "WITH_READER",
    "assert_holds",
    "in_words",
    "of_stranger",
    "on",
    "save",
    "shards",
]

State = dict[str, Any]

# For `on`: where workers and other processes can write.
NO_MEMORY = ("local", "s3", "gcs", "azure", "sftp")
# Where somebody may be allowed to read only. Tests may run as root, so not on a local disk.
WITH_READER = ("s3", "azure", "sftp")


def on(*names: str) -> pytest.MarkDecorator:
    """Run a test on these stores only."""
    return pytest.mark.parametrize("store", names, indirect=True, scope="session")


def save(store: Store, url: str, state: State, **options: Any) -> MPFsspecWriter:
    """Save with a writer of its own."""
    writer = MPFsspecWriter(url, **{"num_workers": 2, **store.options, **options})
    save_with(writer, state)
    return writer


def assert_holds(store: Store, url: str, state: State) -> None:
    """The checkpoint at `url` loads, and is `state` to the last bit."""
    reader = FsspecReader(url, num_workers=1, **store.options)
    assert_same(load_into(blank(state), reader), state)


def shards(store: Store, url: str) -> list[str]:
    """All files of a checkpoint but `.metadata`, as the server has them."""
    return [name for name in store.names(url) if name != ".metadata"]


def in_words(url: str) -> str:
    """The part of a URL that an error names, whatever it does with the protocol and the host."""
    return "/run" + url.partition("/run")[2]


def of_stranger(store: Store) -> dict[str, Any] | None:
    """The storage options of somebody whose secrets are right but not for this user."""
    options = dict(store.options)
    if store.name == "s3":
        return {**options, "key": "nobody"}
    if store.name == "azure":
        connection = options["connection_string"].replace("AccountKey=E", "AccountKey=F")
        return {**options, "connection_string": connection}
    if store.name == "sftp":
        return {**options, "username": "nobody-there"}
    return None  # the emulator lets everybody in
