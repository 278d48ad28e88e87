"""The disk that the replay crashes: what a power loss leaves of files and names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.recording import Operation
from tests.replay_disk import Disk, Tree, put_on_disk, tree_of

OLD: Tree = {"d": None, "d/a": b"old"}


def crashed(before: Tree, *operations: Operation) -> list[Tree]:
    disk = Disk(before)
    for operation in operations:
        disk.apply(operation)
    trees: list[Tree] = []
    for tree in disk.after_power_loss():
        if tree not in trees:
            trees.append(tree)
    assert disk.tree() in trees
    return trees


def written(path: str, content: bytes, *, handle: str = "1") -> list[Operation]:
    half = len(content) // 2
    return [
        Operation("open", path, handle=handle),
        Operation("write", path, handle=handle, chunk=content[:half]),
        Operation("write", path, handle=handle, offset=half, chunk=content[half:]),
    ]


def synced(path: str) -> Operation:
    return Operation("fsync", path)


def test_what_was_there_before_is_durable() -> None:
    assert crashed(OLD) == [OLD]


def lost(content: bytes, synced: bytes = b"", *, kept: bytes | None = None) -> set[bytes]:
    """What may be there of bytes after the last sync: all, none, half, zeros, zeros in between."""
    sixth = len(content) // 6
    found = [content, content[: len(content) // 2], bytes(len(content))]
    found.append(content[:sixth] + bytes(sixth) + content[2 * sixth :])
    return {synced + tail for tail in found} | {synced if kept is None else kept}


def test_unsynced_bytes_are_lost_half_there_or_zeros() -> None:
    trees = crashed(OLD, *written("d/b", b"tiding"), synced("d"))
    contents = {tree["d/b"] for tree in trees}
    assert contents == {b"tiding", b"", b"tid", bytes(6), b"t\0ding"}
    assert contents == lost(b"tiding")


def test_bytes_after_the_last_sync_are_lost_alone() -> None:
    more = Operation("write", "d/b", handle="1", offset=4, chunk=b"tiding")
    trees = crashed(OLD, *written("d/b", b"news"), synced("d/b"), synced("d"), more)
    assert {tree["d/b"] for tree in trees} == lost(b"tiding", b"news")


def test_file_written_over_holds_the_old_bytes_or_none() -> None:
    trees = crashed(OLD, *written("d/a", b"tiding"))
    assert {tree["d/a"] for tree in trees} == lost(b"tiding", kept=b"old")


def test_name_is_lost_when_only_the_file_is_synced() -> None:
    trees = crashed(OLD, *written("d/b", b"news"), synced("d/b"))
    assert trees == [{**OLD, "d/b": b"news"}, OLD]


def test_rename_of_an_unsynced_file_leaves_an_empty_one() -> None:
    rename = Operation("rename", "d/b", "d/a")
    trees = crashed(OLD, *written("d/b", b"tiding"), rename, synced("d"))
    assert {tree["d/a"] for tree in trees} == lost(b"tiding")
    assert not [tree for tree in trees if "d/b" in tree]


def test_rename_is_all_or_nothing_when_the_file_is_synced() -> None:
    rename = Operation("rename", "d/b", "d/a")
    trees = crashed(OLD, *written("d/b", b"news"), synced("d/b"), synced("d"), rename)
    assert trees == [{"d": None, "d/a": b"news"}, {**OLD, "d/b": b"news"}]


@pytest.mark.parametrize("number", [2, 9])
def test_changes_of_names_are_lost_in_any_order(number: int) -> None:
    before: Tree = {"d": None, **{f"d/{n}": b"" for n in range(number)}}
    trees = crashed(before, *(Operation("unlink", f"d/{n}") for n in range(number)))
    left = [{path for path in tree if path != "d"} for tree in trees]
    for n in range(number):
        assert {f"d/{n}"} in left, "all the others were removed"
        assert {f"d/{other}" for other in range(number) if other != n} in left
        assert {f"d/{other}" for other in range(n, number)} in left
        assert {f"d/{other}" for other in range(n)} in left


def test_new_directory_takes_along_what_is_in_it_when_it_is_lost() -> None:
    made = [Operation("mkdir", "e"), *written("e/b", b"news"), synced("e/b"), synced("e")]
    assert crashed({}, *made) == [{"e": None, "e/b": b"news"}, {}]
    assert crashed({}, *made, synced("")) == [{"e": None, "e/b": b"news"}]


def test_bytes_of_several_files_are_lost_independently() -> None:
    operations = [*written("d/b", b"tiding"), *written("d/c", b"TIDING", handle="2"), synced("d")]
    trees = crashed(OLD, *operations)
    assert len(trees) == 25


def test_bytes_of_many_files_are_lost_together_or_alone() -> None:
    operations = [synced("d")]
    for name in "bcefg":
        operations[:0] = written(f"d/{name}", b"news", handle=name)
    found = [tuple(tree[f"d/{name}"] for name in "bcefg") for tree in crashed(OLD, *operations)]
    for content in (b"", b"ne", bytes(4)):
        assert (content,) * 5 in found
        assert (content, *[b"news"] * 4) in found
        assert (*[b"news"] * 4, content) in found


def test_truncate_is_lost_when_it_is_not_synced() -> None:
    operations = [*written("d/b", b"news"), synced("d/b"), synced("d")]
    operations.append(Operation("truncate", "d/b", handle="1", offset=2))
    assert {tree["d/b"] for tree in crashed(OLD, *operations)} >= {b"ne", b"news"}


def test_writes_go_to_the_file_that_was_opened_when_its_name_is_another_s() -> None:
    opened = written("d/b", b"news")[0]
    late = Operation("write", "d/b", handle="1", chunk=b"late")
    disk = Disk(OLD)
    for operation in (opened, Operation("unlink", "d/b"), *written("d/b", b"new", handle="2")):
        disk.apply(operation)
    disk.apply(late)
    assert disk.tree()["d/b"] == b"new"


def test_tree_comes_back_when_it_is_put_on_disk(tmp_path: Path) -> None:
    tree: Tree = {"d": None, "d/a": b"one", "d/e": None, "d/e/.b": b"two", "f": b""}
    put_on_disk(tree, tmp_path)
    assert tree_of(tmp_path) == tree
