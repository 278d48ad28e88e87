"""What `verify` finds in sound, foreign and damaged checkpoints, and what it holds of them."""

from __future__ import annotations

import errno
import io
import json
import os
import struct
import threading
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem

import mpwriter
from mpwriter import MPFsspecWriter, _metadata
from mpwriter._compat import SerializationFormat, StockFsspecWriter
from mpwriter._inspect import Checkpoint, Finding, StoredPart, inspect_checkpoint
from mpwriter._verify import VerifyReport, verify_checkpoint
from mpwriter._verify_safetensors import check_header
from mpwriter._zipread import read_records
from mpwriter.errors import CorruptCheckpointError, IncompleteCheckpointError
from tests.extensions import Mask
from tests.fakes.asynclike import AsyncLikeFileSystem
from tests.states import Tied, random_bits, save_with, shard_names

MIB = 2**20

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
DTYPES += [torch.int64, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn]


def state() -> dict[str, Any]:
    """Many dtypes and shapes, tied tensors, small and large objects."""
    return {
        "dtypes": {str(dtype): random_bits(dtype, (3, 5)) for dtype in DTYPES},
        "shapes": {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4), "row": torch.ones(7)},
        "tied": Tied().state_dict(),
        "large": torch.randn(5 * MIB // 4),
        "columns": torch.randn(40, 50)[:, 3:9],
        "step": 17,
        "objects": ("a", torch.randn(3 * MIB // 2), [torch.ones(2)]),
        "blob": os.urandom(5 * MIB),
    }


SAFETENSORS = {"serialization_format": SerializationFormat.SAFETENSORS}
WRITERS: dict[str, Any] = {
    "ours": lambda path: MPFsspecWriter(path, num_workers=2),
    "ours, many files": lambda path: MPFsspecWriter(path, single_file_per_rank=False),
    "stock, 1 thread": lambda path: StockFsspecWriter(path, thread_count=1),
    "stock, 4 threads": lambda path: StockFsspecWriter(path, thread_count=4),
    "stock, many files": lambda path: StockFsspecWriter(path, single_file_per_rank=False),
    "filesystem, 1 thread": lambda path: FileSystemWriter(path, thread_count=1),
    "filesystem, 4 threads": lambda path: FileSystemWriter(path, thread_count=4),
}


@pytest.fixture(params=WRITERS)
def saved(request: pytest.FixtureRequest, checkpoint_dir: Path) -> Path:
    save_with(WRITERS[request.param](checkpoint_dir), state())
    return checkpoint_dir


@pytest.fixture
def ours(checkpoint_dir: Path) -> Path:
    save_with(WRITERS["ours"](checkpoint_dir), state())
    return checkpoint_dir


@pytest.fixture
def safetensors(checkpoint_dir: Path) -> Path:
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=2, **SAFETENSORS), state())
    return checkpoint_dir


@contextmanager
def without_crcs() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def part_of(folder: Path, key: str) -> StoredPart:
    (found,) = [found for found in inspect_checkpoint(folder).keys if found.key == key]
    return found.parts[0]


