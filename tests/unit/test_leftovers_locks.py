"""Temporary files of the living and of the dead: locks, and the races for them."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from mpwriter._leftovers import LEFTOVER_AGE_S, Hold, sweep
from mpwriter._publish import temporary_name
from mpwriter._sink import Sink, open_sink
from tests.fakes import FaultPlan
from tests.saves import open_fds

REPOSITORY = Path(__file__).parents[2]
TOKEN = "0f3a9c2e"
SHARD = f"__0_0.{TOKEN}.distcp"
TEMPORARY = temporary_name(SHARD, TOKEN)
PAYLOAD = bytes(range(256)) * 100

# A writer in a process of its own: says when its file is open, and lives until it is killed.
_WRITER = """
import signal, sys
from fsspec.implementations.local import LocalFileSystem
from mpwriter._sink import open_sink
sink = open_sink(LocalFileSystem(), sys.argv[1], token=sys.argv[2], sync_files=False)
sink.write(b"half of it")
print("open", flush=True)
signal.pause()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ckpt").mkdir()
    return tmp_path / "ckpt"


@pytest.fixture
def writer(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _WRITER, str(folder / SHARD), TOKEN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
        process.kill()


def open_here(folder: Path, fs: Any = None) -> Sink:
    fs = fs or LocalFileSystem()
    return open_sink(fs, str(folder / SHARD), token=TOKEN, sync_files=False)


def swept(folder: Path, **options: Any) -> list[str]:
    return sweep(LocalFileSystem(), str(folder), [], **options)


# -- the living and the dead --------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_sweep_removes_a_file_when_its_writer_is_killed(
    folder: Path, writer: subprocess.Popen[str], number: int
) -> None:
    """B10: at once, and not before."""
    for _ in range(3):
        assert swept(folder) == []
    assert os.listdir(folder) == [TEMPORARY]
    writer.send_signal(number)
    writer.wait(30)
    assert swept(folder) == [TEMPORARY]
    assert os.listdir(folder) == []


def test_sweep_leaves_a_file_when_its_writer_is_stopped(
    folder: Path, writer: subprocess.Popen[str]
) -> None:
    """A frozen process, as of a suspended job, is alive, and its file may be old."""
    writer.send_signal(signal.SIGSTOP)
    os.utime(folder / TEMPORARY, (1000.0, 1000.0))
    assert swept(folder) == []
    assert os.listdir(folder) == [TEMPORARY]


def test_sweep_leaves_a_file_until_it_is_published(folder: Path) -> None:
    sink = open_here(folder)
    for _ in range(3):
        sink.write(PAYLOAD)
        assert swept(folder) == []
    sink.publish()
    assert swept(folder) == []
    assert os.listdir(folder) == [SHARD]
    assert (folder / SHARD).read_bytes() == 3 * PAYLOAD


def test_sweep_leaves_a_file_between_its_close_and_its_rename(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is not the written file's own, which is closed before the rename."""
    found: list[list[str]] = []
    replace = os.replace

    def look_and_replace(source: str, target: str) -> None:
        found.append(swept(folder))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look_and_replace)
    sink = open_here(folder)
    sink.write(PAYLOAD)
    sink.publish()
    assert found == [[]]
    assert (folder / SHARD).read_bytes() == PAYLOAD


def test_sweep_removes_what_a_discarded_sink_could_not(folder: Path, tmp_path: Path) -> None:
    """Its lock is gone although the file is still there."""

    class Stubborn(LocalFileSystem):
        def rm_file(self, path: str) -> None:
            raise FileNotFoundError(path)

    sink = open_here(folder, Stubborn())
    sink.discard()
    assert os.listdir(folder) == [TEMPORARY]
    assert swept(folder) == [TEMPORARY]


def test_hold_keeps_no_descriptor_when_the_file_is_settled(folder: Path, tmp_path: Path) -> None:
    """Invariant 10: published, discarded, dropped, or failed at any point of it."""
    plan = FaultPlan(tmp_path / "plan")
    faulty = fsspec.filesystem("fault", **plan.options)
    before = open_fds()
    for op in (None, "write", "flush", "close", "mv"):
        plan.clear()
        if op is not None:
            plan.add(op, SHARD, errno=errno.EIO)
        sink = open_here(folder, faulty)
        assert open_fds() == before + 2, "the file and its lock"
        try:
            sink.write(PAYLOAD)
            sink.publish()
        except OSError:
            sink.discard()
        assert open_fds() == before, op
    plan.clear()
    open_here(folder, faulty).discard()
    sink = open_here(folder, faulty)
    del sink
    assert open_fds() == before
    plan.add("open", SHARD, errno=errno.EACCES)
    with pytest.raises(PermissionError):
        open_here(folder, faulty)
    assert open_fds() == before
    (folder / SHARD).unlink()
    assert os.listdir(folder) == []


# -- without locks ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP])
def test_sweep_goes_by_age_when_there_are_no_locks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = open_fds()
    sink = open_here(folder)
    sink.write(PAYLOAD)
    now_s = os.stat(folder / TEMPORARY).st_mtime
    assert swept(folder, now_s=now_s + LEFTOVER_AGE_S - 60) == []
    sink.publish()
    assert (folder / SHARD).read_bytes() == PAYLOAD
    assert open_fds() == before

    (folder / SHARD).unlink()
    (folder / TEMPORARY).touch()
    now_s = os.stat(folder / TEMPORARY).st_mtime
    assert swept(folder, now_s=now_s + LEFTOVER_AGE_S - 60) == []
    assert swept(folder, now_s=now_s + LEFTOVER_AGE_S + 60) == [TEMPORARY]
    assert os.listdir(folder) == []


@pytest.mark.parametrize("seen", [True, False])
def test_sweep_of_one_rank_leaves_the_files_of_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    """Invariant 17: they are at work, maybe on machines whose locks are not seen here."""
    names = [f"__{n}_0.{TOKEN}.distcp" for n in (1, 2, 11, 12)] + [
        f"__{n}.metadata" for n in (1, 2, 11)
    ]
    files = [temporary_name(name, TOKEN) for name in [*names, ".metadata"]]
    for name in files:
        (folder / name).touch()
    own = [temporary_name(name, TOKEN) for name in (f"__1_0.{TOKEN}.distcp", "__1.metadata")]
    if not seen:
        monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
    assert sorted(swept(folder, rank=1)) == sorted(own)
    assert sorted(os.listdir(folder)) == sorted(set(files) - set(own))
    later_s = os.stat(folder / files[-1]).st_mtime + LEFTOVER_AGE_S + 60
    assert sorted(swept(folder, rank=1, now_s=later_s)) == sorted(set(files) - set(own))


def test_hold_lets_a_file_pass_when_it_is_made_later(folder: Path) -> None:
    """Some filesystems make their file only when it is closed; then there is nothing to lock."""

    class Later:
        def fileno(self) -> int:
            raise OSError("no file yet")

    hold = Hold()
    assert hold.take(str(folder / "not there"), Later())
    hold.release()
    hold.release()
    assert os.listdir(folder) == []
