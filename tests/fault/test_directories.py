"""Directories that cannot be made or written to, that others make, or that are not empty."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from mpwriter import MPFsspecWriter
from mpwriter.errors import CheckpointExistsError, StorageError
from tests.fakes import FaultPlan
from tests.saves import assert_holds, failure_of, names_in, save, small_state


def failed_save(place: str | Path, **options: Any) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        save(place, small_state(1), **options)
    error = failure_of(caught.value)
    assert str(error) in str(caught.value)
    return error


# -- made by others, late to be seen ------------------------------------------------------------


def test_save_succeeds_when_another_process_makes_the_directory(
    checkpoint_dir: Path, place: str, plan: FaultPlan
) -> None:
    """B13: makedirs raises FileExistsError although exist_ok, and nobody sees it for 0.5 s."""
    plan.add("makedirs", errno=errno.EEXIST, times=1, after=True)
    for op in ("info", "exists", "isdir"):
        plan.add(op, checkpoint_dir.name, for_s=0.5, absent=True)
    save(place, small_state(1), **plan.options)
    assert [call.result for call in plan.calls("makedirs")] == ["FileExistsError"]
    assert_holds(checkpoint_dir, small_state(1))


def test_save_raises_when_the_directory_never_appears(
    checkpoint_dir: Path, place: str, plan: FaultPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B13: the wait for it has an end."""
    monkeypatch.setattr("mpwriter._storage._VISIBLE_S", 0.2)
    plan.add("makedirs", errno=errno.EEXIST)
    plan.add("info", checkpoint_dir.name, absent=True)
    error = failed_save(place, **plan.options)
    assert isinstance(error, StorageError)
    assert error.errno == errno.EEXIST
    assert str(checkpoint_dir) in str(error)


# -- left over from something else --------------------------------------------------------------


def test_save_succeeds_when_there_is_junk(checkpoint_dir: Path) -> None:
    """B15: temporary files and shards of saves that never ended, of ours and of stock."""
    checkpoint_dir.mkdir()
    junk = [
        ".metadata.tmp",
        ".metadata.deadbeef.tmp",
        "__0_0.distcp",
        "__0_1.deadbeef.distcp",
        ".__0_0.deadbeef.distcp.deadbeef.tmp",
        "notes.txt",
    ]
    for name in junk:
        (checkpoint_dir / name).write_bytes(b"junk")
    save(checkpoint_dir, small_state(1))
    assert_holds(checkpoint_dir, small_state(1))
    assert (checkpoint_dir / "notes.txt").read_bytes() == b"junk"
    for path in checkpoint_dir.glob("__0_*"):
        assert path.read_bytes() == b"junk" or path.name not in junk, (
            "a new shard, a name of its own"
        )


@pytest.mark.parametrize("content", ["", "inside"])
def test_save_raises_when_a_directory_is_called_metadata(
    checkpoint_dir: Path, content: str
) -> None:
    """B15: nothing is moved into it, and no shard is left."""
    (checkpoint_dir / ".metadata" / content).mkdir(parents=True)
    before = names_in(checkpoint_dir)
    error = failed_save(checkpoint_dir)
    assert isinstance(error, StorageError)
    assert error.errno == errno.EISDIR
    assert f"{checkpoint_dir}/.metadata" in str(error)
    assert names_in(checkpoint_dir) == before


def test_save_refuses_before_it_touches_anything_when_it_may_not_overwrite(
    checkpoint_dir: Path, place: str, plan: FaultPlan
) -> None:
    """B05: bytes and times of the old files are as before, and no file is opened anywhere."""
    save(checkpoint_dir, small_state(7))

    def facts() -> list[Any]:
        files = [checkpoint_dir / name for name in names_in(checkpoint_dir)]
        return [(p, p.stat().st_mtime_ns, p.stat().st_ino, p.read_bytes()) for p in files]

    before = facts()
    error = failed_save(place, overwrite=False, **plan.options)
    assert isinstance(error, CheckpointExistsError)
    assert isinstance(error, RuntimeError) and isinstance(error, FileExistsError)
    assert str(checkpoint_dir) in str(error)
    assert facts() == before
    assert {call.op for call in plan.calls()} <= {"info", "exists"}
    # A directory without a checkpoint is no reason to refuse.
    (checkpoint_dir / ".metadata").unlink()
    save(checkpoint_dir, small_state(2), overwrite=False)
    assert_holds(checkpoint_dir, small_state(2))


