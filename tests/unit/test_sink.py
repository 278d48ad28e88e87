"""Files that are complete or not there."""

from __future__ import annotations

import errno
import gc
import io
import mmap
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from mpwriter import _sink_base
from mpwriter._filesystems import publishing
from mpwriter._publish import is_temporary_name, sync_directory, temporary_name
from mpwriter._sink import Sink, open_sink, write_file
from mpwriter._storage import locate
from tests.fakes import FaultPlan

TOKEN = "0f3a9c2e"
SHARD = "__0_0.0f3a9c2e.distcp"
PAYLOAD = bytes(range(256)) * 4096  # 1 MiB

# Every way of publishing; the rest of the URL is a path of the local disk.
FAKES = ["fault", "objectlike", "commitlike", "closelike"]


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "plan")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ckpt").mkdir()
    return tmp_path / "ckpt"


@pytest.fixture(autouse=True)
def _quick_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpwriter._publish._FIRST_STALL_S", 0.0)


@pytest.fixture
def start(folder: Path, plan: FaultPlan) -> Callable[..., Sink]:
    def open_fake(
        protocol: str, name: str = SHARD, sync_files: bool = True, **options: Any
    ) -> Sink:
        location = locate(f"{protocol}://{folder}", {**plan.options, **options})
        return open_sink(location.fs, location.child(name), token=TOKEN, sync_files=sync_files)

    return open_fake


def visible(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not is_temporary_name(name))


# -- publish -----------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["file", *FAKES])
@pytest.mark.parametrize("num_chunks", [0, 1, 9])
def test_publish_makes_the_whole_file_visible(
    start: Callable[..., Sink], folder: Path, protocol: str, num_chunks: int
) -> None:
    """A06."""
    options = {} if protocol in ("file", "fault") else {"block_size": 3 * len(PAYLOAD)}
    sink = start(protocol, **options)
    for _ in range(num_chunks):
        sink.write(memoryview(PAYLOAD))
    assert sink.position == num_chunks * len(PAYLOAD)
    assert visible(folder) == []
    sink.publish()
    assert os.listdir(folder) == [SHARD]
    assert (folder / SHARD).read_bytes() == num_chunks * PAYLOAD
    sink.discard()
    assert (folder / SHARD).exists()


@pytest.mark.parametrize("protocol", ["file", *FAKES, "memory"])
def test_write_file_swaps_the_old_file_for_the_new_one(tmp_path: Path, protocol: str) -> None:
    fs = locate(f"{protocol}://{tmp_path}", {}).fs
    path = f"{tmp_path}/.metadata"
    for payload in (b"old and long", b"new"):
        write_file(fs, path, payload, token=TOKEN, sync_files=True)
        assert fs.cat_file(path) == payload
    assert [entry.rsplit("/", 1)[1] for entry in fs.ls(str(tmp_path), detail=False)] == [
        ".metadata"
    ]


@pytest.mark.parametrize("sync_files", [True, False])
def test_publish_calls_fsync_when_asked_and_never_os_sync(
    start: Callable[..., Sink], monkeypatch: pytest.MonkeyPatch, folder: Path, sync_files: bool
) -> None:
    """A06."""
    synced: list[str] = []
    fsync = os.fsync

    def record(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "sync", lambda: pytest.fail("os.sync stops the whole machine"))
    for protocol, options in (("file", {}), ("fault", {"fileno": False}), ("objectlike", {})):
        sink = start(protocol, f"{protocol}.distcp", sync_files=sync_files, **options)
        sink.write(PAYLOAD)
        sink.publish()
    # The file before its rename, then the directory, so that the rename lasts as well.
    first = [temporary_name("file.distcp", TOKEN), "ckpt", "ckpt"]
    assert synced == (first if sync_files else [])


def test_publish_closes_the_shard_before_metadata_is_opened(
    start: Callable[..., Sink], plan: FaultPlan
) -> None:
    """A06."""
    sink = start("objectlike")
    sink.write(PAYLOAD)
    sink.publish()
    start("objectlike", ".metadata").publish()
    ops = [(call.op, call.name) for call in plan.calls() if call.op in ("open", "close")]
    assert ops == [
        ("open", SHARD),
        ("close", SHARD),
        ("open", ".metadata"),
        ("close", ".metadata"),
    ]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_publish_gives_the_mode_of_the_umask(folder: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_file(LocalFileSystem(), f"{folder}/x", b"x", token=TOKEN, sync_files=False)
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "x").stat().st_mode) == 0o666 & ~umask