def overwrite(path: Path, at: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(content)


def flip(path: Path, at: int, bit: int = 0) -> None:
    overwrite(path, at, bytes([path.read_bytes()[at] ^ 1 << bit]))


def damaged(folder: Path) -> list[tuple[str, str]]:
    return [(finding.file, finding.key) for finding in verify_checkpoint(folder).damage]


def change_metadata(folder: Path, change: Any) -> None:
    path = folder / ".metadata"
    metadata = _metadata.loads(path.read_bytes(), str(path))
    change(metadata)
    path.write_bytes(_metadata.dumps(metadata))


# -- what is sound ------------------------------------------------------------------------------


def test_verify_finds_nothing_when_the_checkpoint_is_sound(saved: Path) -> None:
    report = verify_checkpoint(saved)
    assert report.damage == ()
    assert report.num_unverified == 0 and report.num_verified > 15
    assert report.nbytes == sum((saved / name).stat().st_size for name in shard_names(saved))


def test_verify_tells_metadata_with_a_checksum_from_one_without(
    checkpoint_dir: Path, tmp_path: Path
) -> None:
    save_with(MPFsspecWriter(checkpoint_dir), state())
    save_with(FileSystemWriter(tmp_path / "stock"), state())
    assert verify_checkpoint(checkpoint_dir).checkpoint.metadata_checked
    assert not verify_checkpoint(tmp_path / "stock").checkpoint.metadata_checked


@pytest.mark.parametrize("writer", ["stock, 1 thread", "stock, many files", "filesystem, 1 thread"])
def test_verify_counts_items_as_unverified_when_crcs_were_switched_off(
    writer: str, checkpoint_dir: Path
) -> None:
    """Every member says CRC 0, which is not damage."""
    with without_crcs():
        save_with(WRITERS[writer](checkpoint_dir), state())
    report = verify_checkpoint(checkpoint_dir)
    assert report.is_sound and report.num_verified == 0 and report.num_unverified > 15


@pytest.mark.parametrize("writer", ["stock, 4 threads", "filesystem, 4 threads"])
def test_verify_finds_nothing_when_crcs_were_switched_off_in_one_thread(
    writer: str, checkpoint_dir: Path
) -> None:
    """The switch is one of each thread, so stock's files have CRCs where a side thread wrote."""
    with without_crcs():
        save_with(WRITERS[writer](checkpoint_dir), state())
    report = verify_checkpoint(checkpoint_dir)
    assert report.is_sound
    assert report.num_verified + report.num_unverified > 15


def test_verify_counts_tensors_as_unverified_when_they_lie_in_safetensors(
    safetensors: Path,
) -> None:
    report = verify_checkpoint(safetensors)
    assert report.is_sound
    assert report.num_verified == 3  # objects, in a file of their own
    assert report.num_unverified > 10


def test_verify_counts_items_as_unverified_when_they_were_transformed(
    checkpoint_dir: Path,
) -> None:
    save_with(MPFsspecWriter(checkpoint_dir, _extensions=[Mask(7)]), state())
    report = verify_checkpoint(checkpoint_dir)
    assert report.is_sound and report.num_verified == 0 and report.num_unverified > 15


class PlannerOfBytes(DefaultSavePlanner):
    """Stores what it likes in the place of objects."""

    contents: dict[str, bytes]

    def resolve_data(self, write_item: WriteItem) -> Any:
        found = self.contents.get(write_item.index.fqn)
        return super().resolve_data(write_item) if found is None else io.BytesIO(found)


def deflated(content: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("content", content)
        archive.comment = b"not by torch"
    return stream.getvalue()


@pytest.mark.parametrize("nbytes", [100, 5 * MIB])
def test_verify_takes_objects_when_a_planner_stored_other_bytes(
    nbytes: int, checkpoint_dir: Path
) -> None:
    planner = PlannerOfBytes()
    planner.contents = {"raw": b"\1" * nbytes, "zip": deflated(os.urandom(nbytes))}
    save_with(MPFsspecWriter(checkpoint_dir), dict.fromkeys(planner.contents, "x"), planner)
    report = verify_checkpoint(checkpoint_dir)
    assert report.is_sound
    assert (report.num_verified, report.num_unverified) == (1, 1)
    part = part_of(checkpoint_dir, "zip")
    flip(checkpoint_dir / part.file, part.start + part.nbytes // 2)
    assert damaged(checkpoint_dir) == [(part.file, "zip")]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_verify_gives_one_report_whatever_the_number_of_threads(
    num_workers: int, ours: Path
) -> None:
    for key in ("tied.other.weight", "large"):
        part = part_of(ours, key)
        flip(ours / part.file, part.start + part.nbytes // 2)
    one = verify_checkpoint(ours, num_workers=num_workers)
    assert {finding.key for finding in one.damage} == {"tied.other.weight", "large"}
    assert one.damage == verify_checkpoint(ours).damage


def test_verify_tells_of_all_bytes_when_it_goes_on(ours: Path) -> None:
    told: list[tuple[int, int]] = []
    report = verify_checkpoint(ours, on_bytes=lambda *bytes_: told.append(bytes_))
    assert told == sorted(told)
    assert told[-1] == (report.nbytes, report.nbytes)


def test_verify_ends_its_threads_when_the_caller_interrupts(ours: Path) -> None:
    """The guard against leaks sees a thread or a file that is left."""

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify_checkpoint(ours, on_bytes=interrupt, num_workers=2)
    assert not [thread for thread in threading.enumerate() if "verify" in thread.name]


# -- damage -------------------------------------------------------------------------------------


# Within the whole item: its headers, its payload, its directory. Some bits of a zip mean nothing.
@pytest.mark.parametrize("key", ["tied.other.weight", "large", "step", "objects", "blob"])
@pytest.mark.parametrize("where", ["signature", "payload", "directory", "end"])
def test_verify_names_file_and_key_when_a_bit_is_wrong(where: str, key: str, saved: Path) -> None:
    part = part_of(saved, key)
    stored = (saved / part.file).read_bytes()[part.start : part.stop]
    record = max(read_records(memoryview(stored)), key=lambda record: record.nbytes)
    at = {
        "signature": 1,
        "payload": record.start + record.nbytes // 2,
        "directory": stored.rindex(b"PK\1\2") + 17,  # CRC
        "end": stored.rindex(b"PK\5\6") + 16,  # offset of the directory
    }[where]
    flip(saved / part.file, part.start + at, bit=3)
    report = verify_checkpoint(saved)
    assert [(finding.file, finding.key) for finding in report.damage] == [(part.file, key)]
    assert "expected" in report.damage[0].text
    assert report.num_verified > 10


def test_verify_raises_when_a_bit_of_the_metadata_is_wrong(ours: Path) -> None:
    path = ours / ".metadata"
    for at in (0, 200, path.stat().st_size - 1):
        flip(path, at)
        with pytest.raises(CorruptCheckpointError, match=r"\.metadata"):
            verify_checkpoint(ours)
        flip(path, at)
    assert verify_checkpoint(ours).is_sound


def test_verify_names_file_and_keys_when_a_file_is_cut_off(saved: Path) -> None:
    part = part_of(saved, "large")
    os.truncate(saved / part.file, part.stop - 10)
    report = verify_checkpoint(saved)
    assert {finding.file for finding in report.damage} == {part.file}
    assert {finding.key for finding in report.damage} >= {"", "large"}
    text = next(finding.text for finding in report.damage if finding.key == "large")
    assert text == (
        f"cut off: expected {part.nbytes} bytes at {part.start}, found {part.nbytes - 10}"
    )


def test_verify_names_the_file_when_it_is_missing(saved: Path) -> None:
    part = part_of(saved, "large")
    (saved / part.file).unlink()
    report = verify_checkpoint(saved)
    (finding,) = report.damage
    assert finding.file == part.file and finding.text.startswith("missing: ")
    assert "'" in finding.text  # a key


@pytest.mark.parametrize(
    "writer", ["ours, many files", "stock, many files", "filesystem, 4 threads"]
)
def test_verify_names_both_files_when_they_were_swapped(writer: str, checkpoint_dir: Path) -> None:
    save_with(WRITERS[writer](checkpoint_dir), {"a": torch.ones(6, 2), "b": torch.ones(3, 4)})
    one, other = (checkpoint_dir / part_of(checkpoint_dir, key).file for key in "ab")
    third = checkpoint_dir / "third"
    for source, target in ((one, third), (other, one), (third, other)):
        source.rename(target)
    assert sorted(key for _, key in damaged(checkpoint_dir)) == ["a", "b"]


@pytest.mark.parametrize("numel", [1000, 2 * MIB])
def test_verify_names_keys_when_the_metadata_swaps_them(numel: int, checkpoint_dir: Path) -> None:
    """Both containers are sound, and of one length: only their dtypes tell them apart."""
    tensors = {"a": torch.ones(numel), "b": torch.ones(numel, dtype=torch.int32)}
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=1), tensors)

    def swap(metadata: Any) -> None:
        (one, a), (other, b) = metadata.storage_data.items()
        metadata.storage_data = {one: b, other: a}

    change_metadata(checkpoint_dir, swap)
    report = verify_checkpoint(checkpoint_dir)
    assert sorted(finding.key for finding in report.damage) == ["a", "b"]
    assert any("expected float32" in finding.text for finding in report.damage)


def test_verify_names_the_key_when_its_offset_is_wrong(ours: Path) -> None:
    def shift(metadata: Any) -> None:
        for index, place in metadata.storage_data.items():
            if index.fqn == "large":
                place.offset -= 1

    change_metadata(ours, shift)
    assert "large" in {key for _, key in damaged(ours)}


def test_verify_names_the_key_when_its_offset_is_below_zero(ours: Path) -> None:
    def shift(metadata: Any) -> None:
        for index, place in metadata.storage_data.items():
            if index.fqn == "step":
                place.offset = -5

    change_metadata(ours, shift)
    assert "step" in {key for _, key in damaged(ours)}


def test_verify_names_the_key_when_no_place_is_known(ours: Path) -> None:
    def drop(metadata: Any) -> None:
        metadata.storage_data = {
            index: place for index, place in metadata.storage_data.items() if index.fqn != "large"
        }

    change_metadata(ours, drop)
    findings = verify_checkpoint(ours).damage
    assert Finding("", "large", "the metadata does not say where its chunk at [0] is stored") in (
        findings
    )


def test_verify_tells_bytes_that_no_key_has_when_a_file_is_too_long(ours: Path) -> None:
    name = shard_names(ours)[0]
    size = (ours / name).stat().st_size
    overwrite(ours / name, size, b"12345")
    assert verify_checkpoint(ours).damage == (
        Finding(name, "", f"expected nothing, found 5 bytes at {size}"),
    )


def test_verify_tells_other_files_with_their_sizes_and_finds_them_sound(ours: Path) -> None:
    (ours / "__0_0.deadbeef.distcp").write_bytes(bytes(100))
    (ours / "notes.txt").write_bytes(bytes(7))
    report = verify_checkpoint(ours)
    assert report.is_sound
    assert [(file.name, file.nbytes, file.kind) for file in report.checkpoint.others] == [
        ("__0_0.deadbeef.distcp", 100, "shard of another save"),
        ("notes.txt", 7, "other"),
    ]


def test_verify_names_the_file_when_it_may_not_be_read(
    ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = part_of(ours, "large")
    really_open = os.open

    def guarded(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith(part.file):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return really_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", guarded)
    report = verify_checkpoint(ours)
    assert {finding.file for finding in report.damage} == {part.file}
    assert all("Permission denied" in finding.text for finding in report.damage)
    assert report.num_verified > 0


def test_verify_raises_when_there_is_nothing_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for place in (tmp_path, tmp_path / "notes.txt", tmp_path / "not there"):
        with pytest.raises(IncompleteCheckpointError):
            verify_checkpoint(place)


def test_verify_finds_a_directory_of_shards_incomplete(ours: Path) -> None:
    (ours / ".metadata").unlink()
    assert verify_checkpoint(ours).damage == (Finding("", "", "there is no .metadata"),)


# -- safetensors --------------------------------------------------------------------------------


def tensor_file(folder: Path) -> Path:
    return folder / part_of(folder, "large").file


def header_of(path: Path) -> tuple[int, Any]:
    content = path.read_bytes()
    (nbytes,) = struct.unpack_from("<Q", content)
    return nbytes, json.loads(content[8 : 8 + nbytes])


@pytest.mark.parametrize(
    ("at", "content", "text"),
    [
        (0, (2**40).to_bytes(8, "little"), "its length says"),
        (0, (64).to_bytes(8, "little"), "no such JSON"),
        (8, b"}", "no such JSON"),
    ],
)
def test_verify_names_the_file_when_a_safetensors_header_is_damaged(
    at: int, content: bytes, text: str, safetensors: Path
) -> None:
    path = tensor_file(safetensors)
    overwrite(path, at, content)
    findings = verify_checkpoint(safetensors).damage
    assert {finding.file for finding in findings} == {path.name}
    assert any(text in finding.text for finding in findings)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "I32"},
        {"shape": [3]},
        {"data_offsets": [0, 8]},
        {"data_offsets": [-4, 8]},
        {"dtype": "X9"},
    ],
)
def test_verify_finds_damage_when_a_safetensors_header_says_otherwise(
    change: dict[str, Any], safetensors: Path
) -> None:
    path = tensor_file(safetensors)
    nbytes, header = header_of(path)
    header["large"].update(change)
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= nbytes
    overwrite(path, 8, text.ljust(nbytes))
    assert {file for file, _ in damaged(safetensors)} == {path.name}


def test_verify_finds_damage_when_a_safetensors_file_is_cut_off_or_too_long(
    safetensors: Path,
) -> None:
    path = tensor_file(safetensors)
    size = path.stat().st_size
    for new in (size - 1, 5, 0, size + 3):
        content = path.read_bytes()
        os.truncate(path, new)
        assert {file for file, _ in damaged(safetensors)} == {path.name}, new
        path.write_bytes(content)
    assert damaged(safetensors) == []


# -- memory and places --------------------------------------------------------------------------


@pytest.mark.parametrize("writer", ["ours", "filesystem, 1 thread"])
@pytest.mark.parametrize("is_sound", [True, False])
@pytest.mark.parametrize("kind", ["tensor", "object", "many"])
def test_verify_holds_a_few_pieces_when_a_file_is_large(
    kind: str, is_sound: bool, writer: str, checkpoint_dir: Path
) -> None:
    """200 MiB in one tensor, in one object of many tensors, in many tensors."""
    one = torch.zeros(200 * MIB // 4)
    content: Any = {
        "tensor": {"x": one},
        "object": {"x": tuple(torch.zeros(MIB // 4) for _ in range(200))},
        "many": {str(n): part.clone() for n, part in enumerate(one.chunk(100))},
    }[kind]
    save_with(WRITERS[writer](checkpoint_dir), content)
    del one, content
    if not is_sound:
        part = next(iter(inspect_checkpoint(checkpoint_dir).parts))
        with open(checkpoint_dir / part.file, "r+b") as file:
            file.seek(part.start + part.nbytes // 2)
            file.write(b"\1")
    verify_checkpoint(checkpoint_dir, num_workers=1)  # imports
    tracemalloc.start()
    try:
        assert verify_checkpoint(checkpoint_dir, num_workers=2).is_sound == is_sound
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()


@pytest.fixture
def in_memory() -> Iterator[str]:
    url = "memory://verified/checkpoint"
    save_with(MPFsspecWriter(url), state())
    yield url
    fsspec.filesystem("memory").rm("/verified", recursive=True)


def test_verify_reads_memory_when_the_checkpoint_lies_there(in_memory: str) -> None:
    report = verify_checkpoint(in_memory, num_workers=4)
    assert report.is_sound and report.num_unverified == 0 and report.num_verified > 15
    fs = fsspec.filesystem("memory")
    name = next(file.name for file in report.checkpoint.files if file.num_parts)
    content = bytearray(fs.cat_file(f"/verified/checkpoint/{name}"))
    content[1] ^= 1
    fs.pipe_file(f"/verified/checkpoint/{name}", bytes(content))
    assert [finding.file for finding in verify_checkpoint(in_memory).damage] == [name]


@pytest.fixture
def asynclike() -> Iterator[type[AsyncLikeFileSystem]]:
    """Without instances, which keep the methods that their class had when they were made."""
    AsyncLikeFileSystem.clear_instance_cache()
    yield AsyncLikeFileSystem
    AsyncLikeFileSystem.clear_instance_cache()


def test_verify_asks_for_neighbours_at_once_when_each_read_is_a_request(
    checkpoint_dir: Path,
    asynclike: type[AsyncLikeFileSystem],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = {f"small{n}": torch.full((50,), n) for n in range(200)}
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=1), {**tensors, **state()})
    asked: list[tuple[int, int]] = []
    real = asynclike._cat_file

    async def cat_file(
        fs: Any, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        if path.endswith(".distcp"):
            assert start is not None and end is not None
            asked.append((start, end))
        return await real(fs, path, start, end, **kwargs)

    monkeypatch.setattr(asynclike, "_cat_file", cat_file)
    report = verify_checkpoint(f"asynclike://{checkpoint_dir}")
    assert report.is_sound and report.num_verified > 200
    assert 0 < len(asked) < 40
    assert max(end - start for start, end in asked) <= 8 * MIB


def test_verify_reads_again_when_an_error_passes(
    ours: Path, asynclike: type[AsyncLikeFileSystem], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = asynclike._cat_file
    failed: list[str] = []

    async def cat_file(fs: Any, path: str, *arguments: Any, **kwargs: Any) -> bytes:
        if path.endswith(".distcp") and path not in failed:
            failed.append(path)
            raise ConnectionResetError(errno.ECONNRESET, "the line is cut")
        return await real(fs, path, *arguments, **kwargs)

    monkeypatch.setattr(asynclike, "_cat_file", cat_file)
    assert verify_checkpoint(f"asynclike://{ours}").is_sound
    assert len(failed) == len(shard_names(ours))


def test_package_has_both_names_when_they_are_asked_for(ours: Path) -> None:
    found = mpwriter.verify(ours)
    assert isinstance(found, VerifyReport) and found.is_sound
    assert isinstance(mpwriter.inspect(str(ours)), Checkpoint)


def test_verify_refuses_a_number_of_threads_when_it_makes_no_sense(ours: Path) -> None:
    with pytest.raises(ValueError, match="num_workers"):
        verify_checkpoint(ours, num_workers=0)


def wrong_in(header: Any, payload_bytes: int) -> list[tuple[str, str]]:
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(payload_bytes)

    def read_into(offset: int, view: memoryview) -> None:
        view[:] = content[offset : offset + len(view)]

    return list(check_header(read_into, len(content), []))


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_check_header_finds_nothing_when_tensors_fill_the_file() -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": entry("F32", [2], 0, 8),
        "empty": entry("I64", [0, 3], 8, 8),
        "pairs": entry("F4", [4], 8, 10),
    }
    assert wrong_in(header, 10) == []
    assert wrong_in({}, 0) == []


@pytest.mark.parametrize(
    ("second", "key"),
    [
        (entry("F32", [2], 4, 12), "b"),  # over the first
        (entry("F32", [2], 12, 20), "b"),  # behind a gap
        (entry("F32", [3], 8, 16), "b"),  # a shape of other length
        (entry("F33", [2], 8, 16), "b"),
        (entry("F32", [1], 8, 12), ""),  # the file goes on
        (entry("F32", [3], 8, 20), ""),  # the file ends before
    ],
)
def test_check_header_names_the_key_when_tensors_do_not_fill_the_file(
    second: dict[str, Any], key: str
) -> None:
    wrong = wrong_in({"a": entry("F32", [2], 0, 8), "b": second}, 16)
    assert key in {found for found, _ in wrong}
    assert all("expected" in text for _, text in wrong)
