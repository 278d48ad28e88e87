"""A disk in memory: what is on it after some operations, and what a crash may leave of that.

A process that is killed leaves what all programs see. A loss of power leaves less:

    bytes of a file       as of its last fsync. Later ones are there, missing, half there, or all
                          or some zeros: ext4 and XFS give names to files whose bytes never came
    names in a directory  as of the directory's last fsync, and any of the later changes, in
                          order or not

An fsync of a file says nothing of its name. Source: fsync(2), rename(2).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Union

from tests.fakes.recording import Operation

__all__ = ["Disk", "Tree", "put_on_disk", "tree_of"]

Tree = dict[str, Union[bytes, None]]
"""Files by path below some folder; None stands for a directory."""

# Up to so many changes of names every choice of them is tried, beyond that the likely ones.
_MAX_FREE_CHANGES = 8
# Up to so many files without fsync every mixture of what they may hold is tried.
_MAX_FREE_FILES = 3


class _File:
    def __init__(self, content: bytes) -> None:
        self._now = bytearray(content)
        self._kept = content
        self._known: tuple[bytes, ...] | None = (content,)

    def write(self, offset: int, chunk: bytes) -> None:
        self._now.extend(bytes(max(0, offset - len(self._now))))
        self._now[offset : offset + len(chunk)] = chunk
        self._known = None

    def truncate(self, size: int) -> None:
        self._now[:] = self._now[:size].ljust(size, b"\0")
        self._known = None

    def sync(self) -> None:
        self._kept = self.now
        self._known = (self._kept,)

    @property
    def now(self) -> bytes:
        """What the programs see."""
        return self.after_power_loss()[0]

    def after_power_loss(self) -> tuple[bytes, ...]:
        """What it may hold; what the programs see is the first."""
        if self._known is None:
            self._known = self._after_power_loss()
        return self._known

    def _after_power_loss(self) -> tuple[bytes, ...]:
        now, kept = bytes(self._now), self._kept
        same = _num_common(now, kept)
        half = now[: (same + len(now)) // 2]
        zeros = now[:same].ljust(len(now), b"\0")
        sixth = max(0, len(now) - same) // 6
        hole = now[: same + sixth] + bytes(sixth) + now[same + 2 * sixth :]
        return tuple(dict.fromkeys((now, kept, half, zeros, hole)))


def _num_common(one: bytes, other: bytes) -> int:
    """How many bytes they have in common from the beginning."""
    if one.startswith(other) or other.startswith(one):
        return min(len(one), len(other))
    return next(n for n, (a, b) in enumerate(zip(one, other)) if a != b)


class _Directory:
    def __init__(self) -> None:
        self.now: dict[str, _Node] = {}
        self._kept: dict[str, _Node] = {}
        self._changes: list[Mapping[str, _Node | None]] = []

    def change(self, names: Mapping[str, _Node | None]) -> None:
        self._changes.append(names)
        _apply(self.now, names)

    def sync(self) -> None:
        self._kept = dict(self.now)
        self._changes.clear()

    def after_power_loss(self) -> list[dict[str, _Node]]:
        found: dict[frozenset[tuple[str, int]], dict[str, _Node]] = {}
        for chosen in _choices(len(self._changes)):
            names = dict(self._kept)
            for number in chosen:
                _apply(names, self._changes[number])
            found.setdefault(frozenset((name, id(node)) for name, node in names.items()), names)
        return list(found.values())


_Node = Union[_File, _Directory]


def _apply(names: dict[str, _Node], change: Mapping[str, _Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _choices(number: int) -> Iterator[Sequence[int]]:
    """Which of so many changes a power loss leaves, the order kept."""
    if number <= _MAX_FREE_CHANGES:
        for kept in itertools.product((True, False), repeat=number):
            yield [n for n, keep in enumerate(kept) if keep]
        return
    every = range(number)
    for n in range(number + 1):
        yield every[:n]
        yield every[n:]
    for n in every:
        yield [n]
        yield [other for other in every if other != n]


class Disk:
    """Begins with a tree that is durable."""

    def __init__(self, tree: Tree) -> None:
        self._root = _Directory()
        self._directories = [self._root]
        self._handles: dict[str, _File] = {}
        for path in sorted(tree):
            content = tree[path]
            folder, name = self._place(path)
            folder.change({name: self._new_directory() if content is None else _File(content)})
        for directory in self._directories:
            directory.sync()

    def apply(self, operation: Operation) -> None:
        getattr(self, f"_{operation.kind}")(operation)

    def tree(self) -> Tree:
        """What the programs see, and what they leave when all of them are killed."""
        found: Tree = {}
        for path, node in _walk(self._root, {id(d): d.now for d in self._directories}):
            found[path] = node.now if isinstance(node, _File) else None
        return found

    def after_power_loss(self) -> Iterator[Tree]:
        """Whatever may be left; some of it more than once."""
        choices = [directory.after_power_loss() for directory in self._directories]
        numbers = [id(directory) for directory in self._directories]
        seen = set()
        for chosen in itertools.product(*choices):
            nodes = dict(_walk(self._root, dict(zip(numbers, chosen, strict=True))))
            key = frozenset((path, id(node)) for path, node in nodes.items())
            if key in seen:
                continue
            seen.add(key)
            files = {id(node): node for node in nodes.values() if isinstance(node, _File)}
            for contents in _contents(files):
                yield {path: contents.get(id(node)) for path, node in nodes.items()}

    # -- operations ----------------------------------------------------------------------

    def _mkdir(self, operation: Operation) -> None:
        folder, name = self._place(operation.path)
        folder.change({name: self._new_directory()})

    def _open(self, operation: Operation) -> None:
        folder, name = self._place(operation.path)
        file = folder.now.get(name)
        if file is None:
            file = _File(b"")
            folder.change({name: file})
        assert isinstance(file, _File), operation
        file.truncate(0)
        self._handles[operation.handle] = file

    def _write(self, operation: Operation) -> None:
        # A pwrite goes to a descriptor of its own.
        file = self._handles.get(operation.handle) or self._find(operation.path)
        assert isinstance(file, _File), operation
        file.write(operation.offset, operation.chunk)

    def _truncate(self, operation: Operation) -> None:
        self._handles[operation.handle].truncate(operation.offset)

    def _close(self, operation: Operation) -> None:
        del self._handles[operation.handle]

    def _fsync(self, operation: Operation) -> None:
        node = self._find(operation.path)
        if node is not None:  # else a file that has lost its name
            node.sync()

    def _rename(self, operation: Operation) -> None:
        (folder, name), (target, new_name) = map(self._place, (operation.path, operation.target))
        assert folder is target, f"from one directory to another: {operation}"
        folder.change({name: None, new_name: folder.now[name]})

    def _unlink(self, operation: Operation) -> None:
        folder, name = self._place(operation.path)
        folder.change({name: None})

    _rmdir = _unlink

    def _new_directory(self) -> _Directory:
        self._directories.append(_Directory())
        return self._directories[-1]

    def _place(self, path: str) -> tuple[_Directory, str]:
        folder, _, name = path.rpartition("/")
        node = self._find(folder)
        assert isinstance(node, _Directory), path
        return node, name

    def _find(self, path: str) -> _Node | None:
        node: _Node | None = self._root
        for name in path.split("/") if path else ():
            node = node.now.get(name) if isinstance(node, _Directory) else None
        return node


def _walk(
    root: _Directory, names: Mapping[int, Mapping[str, _Node]]
) -> Iterator[tuple[str, _Node]]:
    """Everything below a directory, where `names` says what each directory holds."""
    for name, node in names[id(root)].items():
        yield name, node
        if isinstance(node, _Directory):
            for below, found in _walk(node, names):
                yield f"{name}/{below}", found


def _contents(files: Mapping[int, _File]) -> Iterator[dict[int, bytes | None]]:
    """What these files may hold, together."""
    options = {number: file.after_power_loss() for number, file in files.items()}
    unsure = [number for number, contents in options.items() if len(contents) > 1]
    whole: dict[int, bytes | None] = {number: contents[0] for number, contents in options.items()}
    if len(unsure) <= _MAX_FREE_FILES:
        for chosen in itertools.product(*(options[number] for number in unsure)):
            yield {**whole, **dict(zip(unsure, chosen, strict=True))}
        return
    for kind in range(max(len(options[number]) for number in unsure)):
        yield {**whole, **{n: options[n][min(kind, len(options[n]) - 1)] for n in unsure}}
    for number in unsure:
        for content in options[number][1:]:
            yield {**whole, number: content}


def tree_of(folder: Path) -> Tree:
    """What lies below a folder."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in folder.rglob("*")
    }


def put_on_disk(tree: Tree, folder: Path) -> None:
    """Make a tree below a folder that is there."""
    for path in sorted(tree):
        content = tree[path]
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)
