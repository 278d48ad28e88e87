"""What is swept by its age: how filesystems tell the time of a change."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mpwriter._leftovers import LEFTOVER_AGE_S, sweep
from mpwriter._publish import temporary_name

NOW_S = 1_800_000_000.0
YOUNG_S, OLD_S = NOW_S - LEFTOVER_AGE_S + 60, NOW_S - LEFTOVER_AGE_S - 60
SHARD = "__0_1.0f3a9c2e.distcp"
TEMPORARY = [temporary_name(name, "0f3a9c2e") for name in (".metadata", "__3.metadata", SHARD)]


def test_sweep_goes_by_age_when_files_are_in_memory() -> None:
    fs = MemoryFileSystem()
    root = "/leftovers-of-this-test"
    try:
        for name in (*TEMPORARY, SHARD, ".metadata", "notes.txt"):
            fs.pipe_file(f"{root}/{name}", b"junk")
        assert sweep(fs, root, []) == []
        later_s = datetime.now(timezone.utc).timestamp() + LEFTOVER_AGE_S + 60
        assert sorted(sweep(fs, root, [], now_s=later_s)) == sorted([*TEMPORARY, SHARD])
        assert sorted(fs.ls(root, detail=False)) == [f"{root}/.metadata", f"{root}/notes.txt"]
    finally:
        fs.rm(root, recursive=True)


class Listing:
    """A store of which only the listing is known."""

    def __init__(self, entries: list[dict[str, Any]]) -> None:
        self._entries = entries
        self.removed: list[str] = []

    def invalidate_cache(self, path: str) -> None:
        raise NotImplementedError

    def ls(self, path: str, detail: bool) -> list[dict[str, Any]]:
        assert path == "bucket/ckpt" and detail
        return self._entries

    def rm_file(self, path: str) -> None:
        self.removed.append(path)


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)


IN_TOKYO = timezone(timedelta(hours=9))

# As the filesystems of fsspec have it: how a time is told.
TIMES: dict[str, Callable[[float], dict[str, Any]]] = {
    "local, seconds": lambda s: {"mtime": s},
    "whole seconds": lambda s: {"mtime": int(s)},
    "sftp": lambda s: {"mtime": at(s)},
    "s3": lambda s: {"LastModified": at(s)},
    "azure": lambda s: {"last_modified": at(s), "etag": "0x8D"},
    "gcs": lambda s: {"updated": at(s).strftime("%Y-%m-%dT%H:%M:%S.123Z"), "mtime": None},
    "text with an offset": lambda s: {"modified": at(s).astimezone(IN_TOKYO).isoformat()},
    "without a zone": lambda s: {"LastModified": at(s).replace(tzinfo=None)},
    "memory": lambda s: {"created": at(s)},
    "another zone": lambda s: {"LastModified": at(s).astimezone(IN_TOKYO)},
    "text that is no time first": lambda s: {"mtime": "long ago", "created": at(s)},
}


@pytest.mark.parametrize("kind", list(TIMES))
@pytest.mark.parametrize("name", [SHARD, TEMPORARY[0]])
def test_sweep_understands_how_filesystems_tell_the_time(kind: str, name: str) -> None:
    for changed_s, expected in ((OLD_S, [name]), (YOUNG_S, [])):
        entry = {"name": f"bucket/ckpt/{name}", "type": "file", **TIMES[kind](changed_s)}
        fs = Listing([entry])
        assert sweep(fs, "bucket/ckpt", [], now_s=NOW_S) == expected
        assert fs.removed == [f"bucket/ckpt/{name}" for name in expected]


@pytest.mark.parametrize(
    "time",
    [{}, {"mtime": None}, {"mtime": "long ago"}, {"mtime": True}, {"mtime": []}, {"size": 0}],
    ids=str,
)
@pytest.mark.parametrize("name", [SHARD, TEMPORARY[0]])
def test_sweep_leaves_what_has_no_time(time: dict[str, Any], name: str) -> None:
    fs = Listing([{"name": f"bucket/ckpt/{name}", "type": "file", **time}])
    assert sweep(fs, "bucket/ckpt", [], now_s=NOW_S) == []
    assert fs.removed == []
