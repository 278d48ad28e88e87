"""The record of every change to a folder, of all processes in one order.

    with Recording(tmp_path / "recording", disk) as recording:
        save(f"recorded://{disk}/checkpoint", state, **recording.options)
    recording.operations()

Every change below the folder `disk` is carried out and written down under one lock: the order of
the record is the order of the changes. The bytes of a file are recorded where they reach the
kernel, beneath Python's buffer, in small pieces. What is done to descriptors and paths without the
filesystem (fsync, rename, unlink, pwrite) goes through functions of `os`, so these are replaced: in
the trainer for as long as the `with` lasts, in a worker from its first recorded filesystem on.

recorded:// and recordedfault:// are in `tests.fakes.recorded`. Importable in a worker.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Operation", "Recording", "covered", "follow", "turn"]


class Operation(NamedTuple):
    kind: str  # mkdir, rmdir, open, write, truncate, close, fsync, rename, unlink
    path: str  # below the recorded folder, whose own path is ""
    target: str = ""  # of a rename
    handle: str = ""  # tells the openings of files apart; of a pwrite ""
    offset: int = 0  # of a write; of a truncate the new size
    chunk: bytes = b""
    pid: int = 0


class _Log:
    """The record of one folder, as this process sees it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.root = Path(folder, "root").read_text()

    def covers(self, path: str) -> bool:
        return path == self.root or path.startswith(f"{self.root}/")

    @contextlib.contextmanager
    def turn(self) -> Iterator[Callable[..., None]]:
        """Nobody else changes anything meanwhile; gives what writes down one operation."""
        # Opened every time: a lock belongs to the opening, and the tests look for descriptors.
        fd = os.open(f"{self._folder}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield partial(self._append, fd)
        finally:
            os.close(fd)

    def _append(self, fd: int, kind: str, path: str, target: str = "", **details: Any) -> None:
        operation = Operation(
            kind, self._below(path), self._below(target), pid=os.getpid(), **details
        )
        line = pickle.dumps(operation)
        assert os.write(fd, line) == len(line)

    def _below(self, path: str) -> str:
        return path[len(self.root) + 1 :]


_logs: dict[str, _Log] = {}


@contextlib.contextmanager
def turn(path: str) -> Iterator[Callable[..., None]]:
    """The turn of whatever record covers a path; what is elsewhere needs none."""
    for log in list(_logs.values()):
        if log.covers(path):
            with log.turn() as note:
                yield note
            return
    yield lambda *args, **details: None


def covered(path: str) -> bool:
    """Whether a path is in a recorded folder."""
    return any(log.covers(path) for log in list(_logs.values()))


def _absolute(path: Any, dir_fd: int | None = None) -> str:
    folder = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
    return os.path.normpath(os.path.join(folder, os.fsdecode(path)))


def _syncing(name: str) -> Callable[..., Any]:
    real = getattr(os, name)

    def sync(fd: Any) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()
        path = os.readlink(f"/proc/self/fd/{number}")
        with turn(path) as note:
            real(fd)
            note("fsync", path)

    return sync


def _pwrite(fd: int, chunk: Any, offset: int) -> int:
    path = os.readlink(f"/proc/self/fd/{fd}")
    with turn(path) as note:
        taken = _REAL["pwrite"](fd, chunk, offset)
        note("write", path, offset=offset, chunk=bytes(memoryview(chunk)[:taken]))
    return int(taken)


def _changing(name: str, kind: str) -> Callable[..., Any]:
    real = getattr(os, name)

    def change(path: Any, *args: Any, dir_fd: int | None = None) -> None:
        whole = _absolute(path, dir_fd)
        with turn(whole) as note:
            real(path, *args, dir_fd=dir_fd)
            note(kind, whole)

    return change


def _renaming(name: str) -> Callable[..., Any]:
    real = getattr(os, name)

    def rename(
        src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        source, target = _absolute(src, src_dir_fd), _absolute(dst, dst_dir_fd)
        with turn(source) as note:
            real(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            note("rename", source, target)

    return rename


_STAND_INS = {
    "fsync": _syncing("fsync"),
    "fdatasync": _syncing("fdatasync"),
    "pwrite": _pwrite,
    "rename": _renaming("rename"),
    "replace": _renaming("replace"),
    "remove": _changing("remove", "unlink"),
    "unlink": _changing("unlink", "unlink"),
    "mkdir": _changing("mkdir", "mkdir"),
    "rmdir": _changing("rmdir", "rmdir"),
}
_REAL = {name: getattr(os, name) for name in _STAND_INS}


def follow(folder: str) -> None:
    """From now on this process writes down what it changes."""
    if folder not in _logs:
        log = _Log(folder)
        for other in [name for name, known in _logs.items() if known.root == log.root]:
            del _logs[other]  # a worker is not told when a recording ends
        _logs[folder] = log
    for name, stand_in in _STAND_INS.items():
        setattr(os, name, stand_in)


def _leave(folder: str) -> None:
    _logs.pop(folder, None)
    if not _logs:
        for name, real in _REAL.items():
            setattr(os, name, real)


class Recording:
    """One record.

    Args:
        folder: where the record is kept; not in `root`.
        root: the folder whose changes are recorded; None where another process has begun it.
    """

    def __init__(self, folder: Path, root: Path | None = None) -> None:
        self._folder = folder
        if root is not None:
            folder.mkdir(parents=True)
            (folder / "root").write_text(str(root))
            (folder / "log").touch()

    @property
    def options(self) -> dict[str, str]:
        """Storage options that make a recorded filesystem write to this record."""
        return {"recording": str(self._folder)}

    def __enter__(self) -> Recording:
        follow(str(self._folder))
        return self

    def __exit__(self, *exc_info: object) -> None:
        _leave(str(self._folder))

    def operations(self) -> list[Operation]:
        """What has been done so far, by any process."""
        found = []
        with open(self._folder / "log", "rb") as log:
            while True:
                try:
                    found.append(pickle.load(log))
                except EOFError:
                    return found
