"""What is swept: names, metadata that names a shard, and where nothing can be listed."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from mpwriter._leftovers import LEFTOVER_AGE_S, sweep
from mpwriter._planning import shard_name
from mpwriter._publish import temporary_name
from mpwriter._storage import locate
from tests.fakes import FaultPlan

NOW_S = 1_800_000_000.0
YOUNG_S, OLD_S = NOW_S - LEFTOVER_AGE_S + 60, NOW_S - LEFTOVER_AGE_S - 60
TOKEN = "0f3a9c2e"
SAVE_ID = "0f3a9c2e-0000-4000-8000-000000000000"
SHARD = f"__0_1.{TOKEN}.distcp"

# What this package makes, by the functions that make the names.
TEMPORARY = [
    temporary_name(name, "deadbeef")
    for name in (
        ".metadata",
        "__0.metadata",
        "__12.metadata",
        shard_name(0, 0, SAVE_ID, safetensors=False),
        shard_name(13, 250, SAVE_ID, safetensors=False),
        shard_name(1, 2, SAVE_ID, safetensors=True),
    )
]
# What it does not make, or must not lose.
OF_OTHERS = [
    "notes.txt",
    ".metadata",
    ".metadata.tmp",  # stock's
    "__0.metadata.tmp",
    "__0_0.distcp",
    "__0_1.distcp",
    "__0_0.deadbeef.distcp.bak",
    "my__0_0.deadbeef.distcp",
    "__0_0.DEADBEEF.distcp",
    "__0_0.deadbee.distcp",
    "__0_0.notahexa.distcp",
    "__a_0.deadbeef.distcp",
    ".notes.deadbeef.tmp",
    ".metadata.deadbeef.tmp.old",  # moved aside: it may be the last copy
    ".__0_0.deadbeef.distcp.deadbeef.tmp.old",
    ".__0_0.distcp.deadbeef.tmp",
    ".__0_0.deadbeef.distcp.tmp",
    ".metadata.deadbeef.tmp~",
    ".metadata.DEADBEEF.tmp",
    ".metadata.deadbeefs.tmp",
    "x.metadata.deadbeef.tmp",
    "metadata.deadbeef.tmp",
    ".metadata.deadbeef.tmp\n",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ckpt").mkdir()
    return tmp_path / "ckpt"


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "plan")


def put(folder: Path, *names: str, changed_s: float = OLD_S, content: bytes = b"junk") -> None:
    for name in names:
        (folder / name).write_bytes(content)
        os.utime(folder / name, (changed_s, changed_s))


def swept(
    folder: Path,
    *named: str,
    protocol: str = "file",
    options: dict[str, Any] | None = None,
) -> list[str]:
    location = locate(f"{protocol}://{folder}", options or {})
    return sorted(sweep(location.fs, location.root, named, now_s=NOW_S))


# -- names --------------------------------------------------------------------------------------


def test_sweep_removes_temporary_files_at_once_when_nobody_holds_them(folder: Path) -> None:
    put(folder, *TEMPORARY, changed_s=NOW_S)
    assert swept(folder) == sorted(TEMPORARY)
    assert os.listdir(folder) == []


def test_sweep_leaves_what_has_another_name(folder: Path) -> None:
    """A user's files are never touched, however old."""
    put(folder, *OF_OTHERS)
    assert swept(folder) == []
    assert sorted(os.listdir(folder)) == sorted(OF_OTHERS)