def test_local_files_are_never_opened_without_autocommit(
    start: Callable[..., Sink], plan: FaultPlan
) -> None:
    """fsspec would make a 0600 file in /tmp."""
    start("fault").publish()
    assert [call.autocommit for call in plan.calls("open")] == [True]


def test_commit_like_files_leave_the_transaction_of_their_filesystem(
    start: Callable[..., Sink], folder: Path
) -> None:
    fs = locate(f"commitlike://{folder}", {}).fs
    for name in ("a", "b"):
        sink = open_sink(fs, f"{folder}/{name}", token=TOKEN, sync_files=False)
        sink.publish() if name == "a" else sink.discard()
    assert list(fs.transaction.files) == []


@pytest.mark.parametrize("wrap", [lambda fs: DirFileSystem("/", fs), lambda fs: fs])
def test_open_sink_sees_through_a_directory_wrapper(folder: Path, wrap: Any) -> None:
    fs = wrap(LocalFileSystem())
    path = f"{folder}/{SHARD}"[0 if isinstance(fs, LocalFileSystem) else 1 :]
    sink = open_sink(fs, path, token=TOKEN, sync_files=True)
    assert os.listdir(folder) == [temporary_name(SHARD, TOKEN)]
    sink.publish()
    assert os.listdir(folder) == [SHARD]


# -- failures ----------------------------------------------------------------------------

FAILURES = [
    *[("fault", op) for op in ("open", "write", "flush", "fileno", "close", "mv")],
    *[("objectlike", op) for op in ("open", "write", "upload_part", "close", "commit", "cp")],
    *[("commitlike", op) for op in ("open", "write", "upload_part", "close", "commit")],
    *[("closelike", op) for op in ("open", "write", "upload_part", "close", "commit")],
]


@pytest.mark.parametrize(("protocol", "op"), FAILURES)
@pytest.mark.parametrize("old", [None, b"old"])
def test_a_failed_file_leaves_what_was_there(
    start: Callable[..., Sink],
    plan: FaultPlan,
    folder: Path,
    protocol: str,
    op: str,
    old: bytes | None,
) -> None:
    """A05."""
    if old is not None:
        (folder / SHARD).write_bytes(old)
    plan.add(op, SHARD, errno=errno.ENOSPC)
    sinks: list[Sink] = []

    def write() -> None:
        sinks.append(start(protocol))
        sinks[0].write(PAYLOAD)
        sinks[0].publish()

    with pytest.raises(OSError, match="No space left") as caught:
        write()
    assert caught.value.errno == errno.ENOSPC
    plan.clear()
    for sink in sinks:
        with pytest.raises(ValueError, match=SHARD):
            sink.publish()
        sink.discard()
        sink.discard()
        with pytest.raises(ValueError, match=SHARD):
            sink.write(b"x")
    sinks.clear()
    gc.collect()
    assert os.listdir(folder) == ([] if old is None else [SHARD])
    assert old is None or (folder / SHARD).read_bytes() == old


def test_a_copy_that_fails_half_way_leaves_nothing(
    start: Callable[..., Sink], plan: FaultPlan, folder: Path
) -> None:
    plan.add("cp", SHARD, errno=errno.EIO, after=True)
    sink = start("objectlike")
    sink.write(PAYLOAD)
    with pytest.raises(OSError):
        sink.publish()
    assert not (folder / SHARD).exists()
    sink.discard()
    assert os.listdir(folder) == []


@pytest.mark.parametrize("protocol", FAKES)
@pytest.mark.parametrize("num_chunks", [0, 1, 9])
@pytest.mark.parametrize("how", ["discard", "drop"])
def test_a_discarded_file_is_never_visible(
    start: Callable[..., Sink],
    plan: FaultPlan,
    folder: Path,
    protocol: str,
    num_chunks: int,
    how: str,
) -> None:
    sink = start(protocol, **({} if protocol == "fault" else {"block_size": 3 * len(PAYLOAD)}))
    for _ in range(num_chunks):
        sink.write(PAYLOAD)
    if how == "discard":
        sink.discard()
    del sink
    gc.collect()
    assert os.listdir(folder) == []
    assert plan.calls("commit") == []


