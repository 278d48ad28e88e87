"""Large writes past the page cache: which bytes take that way, and that the file is the same."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from mpwriter import _direct
from mpwriter._container import frame
from mpwriter._decode import decode
from mpwriter._direct import DirectWriter
from mpwriter._sink import open_sink
from mpwriter._types import MIN_DIRECT_BYTES, PAGE_BYTES
from tests.fakes import FaultFileSystem, FaultPlan
from tests.saves import assert_holds, save

LARGE = 2 * MIN_DIRECT_BYTES


@pytest.fixture
def pages() -> Iterator[memoryview]:
    """Random bytes that begin at a page, as a worker's mapping does."""
    with mmap.mmap(-1, LARGE + PAGE_BYTES) as mapping:
        mapping[:] = os.urandom(len(mapping))
        view = memoryview(mapping)
        yield view
        view.release()


@pytest.fixture
def pwrites(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(length, position) of every write of this process past the page cache that succeeds."""
    seen: list[tuple[int, int]] = []
    real = os.pwrite

    def spy(fd: int, view: Any, position: int) -> int:
        written = real(fd, view, position)
        seen.append((written, position))
        return written

    monkeypatch.setattr(os, "pwrite", spy)
    return seen


@pytest.fixture
def any_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the kind of this machine's disk pass, whatever it is."""
    monkeypatch.setattr(_direct, "_kind_of", lambda major, minor: "ext4")


def takes_direct_writes(folder: Path) -> bool:
    """Whether this machine's disk does: tmpfs of older kernels and some others do not."""
    path = folder / "probe"
    path.touch()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.pwrite(fd, page, 0)
    except OSError:
        return False
    finally:
        os.close(fd)
        path.unlink()
    return True


@pytest.mark.parametrize("lead", [0, PAGE_BYTES, 100, 3 * PAGE_BYTES])
@pytest.mark.usefixtures("any_disk")
def test_sink_writes_the_same_file_whatever_way_the_bytes_take(
    tmp_path: Path, pages: memoryview, pwrites: list[tuple[int, int]], lead: int
) -> None:
    aligned = takes_direct_writes(tmp_path) and lead % PAGE_BYTES == 0
    pwrites.clear()
    sink = open_sink(LocalFileSystem(), str(tmp_path / "file"), token="0123abcd", sync_files=True)
    head, tail = os.urandom(lead), os.urandom(777)
    for chunk in (head, pages[: LARGE + 100], tail, pages[:LARGE]):
        sink.write(chunk)
    assert sink.position == lead + 2 * LARGE + 877
    sink.publish()
    expected = head + bytes(pages[: LARGE + 100]) + tail + bytes(pages[:LARGE])
    assert (tmp_path / "file").read_bytes() == expected
    # Only what begins at a page of the file, and whole pages of it.
    assert pwrites == ([(LARGE, lead)] if aligned else [])


@pytest.mark.parametrize(
    ("sync_files", "kind"),
    [(False, LocalFileSystem), (True, FaultFileSystem)],
    ids=["not durable", "another class"],
)
@pytest.mark.usefixtures("any_disk")
def test_sink_goes_through_the_file_object_when_nothing_else_is_asked_for(
    tmp_path: Path, pages: memoryview, pwrites: list[Any], sync_files: bool, kind: Any
) -> None:
    plan = FaultPlan(tmp_path / "plan")
    fs = kind(**(plan.options if kind is FaultFileSystem else {}))
    sink = open_sink(fs, str(tmp_path / "file"), token="0123abcd", sync_files=sync_files)
    sink.write(pages[:LARGE])
    sink.publish()
    assert (tmp_path / "file").read_bytes() == bytes(pages[:LARGE])
    assert pwrites == []


@pytest.mark.usefixtures("any_disk")
def test_sink_goes_on_the_usual_way_when_the_disk_refuses(
    tmp_path: Path, pages: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EINVAL: this disk wants other addresses, or no such writes at all."""
    tries: list[int] = []

    def refuse(fd: int, view: Any, position: int) -> int:
        tries.append(position)
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "pwrite", refuse)
    sink = open_sink(LocalFileSystem(), str(tmp_path / "file"), token="0123abcd", sync_files=True)
    for _ in range(6):
        sink.write(pages[:LARGE])
    sink.publish()
    assert (tmp_path / "file").read_bytes() == bytes(pages[:LARGE]) * 6
    assert len(tries) <= 3


@pytest.mark.usefixtures("any_disk")
def test_sink_takes_a_short_direct_write_for_what_it_is(
    tmp_path: Path, pages: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A16: the rest goes through the file object, which tells why, or takes it."""
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: real(fd, view[: 5 * PAGE_BYTES], at))
    sink = open_sink(LocalFileSystem(), str(tmp_path / "file"), token="0123abcd", sync_files=True)
    sink.write(pages[:LARGE])
    sink.publish()
    assert (tmp_path / "file").read_bytes() == bytes(pages[:LARGE])


@pytest.mark.usefixtures("any_disk")
def test_sink_raises_and_leaves_nothing_when_the_disk_is_full(
    tmp_path: Path, pages: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A05: as for every other write."""

    def fail(fd: int, view: Any, position: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    monkeypatch.setattr(DirectWriter, "_open", lambda self: True)
    sink = open_sink(LocalFileSystem(), str(tmp_path / "file"), token="0123abcd", sync_files=True)
    with pytest.raises(OSError, match="No space left"):
        sink.write(pages[:LARGE])
    sink.discard()
    assert os.listdir(tmp_path) == []


def test_kind_of_a_device_is_that_of_its_mount(tmp_path: Path, monkeypatch: Any) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n"
        "30 22 0:25 / /mnt rw - nfs4 host:/x rw,vers=4.2\n"
    )
    monkeypatch.setattr(_direct, "_MOUNTS", str(mounts))
    _direct._kind_of.cache_clear()
    assert _direct._kind_of(254, 1) == "ext4"
    assert _direct._kind_of(0, 25) == "nfs4"
    assert _direct._kind_of(9, 9) == ""
    monkeypatch.setattr(_direct, "_MOUNTS", str(tmp_path / "missing"))
    assert _direct._kind_of(9, 10) == ""
    _direct._kind_of.cache_clear()


def test_direct_writer_serves_no_network_filesystem(
    tmp_path: Path, pages: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_direct, "_kind_of", lambda major, minor: "nfs4")
    (tmp_path / "file").touch()
    writer = DirectWriter(str(tmp_path / "file"))
    assert writer.write(pages[:LARGE], 0) == 0
    writer.close()


@pytest.mark.parametrize("position", [0, 1, 63, 4095, 5000])
@pytest.mark.parametrize("nbytes", [MIN_DIRECT_BYTES - 4, MIN_DIRECT_BYTES, LARGE + 4])
def test_frame_puts_large_payloads_at_a_page_of_the_file(position: int, nbytes: int) -> None:
    made = frame("float32", (nbytes // 4,), nbytes, position)
    unit = PAGE_BYTES if nbytes >= MIN_DIRECT_BYTES else 64
    assert (position + len(made.prefix)) % unit == 0
    payload = os.urandom(nbytes)
    whole = made.prefix + payload + made.suffix(0)
    assert len(whole) == made.length
    decoded = decode(memoryview(whole), verify=False)
    assert decoded is not None and bytes(decoded.payload) == payload


def test_save_writes_large_tensors_past_the_page_cache(checkpoint_dir: Path) -> None:
    """Small ones before, between and after them; through a window and out of a staged state."""
    state = {
        "tiny": torch.arange(7),
        "large": torch.randn(700_001),
        "middle": torch.randn(3, 1000),
        "larger": torch.randn(1025, 1025),
        "column": torch.randn(2000, 500).t(),
        "huge": torch.randn(3 << 20),
    }
    save(str(checkpoint_dir), state, num_workers=1)
    assert_holds(checkpoint_dir, state)