def test_save_raises_when_it_cannot_know_whether_there_is_a_checkpoint(
    checkpoint_dir: Path, place: str, plan: FaultPlan
) -> None:
    """B05: where looking is forbidden, nothing is overwritten."""
    plan.add("info", ".metadata", errno=errno.EACCES)
    error = failed_save(place, overwrite=False, **plan.options)
    assert isinstance(error, StorageError)
    assert error.errno == errno.EACCES
    assert not plan.calls("open")


# -- that cannot be used ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
@pytest.mark.parametrize("op", ["makedirs", "open"])
def test_save_names_the_path_when_it_may_not_write_there(
    checkpoint_dir: Path, place: str, plan: FaultPlan, op: str, number: int
) -> None:
    """F18: a read-only place; raised from save, with the path, at once."""
    plan.add(op, errno=number)
    error = failed_save(place, **plan.options)
    assert isinstance(error, StorageError)
    assert error.errno == number
    assert str(checkpoint_dir) in str(error)
    assert error.path is not None and error.path.startswith(str(checkpoint_dir))


@pytest.mark.parametrize("place", ["/proc/mpwriter/checkpoint", "/sys/mpwriter"])
def test_save_names_the_path_when_the_kernel_makes_no_directory_there(place: str) -> None:
    """F18: places that are read-only to everybody, root too."""
    error = failed_save(place)
    assert isinstance(error, StorageError)
    assert error.errno in (errno.EPERM, errno.EACCES, errno.ENOENT, errno.EROFS)
    assert place in str(error)


@pytest.mark.parametrize("below", ["", "below"])
def test_save_names_the_path_when_it_is_a_file(tmp_path: Path, below: str) -> None:
    """F18: a file is in the way; it is left alone."""
    file = tmp_path / "file"
    file.write_bytes(b"precious")
    error = failed_save(file / below)
    assert isinstance(error, StorageError)
    assert error.errno in (errno.ENOTDIR, errno.EEXIST)
    assert str(file / below) in str(error)
    assert file.read_bytes() == b"precious"


@pytest.mark.parametrize("place", ["{}/deep/nested/checkpoint", "file://{}/deep/nested/checkpoint"])
@pytest.mark.parametrize("auto_mkdir", [True, False])
def test_save_makes_missing_parents(tmp_path: Path, place: str, auto_mkdir: bool) -> None:
    """F18: also where fsspec's local filesystem is told not to."""
    save(place.format(tmp_path), small_state(1), auto_mkdir=auto_mkdir)
    assert_holds(tmp_path / "deep/nested/checkpoint", small_state(1))


def test_save_names_the_path_when_the_directory_vanishes(
    checkpoint_dir: Path, place: str, plan: FaultPlan
) -> None:
    """B07: somebody removes the directory in the middle of the save."""
    plan.add("mv", "__0_0.*", errno=errno.ENOENT)
    error = failed_save(place, **plan.options)
    assert isinstance(error, StorageError)
    assert error.errno == errno.ENOENT
    assert str(checkpoint_dir) in str(error)
    assert names_in(checkpoint_dir) == []


# -- names and modes ----------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_files_have_the_mode_that_the_umask_gives(checkpoint_dir: Path, umask: int) -> None:
    """Invariant 13: the trainer's at the time of the save, though the workers are older."""
    save(checkpoint_dir, small_state(0))
    before = os.umask(umask)
    try:
        save(checkpoint_dir, small_state(1))
    finally:
        os.umask(before)
    modes = {name: (checkpoint_dir / name).stat().st_mode for name in names_in(checkpoint_dir)}
    assert len(modes) == 3 and ".metadata" in modes
    assert {mode & 0o777 for mode in modes.values()} == {0o666 & ~umask}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_relative_paths_count_from_the_directory_of_the_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 13: one writer, the trainer moves about between its making and its saves."""
    folders = [tmp_path / name for name in ("made", "first", "second")]
    for folder in folders:
        folder.mkdir()
    monkeypatch.chdir(folders[0])
    writer = MPFsspecWriter("relative/checkpoint", num_workers=2)
    for number, folder in enumerate(folders[1:]):
        monkeypatch.chdir(folder)
        dcp.save(small_state(number), storage_writer=writer, no_dist=True)
    for number, folder in enumerate(folders[1:]):
        assert_holds(folder / "relative/checkpoint", small_state(number))
    assert names_in(folders[0]) == []


def test_save_succeeds_when_the_working_directory_is_gone(
    checkpoint_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 13: an absolute path needs none."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    save(checkpoint_dir, {"x": torch.ones(3)})
    assert_holds(checkpoint_dir, {"x": torch.ones(3)})