@pytest.mark.parametrize("name", [*TEMPORARY, SHARD])
def test_sweep_leaves_what_is_no_file(folder: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    put(tmp_path, outside.name, content=b"precious")
    (folder / name).symlink_to(outside)
    os.utime(folder / name, (OLD_S, OLD_S), follow_symlinks=False)
    assert swept(folder) == []
    (folder / name).unlink()
    (folder / name).mkdir()
    os.utime(folder / name, (OLD_S, OLD_S))
    assert swept(folder) == []
    (folder / name).rmdir()
    os.mkfifo(folder / name)
    os.utime(folder / name, (OLD_S, OLD_S))
    assert swept(folder) == []
    assert os.listdir(folder) == [name]
    assert outside.read_bytes() == b"precious"


def test_sweep_looks_into_no_other_directory(folder: Path) -> None:
    (folder / "below").mkdir()
    put(folder / "below", SHARD, TEMPORARY[0])
    put(folder.parent, SHARD, TEMPORARY[0])
    assert swept(folder) == []


# -- metadata of single ranks --------------------------------------------------------------------


def _rank_metadata(*shards: str) -> bytes:
    return pickle.dumps(list(shards))


@pytest.mark.parametrize("protocol", ["file", "objectlike"])
def test_sweep_removes_what_ranks_committed_on_their_own_when_all_have_committed_together(
    folder: Path, protocol: str
) -> None:
    """No load would find it again. Also stock's, whose shards have no id."""
    shards = [SHARD, f"__1_0.{TOKEN}.distcp", "__2_0.distcp"]
    kept = f"__0_0.{TOKEN[::-1]}.distcp"
    put(folder, *shards, kept, changed_s=NOW_S)
    for rank, shard in enumerate(shards):
        put(folder, f"__{rank}.metadata", content=_rank_metadata(shard, kept), changed_s=NOW_S)
    removed = swept(folder, kept, protocol=protocol)
    assert removed == sorted([*shards, *(f"__{rank}.metadata" for rank in range(3))])
    assert os.listdir(folder) == [kept]


def test_sweep_leaves_the_metadata_of_other_ranks_when_one_has_committed_on_its_own(
    folder: Path,
) -> None:
    put(folder, SHARD)
    put(folder, "__1.metadata", content=_rank_metadata(SHARD))
    location = locate(str(folder), {})
    assert sweep(location.fs, location.root, [], rank=0, now_s=NOW_S) == []
    assert sorted(os.listdir(folder)) == sorted([SHARD, "__1.metadata"])


def test_sweep_leaves_metadata_of_a_rank_when_a_shard_of_it_cannot_be_removed(
    folder: Path, plan: FaultPlan
) -> None:
    """The next sweep finds the rest by it."""
    stuck, other = SHARD, f"__0_2.{TOKEN}.distcp"
    put(folder, stuck, other)
    put(folder, "__0.metadata", content=_rank_metadata(stuck, other))
    plan.add("rm", stuck, errno=errno.EACCES)
    assert swept(folder, protocol="fault", options=plan.options) == [other]
    assert sorted(os.listdir(folder)) == sorted([stuck, "__0.metadata"])
    assert swept(folder) == sorted([stuck, "__0.metadata"])


# -- shards -------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["file", "objectlike", "commitlike", "closelike"])
def test_sweep_removes_orphan_shards_when_they_are_old(folder: Path, protocol: str) -> None:
    old = [SHARD, f"__3_17.{TOKEN}.safetensors"]
    put(folder, *old)
    put(folder, f"__0_2.{TOKEN}.distcp", changed_s=YOUNG_S)
    put(folder, f"__0_3.{TOKEN}.distcp", changed_s=NOW_S + 3600)  # a clock that goes before
    assert swept(folder, protocol=protocol) == sorted(old)
    assert sorted(os.listdir(folder)) == [f"__0_{n}.{TOKEN}.distcp" for n in (2, 3)]


def test_sweep_goes_by_the_time_of_day_when_none_is_given(folder: Path) -> None:
    put(folder, SHARD, changed_s=1000.0)
    put(folder, f"__0_2.{TOKEN}.distcp")
    os.utime(folder / f"__0_2.{TOKEN}.distcp")
    location = locate(folder, {})
    assert sweep(location.fs, location.root, []) == [SHARD]


@pytest.mark.parametrize(
    ("metadata", "rank"), [(".metadata", None), ("__0.metadata", 1), ("__7.metadata", 7)]
)
def test_sweep_leaves_shards_that_a_metadata_file_names(
    folder: Path, metadata: str, rank: int | None
) -> None:
    """Of all ranks, or of a rank that saves on its own as this one does."""
    name = SHARD.encode()
    put(folder, SHARD, "__0_2.deadbeef.distcp")
    put(folder, metadata, content=b"\x80\x04\x8c" + bytes([len(name)]) + name + b".")
    location = locate(folder, {})
    removed = sweep(location.fs, location.root, [], rank=rank, now_s=NOW_S)
    assert removed == ["__0_2.deadbeef.distcp"]
    assert sorted(os.listdir(folder)) == sorted([SHARD, metadata])


def test_sweep_leaves_the_shards_of_the_new_checkpoint(folder: Path) -> None:
    """Also where a listing or a read cache does not show its metadata yet."""
    put(folder, SHARD, "__0_2.deadbeef.distcp")
    named = {SHARD}
    location = locate(folder, {})
    assert sweep(location.fs, location.root, named, now_s=NOW_S) == ["__0_2.deadbeef.distcp"]
    assert named == {SHARD}, "the caller's own set stays as it is"


@pytest.mark.parametrize("metadata", [".metadata", "__4.metadata"])
def test_sweep_leaves_every_shard_when_a_metadata_file_cannot_be_read(
    folder: Path, plan: FaultPlan, metadata: str
) -> None:
    put(folder, SHARD)
    put(folder, metadata)
    plan.add("open_read", metadata, errno=errno.EACCES)
    assert swept(folder, protocol="fault", options=plan.options) == []
    assert (folder / SHARD).exists()
    plan.clear()
    assert swept(folder, protocol="fault", options=plan.options) == [SHARD]


def test_sweep_leaves_every_shard_when_a_directory_is_called_metadata(folder: Path) -> None:
    put(folder, SHARD)
    (folder / ".metadata").mkdir()
    assert swept(folder) == []


# -- elsewhere ----------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["objectlike", "commitlike", "closelike"])
def test_sweep_removes_temporary_files_by_age_when_they_are_elsewhere(
    folder: Path, protocol: str
) -> None:
    put(folder, *TEMPORARY[:3])
    put(folder, *TEMPORARY[3:], changed_s=YOUNG_S)
    put(folder, *OF_OTHERS)
    assert swept(folder, protocol=protocol) == sorted(TEMPORARY[:3])
    assert set(TEMPORARY[3:]) < set(os.listdir(folder))


# -- what cannot be done ------------------------------------------------------------------------


@pytest.mark.parametrize("error", [{"errno": errno.EACCES}, {"raises": "NotImplementedError"}])
def test_sweep_does_nothing_when_listing_is_refused(
    folder: Path, plan: FaultPlan, error: dict[str, Any]
) -> None:
    put(folder, *TEMPORARY, SHARD)
    plan.add("ls", **error)
    assert swept(folder, protocol="fault", options=plan.options) == []
    assert len(os.listdir(folder)) == len(TEMPORARY) + 1


def test_sweep_goes_on_when_one_file_cannot_be_removed(folder: Path, plan: FaultPlan) -> None:
    put(folder, *TEMPORARY, SHARD, "__0_2.deadbeef.distcp")
    plan.add("rm", SHARD, errno=errno.EACCES)
    plan.add("rm", "__12.metadata", errno=errno.EROFS)
    kept = sorted([SHARD, ".__12.metadata.deadbeef.tmp"])
    found = swept(folder, protocol="fault", options=plan.options)
    assert found == sorted({*TEMPORARY, "__0_2.deadbeef.distcp"} - set(kept))
    assert sorted(os.listdir(folder)) == kept


def test_sweep_is_silent_when_there_is_no_directory(tmp_path: Path) -> None:
    assert swept(tmp_path / "nowhere") == []
