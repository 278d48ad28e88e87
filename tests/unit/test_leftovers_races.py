"""Races for a temporary file between its writer and a sweeper."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from mpwriter._leftovers import sweep
from mpwriter._publish import temporary_name
from mpwriter._sink import Sink, open_sink
from tests.saves import open_fds

TOKEN = "0f3a9c2e"
SHARD = f"__0_0.{TOKEN}.distcp"
TEMPORARY = temporary_name(SHARD, TOKEN)
PAYLOAD = bytes(range(256)) * 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ckpt").mkdir()
    return tmp_path / "ckpt"


def open_here(folder: Path, fs: Any = None) -> Sink:
    fs = fs or LocalFileSystem()
    return open_sink(fs, str(folder / SHARD), token=TOKEN, sync_files=False)


def swept(folder: Path) -> list[str]:
    return sweep(LocalFileSystem(), str(folder), [])


class Meddled(LocalFileSystem):
    """Somebody sweeps just after the file was made, the first few times."""

    cachable = False

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.swept: list[str] = []

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        file = super()._open(path, mode, **kwargs)
        if self.times and "w" in mode:
            self.times -= 1
            self.swept += sweep(LocalFileSystem(), os.path.dirname(path), [])
        return file


@pytest.mark.parametrize("times", [1, 3])
def test_published_file_is_whole_when_it_was_swept_before_it_was_locked(
    folder: Path, times: int
) -> None:
    fs = Meddled(times)
    before = open_fds()
    sink = open_here(folder, fs)
    assert fs.swept == [TEMPORARY] * times
    sink.write(PAYLOAD)
    sink.publish()
    assert os.listdir(folder) == [SHARD]
    assert (folder / SHARD).read_bytes() == PAYLOAD
    assert open_fds() == before


def meddle_at_lock(
    monkeypatch: pytest.MonkeyPatch, meddle: Callable[[int], None]
) -> list[BaseException | None]:
    """Call `meddle(n)` before the nth flock; what came of each call."""
    flock = fcntl.flock
    results: list[BaseException | None] = []

    def meddled(fd: int, operation: int) -> None:
        number = len(results)
        results.append(None)
        try:
            meddle(number)
            flock(fd, operation)
        except OSError as exc:
            results[number] = exc
            raise

    monkeypatch.setattr(fcntl, "flock", meddled)
    return results


def test_published_file_is_whole_when_it_was_swept_while_it_was_being_locked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer has opened its file for the lock, and the sweeper is faster."""

    def remove(number: int) -> None:
        if number == 0:
            os.remove(folder / TEMPORARY)

    meddle_at_lock(monkeypatch, remove)
    sink = open_here(folder)
    monkeypatch.undo()
    assert swept(folder) == [], "the file that is written now is locked"
    sink.write(PAYLOAD)
    sink.publish()
    assert os.listdir(folder) == [SHARD]
    assert (folder / SHARD).read_bytes() == PAYLOAD


def test_published_file_is_whole_when_a_sweeper_has_it_locked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer waits for the end of the sweep, and then begins afresh."""
    monkeypatch.setattr("mpwriter._leftovers._LOCK_PAUSE_S", 0.0)
    sweeper = -1

    def sweep_slowly(number: int) -> None:
        nonlocal sweeper
        if number == 0:
            sweeper = os.open(folder / TEMPORARY, os.O_RDONLY)
            real(sweeper, fcntl.LOCK_EX)
        elif number == 3:
            os.remove(folder / TEMPORARY)
            os.close(sweeper)

    real = fcntl.flock
    results = meddle_at_lock(monkeypatch, sweep_slowly)
    sink = open_here(folder)
    monkeypatch.undo()
    assert [type(result) for result in results] == [BlockingIOError] * 3 + [type(None)] * 2
    assert swept(folder) == []
    sink.write(PAYLOAD)
    sink.publish()
    assert (folder / SHARD).read_bytes() == PAYLOAD


def test_open_does_not_wait_for_ever_when_somebody_keeps_the_lock(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stuck writer of an earlier try: the new one writes over its file."""
    monkeypatch.setattr("mpwriter._leftovers._LOCK_PAUSE_S", 0.0)
    stuck = open_here(folder)
    sink = open_here(folder)
    sink.write(PAYLOAD)
    assert swept(folder) == []
    sink.publish()
    assert (folder / SHARD).read_bytes() == PAYLOAD
    stuck.discard()
    assert os.listdir(folder) == [SHARD]


def test_sweep_leaves_the_published_file_when_it_was_published_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweeper has opened the temporary file; then its writer gives it its name."""
    sink = open_here(folder)
    sink.write(PAYLOAD)
    meddle_at_lock(monkeypatch, lambda number: sink.publish())
    swept(folder)
    assert os.listdir(folder) == [SHARD]
    assert (folder / SHARD).read_bytes() == PAYLOAD