def test_discard_removes_the_temporary_file_when_close_and_rm_fail(
    start: Callable[..., Sink], plan: FaultPlan, folder: Path
) -> None:
    sink = start("fault")
    sink.write(PAYLOAD)
    plan.add("close", errno=errno.EIO)
    plan.add("rm", errno=errno.EIO)
    sink.discard()
    assert os.listdir(folder) == []


def test_discard_is_silent_when_the_directory_is_gone(
    start: Callable[..., Sink], folder: Path
) -> None:
    """B07."""
    sink = start("file")
    sink.write(PAYLOAD)
    (folder / temporary_name(SHARD, TOKEN)).unlink()
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        sink.publish()
    sink.discard()
    assert not folder.exists()


@pytest.mark.parametrize("protocol", ["file", "fault", "objectlike", "memory"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_publish_refuses_when_the_final_name_is_a_directory(
    tmp_path: Path, protocol: str, when: str
) -> None:
    """B15."""
    fs = locate(f"{protocol}://{tmp_path}", {}).fs
    path = f"{tmp_path}/ckpt/.metadata"
    local = protocol != "memory"

    def make() -> None:
        os.makedirs(path) if local else fs.makedirs(path)

    if when == "before":
        make()
        with pytest.raises(IsADirectoryError, match=r"\.metadata"):
            write_file(fs, path, b"x", token=TOKEN, sync_files=True)
    else:
        if local:
            os.makedirs(f"{tmp_path}/ckpt")
        sink = open_sink(fs, path, token=TOKEN, sync_files=True)
        sink.write(b"x")
        make()
        with pytest.raises(IsADirectoryError, match=r"\.metadata"):
            sink.publish()
        sink.discard()
    assert fs.ls(path, detail=False) == []
    assert len(fs.ls(f"{tmp_path}/ckpt", detail=False)) == 1


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EROFS])
def test_open_sink_names_the_path_when_it_may_not_write(
    start: Callable[..., Sink], plan: FaultPlan, number: int
) -> None:
    """F18."""
    plan.add("open", errno=number)
    with pytest.raises(OSError, match="ckpt") as caught:
        start("fault")
    assert caught.value.errno == number


def test_open_sink_raises_when_the_directory_is_missing(tmp_path: Path) -> None:
    """F18."""
    with pytest.raises(FileNotFoundError, match="missing"):
        open_sink(LocalFileSystem(), f"{tmp_path}/missing/x", token=TOKEN, sync_files=True)


