"""The zip's bookkeeping: what is sound, what is not, and what would cost too much."""

from __future__ import annotations

import io
import struct
import zipfile

import pytest
import torch

from mpwriter._zipread import ContainerError, read_records
from tests.containers import contained, saved, zipped


class Unseekable(io.RawIOBase):
    """Makes zipfile write data descriptors."""

    def __init__(self) -> None:
        self.content = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, content: bytes) -> int:  # type: ignore[override]
        self.content += content
        return len(content)


def parts(container: bytes) -> list[tuple[str, bytes]]:
    return [
        (record.name.decode(), container[record.start : record.start + record.nbytes])
        for record in read_records(memoryview(container))
    ]


def expected_parts(container: bytes) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(container)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def test_read_records_finds_all_records_when_the_zip_is_sound() -> None:
    for container in (
        contained(torch.arange(9)),
        saved(torch.arange(9)),
        saved({str(number): torch.arange(number) for number in range(300)}),
        zipped({"a": b"1", "b/c": b"", "ä": b"333"}),
        zipped({}),
    ):
        assert parts(container) == expected_parts(container)


def test_read_records_finds_all_records_when_zipfile_streamed_them() -> None:
    stream = Unseekable()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in ("a", "b"):
            with archive.open(name, "w", force_zip64=name == "b") as record:
                record.write(name.encode() * 50)
    container = bytes(stream.content)
    assert [content for _, content in parts(container)] == [b"a" * 50, b"b" * 50]


def test_read_records_raises_when_two_records_share_a_name() -> None:
    container = zipped({"archive/a": b"x", "archive/b": b"y"}).replace(b"archive/b", b"archive/a")
    with pytest.raises(ContainerError, match="expected one record b'archive/a', found two"):
        read_records(memoryview(container))


def test_read_records_raises_when_records_claim_the_same_bytes() -> None:
    """A directory of many entries that all name one large record would take for ever to check."""
    container = zipped({"archive/a": b"x" * 1000})
    entry_at = container.index(b"PK\x01\x02")
    entry, end = container[entry_at:-22], bytearray(container[-22:])
    end[8:16] = struct.pack("<HHI", 3, 3, 3 * len(entry))
    with pytest.raises(ContainerError, match="expected record 1 at"):
        read_records(memoryview(container[:entry_at] + entry * 3 + end))


@pytest.mark.parametrize("count", [0, 1, 3, 0xFFFF])
def test_read_records_raises_when_the_count_is_wrong(count: int) -> None:
    container = bytearray(zipped({"archive/a": b"x", "archive/b": b"y"}))
    container[-14:-10] = struct.pack("<HH", count, count)
    with pytest.raises(ContainerError, match="expected"):
        read_records(memoryview(container))


def test_read_records_raises_when_zip64_counts_are_huge() -> None:
    container = saved(torch.zeros(1))
    huge = bytearray(container)
    at = container.rindex(b"PK\x06\x06")
    huge[at + 24 : at + 40] = b"\xff" * 16
    huge[-14:-10] = b"\xff" * 4
    with pytest.raises(ContainerError, match="found the directory's end"):
        read_records(memoryview(huge))


def test_read_records_raises_when_something_lies_in_front() -> None:
    container = zipped({"archive/a": b"x"})
    with zipfile.ZipFile(io.BytesIO(b"#!stub" + container)) as archive:
        assert archive.read("archive/a") == b"x"  # the standard library finds it nevertheless
    with pytest.raises(ContainerError):
        read_records(memoryview(b"#!stub" + container))


def test_read_records_marks_records_that_are_not_stored_as_they_are() -> None:
    container = zipped({"archive/a": b"x" * 100}, compression=zipfile.ZIP_DEFLATED)
    assert [record.stored for record in read_records(memoryview(container))] == [False]
    encrypted = bytearray(zipped({"archive/a": b"x" * 100}))
    encrypted[6] |= 1
    encrypted[encrypted.index(b"PK\x01\x02") + 8] |= 1
    assert [record.stored for record in read_records(memoryview(encrypted))] == [False]
