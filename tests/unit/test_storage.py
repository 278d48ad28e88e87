"""Locations, directories, existence, removal; what a worker cannot serve."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from mpwriter import _storage
from mpwriter._storage import (
    Location,
    file_exists,
    locate,
    make_directories,
    read_file,
    refusal,
    remove_files,
    stale_shard_names,
    warn_unless_atomic,
    write_file,
)
from tests.fakes import FaultPlan


class _PathLike:
    def __init__(self, text: str) -> None:
        self._text = str(text)

    def __fspath__(self) -> str:
        return self._text


class _MainOption:
    """Stands for a credentials object that a user's script defines."""


_MainOption.__module__ = "__main__"


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "plan")


def put(location: Location, name: str, payload: bytes) -> None:
    path = location.child(name)
    write_file(location.fs, path, payload, token="0f3a9c2e", sync_files=False)


# -- locate ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spell",
    [
        str,
        Path,
        _PathLike,
        lambda path: f"{path}/",
        lambda path: f"{path}///",
        lambda path: f"file://{path}",
        lambda path: f"file://{path}/",
        lambda path: f"local://{path}",
        lambda path: os.fsencode(str(path)),
        lambda path: os.path.relpath(path),
    ],
)
def test_locate_finds_the_same_place_when_it_is_spelled_differently(
    tmp_path: Path, spell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F01."""
    monkeypatch.chdir(tmp_path.parent)
    location = locate(spell(tmp_path / "ckpt"), {})
    assert isinstance(location.fs, LocalFileSystem)
    assert location.root == str(tmp_path / "ckpt")
    assert location.display == str(tmp_path / "ckpt")
    assert location.child(".metadata") == str(tmp_path / "ckpt" / ".metadata")


def test_locate_keeps_its_place_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F01."""
    monkeypatch.chdir(tmp_path)
    location = locate("ckpt", {})
    monkeypatch.chdir("/")
    assert location.root == f"{tmp_path}/ckpt"


@pytest.mark.parametrize("text", ["~/ckpt", "file://~/ckpt"])
def test_locate_expands_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """F01."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate(text, {}).root == f"{tmp_path}/ckpt"


@pytest.mark.parametrize(
    "path",
    [
        Path("s3://bucket/x"),
        PurePosixPath("memory://x"),
        Path("simplecache::s3://bucket/x"),
        Path("unheard-of://x"),
        _PathLike("gs:/bucket/x"),
        "s3:/bucket/x",
    ],
)
def test_locate_raises_when_pathlib_has_folded_the_url(
    path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F01."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="lost a slash"):
        locate(path, {})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("path", "error"), [("", ValueError), (None, TypeError), (7, TypeError)])
def test_locate_raises_when_there_is_no_path(path: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="path"):
        locate(path, {})


def test_locate_raises_when_the_protocol_is_unknown() -> None:
    with pytest.raises(ValueError, match="unheard"):
        locate("unheard://x", {})


NAMES = ["a#b", "a%20b", "a b", "a[x]b", "a*b", "a?b", "a::b", "dir::x", "~a", "ä'\"", "s3:x"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_files_round_trip_when_the_directory_has_an_odd_name(
    tmp_path: Path, scheme: str, name: str
) -> None:
    """F11."""
    location = locate(f"{scheme}{tmp_path}/{name}/ckpt", {})
    make_directories(location)
    put(location, "__0_0.distcp", b"old")
    put(location, "__0_0.distcp", b"new")
    assert read_file(location.fs, location.child("__0_0.distcp")) == b"new"
    names = [
        entry["name"].rsplit("/", 1)[1] for entry in location.fs.ls(location.root, detail=True)
    ]
    assert names == ["__0_0.distcp"]
    if scheme != "memory://":
        assert (tmp_path / name / "ckpt" / "__0_0.distcp").read_bytes() == b"new"
    assert remove_files(location, ["__0_0.distcp"]) == []
    assert not file_exists(location.fs, location.child("__0_0.distcp"))


@pytest.mark.parametrize("link", ["dir::", "dir://sub::", "simplecache::", "filecache::"])
@pytest.mark.parametrize("target", ["memory://", "file://"])
def test_files_round_trip_when_the_url_is_chained(tmp_path: Path, link: str, target: str) -> None:
    """F11."""
    location = locate(f"{link}{target}{tmp_path}/ckpt", {}, writable=True)
    assert type(location.fs) in (MemoryFileSystem, LocalFileSystem)
    make_directories(location)
    put(location, ".metadata", b"old")
    assert read_file(location.fs, location.child(".metadata")) == b"old"
    put(location, ".metadata", b"new")
    # A read cache would still have the old one.
    assert read_file(location.fs, location.child(".metadata")) == b"new"


def test_locate_raises_when_an_archive_is_to_be_written(tmp_path: Path) -> None:
    """F11."""
    archive = tmp_path / "a.zip"
    archive.write_bytes(b"PK\x05\x06" + bytes(18))
    with pytest.raises(ValueError, match="archive"):
        locate(f"zip://::{archive}", {}, writable=True)


def test_locate_raises_when_a_cache_compresses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compression"):
        locate(f"simplecache::file://{tmp_path}", {"simplecache": {"compression": "gzip"}})


@pytest.mark.parametrize(
    ("text", "display"),
    [
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("s3://bucket/a?versionId=secret", "s3://bucket/a"),
        ("s3://bucket/me@work/b", "s3://bucket/me@work/b"),
        ("sftp://me:secret@host:22/a", "sftp://host:22/a"),
        ("simplecache::sftp://me:secret@host/a", "simplecache::sftp://host/a"),
        ("abfs://box@account.dfs.core.windows.net/a", "abfs://box@account.dfs.core.windows.net/a"),
        ("abfs://box:secret@account/a", "abfs://box@account/a"),
    ],
)
def test_display_has_no_credentials(text: str, display: str) -> None:
    """DESIGN invariant 2."""
    assert _storage._display(text) == display


def test_locate_passes_the_storage_options(tmp_path: Path, plan: FaultPlan) -> None:
    """DESIGN invariant 13."""
    location = locate(f"fault://{tmp_path}/ckpt", {**plan.options, "fileno": False})
    make_directories(location)
    assert not location.fs.has_fileno
    assert [call.path for call in plan.calls("makedirs")] == [f"{tmp_path}/ckpt"]


# -- directories ---------------------------------------------------------------------------


def test_make_directories_succeeds_when_others_make_them_too(
    tmp_path: Path, plan: FaultPlan
) -> None:
    """B13: FileExistsError although exist_ok, and not visible for half a second."""
    plan.add("makedirs", errno=errno.EEXIST, times=1, after=True)
    plan.add("info", "ckpt", absent=True, for_s=0.5)
    plan.add("exists", absent=True, for_s=0.5)
    location = locate(f"fault://{tmp_path}/run/ckpt", plan.options)
    make_directories(location)
    put(location, "__0_0.distcp", b"shard")
    assert (tmp_path / "run" / "ckpt" / "__0_0.distcp").read_bytes() == b"shard"


def test_make_directories_succeeds_when_many_threads_make_them(tmp_path: Path) -> None:
    """B13."""
    errors: list[BaseException] = []

    def make(number: int) -> None:
        try:
            make_directories(locate(tmp_path / f"{number}" / "a" / "b", {}), sync_files=True)
        except BaseException as exc:
            errors.append(exc)

    for number in range(20):
        threads = [threading.Thread(target=make, args=(number,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert all((tmp_path / f"{number}" / "a" / "b").is_dir() for number in range(20))


@pytest.mark.parametrize("scheme", ["", "fault://", "memory://"])
@pytest.mark.parametrize("below", ["", "/below"])
def test_make_directories_raises_when_a_file_is_in_the_way(
    tmp_path: Path, scheme: str, below: str
) -> None:
    """F18."""
    parent = locate(f"{scheme}{tmp_path}", {})
    make_directories(parent)
    put(parent, "ckpt", b"a file")
    with pytest.raises(OSError, match="ckpt") as caught:
        make_directories(locate(f"{scheme}{tmp_path}/ckpt{below}", {}))
    assert not isinstance(caught.value, FileNotFoundError)
    assert read_file(parent.fs, parent.child("ckpt")) == b"a file"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_make_directories_names_the_path_when_it_may_not_write(
    tmp_path: Path, plan: FaultPlan, number: int
) -> None:
    """F18."""
    plan.add("makedirs", "ckpt", errno=number)
    with pytest.raises(OSError, match="ckpt") as caught:
        make_directories(locate(f"fault://{tmp_path}/ckpt", plan.options))
    assert caught.value.errno == number


def test_make_directories_does_nothing_when_there_are_only_keys() -> None:
    class S3FileSystem:
        __module__ = "s3fs.core"

        def makedirs(self, path: str, exist_ok: bool) -> None:
            raise AssertionError("a bucket would be made")

    S3FileSystem.__module__ = "s3fs.core"
    make_directories(Location(S3FileSystem(), "bucket/x", "s3://bucket/x"))


# -- existence, reading, removal -------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["", "memory://", "objectlike://"])
def test_file_exists_tells_files_from_directories_and_nothing(tmp_path: Path, scheme: str) -> None:
    """B15."""
    location = locate(f"{scheme}{tmp_path}/ckpt", {})
    make_directories(location)
    put(location, "file", b"")
    make_directories(locate(f"{scheme}{tmp_path}/ckpt/folder", {}))
    put(locate(f"{scheme}{tmp_path}/ckpt/folder", {}), "inner", b"x")
    assert file_exists(location.fs, location.child("file"))
    assert not file_exists(location.fs, location.child("folder"))
    assert not file_exists(location.fs, location.child("missing"))
    assert not file_exists(location.fs, location.child("missing/deeper"))
    if scheme == "":
        assert not file_exists(location.fs, location.child("file/deeper"))


def test_file_exists_asks_the_storage_when_exists_says_no(tmp_path: Path, plan: FaultPlan) -> None:
    """B14."""
    plan.add("exists", absent=True)
    location = locate(f"fault://{tmp_path}", plan.options)
    put(location, ".metadata", b"x")
    assert file_exists(location.fs, location.child(".metadata"))


def test_file_exists_raises_when_it_cannot_be_known(tmp_path: Path, plan: FaultPlan) -> None:
    plan.add("info", ".metadata", errno=errno.EACCES)
    location = locate(f"fault://{tmp_path}", plan.options)
    with pytest.raises(PermissionError):
        file_exists(location.fs, location.child(".metadata"))


def test_reading_forgets_the_listing_cache_first(tmp_path: Path) -> None:
    forgotten: list[str] = []

    class Cached(LocalFileSystem):  # type: ignore[misc]
        def invalidate_cache(self, path: str | None = None) -> None:
            forgotten.append(str(path))

    path = f"{tmp_path}/.metadata"
    Path(path).write_bytes(b"x")
    assert read_file(Cached(), path) == b"x"
    assert file_exists(Cached(), path)
    # Of the directory, too: adlfs looks for a file there, and forgets only what it is told.
    assert forgotten == [path, str(tmp_path)] * 2


def test_remove_files_reports_what_it_could_not_remove(tmp_path: Path, plan: FaultPlan) -> None:
    plan.add("rm", "b", errno=errno.EACCES)
    location = locate(f"fault://{tmp_path}", plan.options)
    for name in ("a", "b", "[c]"):
        put(location, name, b"x")
    os.mkdir(tmp_path / "folder")
    assert remove_files(location, ["a", "b", "[c]", "folder", "missing"]) == ["b", "folder"]
    assert sorted(os.listdir(tmp_path)) == ["b", "folder", "plan"]


# -- stale shards -----------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_stale_shard_names_finds_the_shards_of_a_pickle(protocol: int) -> None:
    names = ["__0_0.distcp", "__12_3.0f3a9c2e.distcp", "__0_1.0f3a9c2e.safetensors"]
    others = ["x__0_7.distcp", "__0_8.distcp.bak", "../__0_9.distcp", "__a_0.distcp", ".metadata"]
    pickled = pickle.dumps({"storage": names + names, "keys": others}, protocol=protocol)
    assert stale_shard_names(pickled) == set(names)
    assert stale_shard_names(pickled + b"trailer") == set(names)


@pytest.mark.parametrize("raw", [b"", b"__0_0.distcp", b"\x8c\x0c__0_0.dist", bytes(range(256))])
def test_stale_shard_names_finds_nothing_when_it_is_no_metadata(raw: bytes) -> None:
    assert stale_shard_names(raw) == set()


# -- workers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("memory://a", "memory of one process"),
        ("dir://sub::memory://a", "memory of one process"),
        ("simplecache::memory://a", "memory of one process"),
        ("/tmp/a", None),
        ("dir://sub::/tmp/a", None),
        ("fault:///tmp/a", None),
    ],
)
def test_refusal_says_why_when_a_worker_cannot_serve(url: str, words: str | None) -> None:
    reason = refusal(locate(url, {}).fs)
    assert reason is None if words is None else words in (reason or "")


def test_refusal_looks_into_wrappers_it_was_given() -> None:
    wrapped = DirFileSystem(path="/a", fs=MemoryFileSystem())
    assert "memory of one process" in (refusal(wrapped) or "")


def test_refusal_says_why_when_the_filesystem_cannot_be_pickled() -> None:
    class Nested(LocalFileSystem):  # type: ignore[misc]
        pass

    assert "pickle" in (refusal(Nested()) or "")
    assert "pickle" in (refusal(LocalFileSystem(lock=threading.Lock())) or "")


def test_refusal_says_why_when_something_is_defined_in_main(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "_MainOption", _MainOption, raising=False)
    fs = fsspec.filesystem("file", credentials=_MainOption(), skip_instance_cache=True)
    assert "__main__" in (refusal(fs) or "")


def test_warn_unless_atomic_warns_once_when_no_rename_is_known(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpwriter._filesystems._warned", set())
    for url in ("/tmp/a", "memory://a", "fault:///tmp/a", "commitlike:///tmp/a"):
        warn_unless_atomic(locate(url, {}).fs)
    assert caplog.messages == []
    for _ in range(2):
        warn_unless_atomic(locate("objectlike:///tmp/a", {}).fs)
    assert len(caplog.messages) == 1
    assert "objectlike://" in caplog.messages[0]


def test_storage_modules_import_no_torch() -> None:
    code = "import sys, mpwriter._storage; print('torch' in sys.modules, 'asyncio' in sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50
    )
    assert shown.stdout.startswith("False")