def test_an_object_with_too_many_parts_is_not_published(
    start: Callable[..., Sink], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F03."""
    monkeypatch.setattr(_sink_base, "_MAX_WRITE_BYTES", len(PAYLOAD))
    sink = start("commitlike", block_size=len(PAYLOAD), max_parts=3)
    with pytest.raises(OSError, match="Part number"):
        sink.write(4 * PAYLOAD)
    sink.discard()
    assert os.listdir(folder) == []


# -- short and interrupted writes ----------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
@pytest.mark.parametrize("op", ["write", "flush"])
@pytest.mark.parametrize("after", [False, True])
def test_write_goes_on_when_it_was_interrupted(
    start: Callable[..., Sink],
    plan: FaultPlan,
    folder: Path,
    number: int,
    op: str,
    after: bool,
) -> None:
    """A16: also where the interrupted call had taken the bytes."""
    plan.add(op, SHARD, errno=number, times=2, after=after)
    sink = start("fault")
    for _ in range(3):
        sink.write(PAYLOAD)
    sink.publish()
    assert (folder / SHARD).read_bytes() == 3 * PAYLOAD


@pytest.mark.parametrize("protocol", ["fault", "commitlike"])
def test_write_goes_on_when_a_write_is_short(
    start: Callable[..., Sink], plan: FaultPlan, folder: Path, protocol: str
) -> None:
    """A16."""
    plan.add("write", SHARD, short=1000, times=3)
    plan.add("write", SHARD, short=0, times=2)
    sink = start(protocol)
    sink.write(memoryview(PAYLOAD))
    sink.write(b"end")
    sink.publish()
    assert (folder / SHARD).read_bytes() == PAYLOAD + b"end"
    assert sink.position == len(PAYLOAD) + 3


@pytest.mark.parametrize(
    ("action", "number"),
    [({"short": 0}, errno.EIO), ({"errno": errno.EAGAIN}, errno.EAGAIN)],
)
def test_write_raises_when_nothing_goes_on(
    start: Callable[..., Sink], plan: FaultPlan, action: dict[str, int], number: int
) -> None:
    """A16."""
    plan.add("write", SHARD, **action)
    sink = start("fault")
    with pytest.raises(OSError) as caught:
        sink.write(PAYLOAD)
    assert caught.value.errno == number
    assert len(plan.calls("write")) < 20
    sink.discard()


@pytest.mark.parametrize("returns_none", [False, True])
def test_publish_raises_when_a_write_took_less_than_it_said(
    start: Callable[..., Sink], plan: FaultPlan, folder: Path, returns_none: bool
) -> None:
    """A16."""
    plan.add("write", SHARD, lie=100, times=1)
    sink = start("fault", returns_none=returns_none)
    sink.write(PAYLOAD)
    with pytest.raises(OSError, match="1048576 bytes were written, the file has 100"):
        sink.publish()
    sink.discard()
    assert os.listdir(folder) == []


@pytest.mark.parametrize("option", ["bytes_only", "returns_none"])
def test_write_takes_file_objects_as_they_are(
    start: Callable[..., Sink], folder: Path, option: str
) -> None:
    sink = start("fault", **{option: True})
    for chunk in (memoryview(PAYLOAD), bytearray(b"ab"), b"cd"):
        sink.write(chunk)
    sink.publish()
    assert (folder / SHARD).read_bytes() == PAYLOAD + b"abcd"


class _RawFile(io.RawIOBase):
    """Takes a little at a time; None stands for "would block", as io.RawIOBase has it."""

    def __init__(self, answers: list[int | None]) -> None:
        self.taken = bytearray()
        self._answers = answers

    def writable(self) -> bool:
        return True

    def write(self, chunk: Any) -> int | None:
        answer = self._answers.pop(0) if self._answers else len(chunk)
        self.taken += memoryview(chunk)[: answer or 0]
        return answer

    def tell(self) -> int:
        return len(self.taken)


def test_write_goes_on_when_a_raw_file_would_block() -> None:
    file = _RawFile([None, 3, None, 0, 1])

    class Raw(LocalFileSystem):  # type: ignore[misc]
        mpwriter_publishing = "close"

        def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            return file

    sink = open_sink(Raw(), "/x", token=TOKEN, sync_files=False)
    sink.write(b"0123456789")
    sink.publish()
    assert bytes(file.taken) == b"0123456789"


# -- memory ------------------------------------------------------------------------------


def test_write_passes_the_callers_memory_on_when_the_file_is_local(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    class Recorder(io.BytesIO):
        def write(self, chunk: Any) -> int:
            seen.append(chunk)
            return super().write(chunk)

    class Recording(LocalFileSystem):  # type: ignore[misc]
        mpwriter_publishing = "close"

        def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            return Recorder()

    monkeypatch.setattr(_sink_base, "_MAX_WRITE_BYTES", 4 * mmap.PAGESIZE)
    with mmap.mmap(-1, 10 * mmap.PAGESIZE) as mapping:
        sink = open_sink(Recording(), f"{folder}/x", token=TOKEN, sync_files=False)
        sink.write(memoryview(mapping)[mmap.PAGESIZE :])
        assert [len(chunk) // mmap.PAGESIZE for chunk in seen] == [4, 4, 1]
        assert all(chunk.obj is mapping for chunk in seen)
        sink.discard()
        seen.clear()  # the mapping is free as soon as the caller's views are


def test_write_takes_memory_of_any_format(start: Callable[..., Sink], folder: Path) -> None:
    sink = start("file")
    sink.write(memoryview(b"\0" * 24).cast("d", (1, 3)))
    sink.write(memoryview(b"").cast("i"))
    sink.write(b"")
    sink.publish()
    assert (folder / SHARD).read_bytes() == bytes(24)


def test_sinks_of_several_threads_do_not_mix(folder: Path) -> None:
    """F07: each open file is used by one thread."""

    def write(number: int) -> None:
        path = f"{folder}/{number}"
        for _ in range(20):
            sink = open_sink(LocalFileSystem(), path, token=TOKEN, sync_files=False)
            sink.write(bytes([number]) * 5000)
            sink.publish()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        assert (folder / str(number)).read_bytes() == bytes([number]) * 5000


# -- moves and names ------------------------------------------------------------------------


class _StubbornFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A server that does not rename over a file, with or without an error."""

    protocol = "stubborn"
    cachable = False

    def __init__(self, silent: bool, broken: bool = False) -> None:
        super().__init__(global_store=False)
        self.silent = silent
        self.broken = broken

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.broken and path1.endswith(".tmp"):
            raise OSError(errno.EIO, "broken")
        if path2 in self.store:
            if self.silent:
                return
            raise FileExistsError(path2)
        self.store[path2] = self.store.pop(path1)


@pytest.mark.parametrize("silent", [True, False])
def test_write_file_replaces_when_the_server_does_not_rename_over_files(silent: bool) -> None:
    fs = _StubbornFileSystem(silent)
    for payload in (b"old", b"new"):
        write_file(fs, "/a/.metadata", payload, token=TOKEN, sync_files=True)
    assert fs.cat_file("/a/.metadata") == b"new"
    assert fs.ls("/a", detail=False) == ["/a/.metadata"]


def test_write_file_keeps_the_old_file_when_no_rename_works() -> None:
    fs = _StubbornFileSystem(silent=False)
    write_file(fs, "/a/.metadata", b"old", token=TOKEN, sync_files=True)
    fs.broken = True
    with pytest.raises(OSError, match="broken"):
        write_file(fs, "/a/.metadata", b"new", token=TOKEN, sync_files=True)
    assert fs.cat_file("/a/.metadata") == b"old"
    assert fs.ls("/a", detail=False) == ["/a/.metadata"]


@pytest.mark.parametrize(
    ("module", "name", "kind"),
    [
        ("s3fs.core", "S3FileSystem", "commit"),
        ("gcsfs.core", "GCSFileSystem", "commit"),
        ("adlfs.spec", "AzureBlobFileSystem", "close"),
        ("fsspec.implementations.sftp", "SFTPFileSystem", "rename"),
        ("sshfs.spec", "SSHFileSystem", "rename"),
        ("elsewhere", "S3FileSystem", "move"),
    ],
)
def test_publishing_knows_filesystems_and_what_inherits_from_them(
    module: str, name: str, kind: str
) -> None:
    known = type(name, (), {"__module__": module})
    assert publishing(known()) == kind
    assert publishing(type("Derived", (known,), {})()) == kind


def test_publishing_knows_the_installed_s3fs() -> None:
    import s3fs

    assert publishing(s3fs.S3FileSystem.__new__(s3fs.S3FileSystem)) == "commit"


@pytest.mark.parametrize("name", [SHARD, ".metadata", "__3.metadata", "x.safetensors"])
def test_temporary_names_are_hidden_and_told_from_final_ones(name: str) -> None:
    temporary = temporary_name(name, TOKEN)
    assert temporary.startswith(".")
    assert TOKEN in temporary
    assert is_temporary_name(temporary)
    assert not is_temporary_name(name)
    assert temporary != temporary_name(name, "other")


def test_sync_directory_raises_when_the_disk_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int) -> Callable[[int], None]:
        def fsync(fd: int) -> None:
            raise OSError(number, os.strerror(number))

        return fsync

    monkeypatch.setattr(os, "fsync", fail(errno.EINVAL))
    sync_directory(str(tmp_path))  # a network filesystem that has no such thing
    monkeypatch.setattr(os, "fsync", fail(errno.EIO))
    with pytest.raises(OSError):
        sync_directory(str(tmp_path))
