"""Containers past 4 GiB, in sparse files: no such amount of memory or disk is used."""

from __future__ import annotations

import mmap
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mpwriter._checksum import crc32
from mpwriter._container import Frame, frame
from mpwriter._decode import ContainerError, _decode_ours, decode
from mpwriter._zipread import read_records

LIMIT = 0xFFFFFFFF
# The payload's size crosses the 32 bits; only the directory's offset does; neither does.
SIZES = [LIMIT + 4096, LIMIT, LIMIT - 1, LIMIT - 500, LIMIT - 2000]


def crc_of_zeros(nbytes: int) -> int:
    crc, chunk = 0, bytes(1 << 24)
    while nbytes:
        crc = crc32(chunk[: min(nbytes, len(chunk))], crc)
        nbytes -= min(nbytes, len(chunk))
    return crc


def write_sparse(path: Path, around: Frame, nbytes: int, crc: int) -> None:
    with path.open("wb") as container:
        container.write(around.prefix)
        container.seek(nbytes, 1)
        container.write(around.suffix(crc))
        assert container.tell() == around.length


@contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    with (
        path.open("rb") as container,
        mmap.mmap(container.fileno(), 0, prot=mmap.PROT_READ) as mapping,
        memoryview(mapping) as view,
    ):
        yield view


@pytest.mark.parametrize("nbytes", SIZES)
def test_frame_loads_when_its_fields_reach_32_bits(tmp_path: Path, nbytes: int) -> None:
    path = tmp_path / "sparse"
    for position in (0, 5):
        around = frame("uint8", (nbytes,), nbytes, position)
        write_sparse(path, around, nbytes, 0x12345678)
        with zipfile.ZipFile(path) as archive:
            entry = archive.getinfo("archive/data/0")
        assert (entry.file_size, entry.compress_size, entry.CRC) == (nbytes, nbytes, 0x12345678)
        tensor = torch.load(path, weights_only=True, mmap=True)
        assert tensor.shape == (nbytes,)
        assert tensor[-1] == 0
        with mapped(path) as view:
            for record in read_records(view):
                if record.name == b"archive/data/0":
                    assert record[1:] == (len(around.prefix), nbytes, 0x12345678, True)
            found = decode(view, verify=False)
            shortcut = _decode_ours(view, False)
            for decoded in (found, shortcut):
                assert decoded is not None
                assert decoded[:4] == ("uint8", (nbytes,), (1,), 0)
                assert len(decoded.payload) == nbytes
                decoded.payload.release()


def test_decode_raises_when_a_zip64_field_is_damaged(tmp_path: Path) -> None:
    nbytes = LIMIT + 4096
    around = frame("uint8", (nbytes,), nbytes, 0)
    suffix = around.suffix(0x12345678)
    path = tmp_path / "sparse"
    write_sparse(path, around, nbytes, 0x12345678)
    # A flip may land in what no reader needs (dates, versions): then nothing else has changed.
    with path.open("r+b") as container:
        for place in range(len(suffix)):
            container.seek(len(around.prefix) + nbytes + place)
            container.write(bytes([suffix[place] ^ 0x10]))
            container.flush()
            with mapped(path) as view:
                try:
                    found = decode(view, verify=False)
                except ContainerError:
                    found = None
                if found is not None:
                    assert found[:4] == ("uint8", (nbytes,), (1,), 0)
                    assert len(found.payload) == nbytes
                    found.payload.release()
            container.seek(len(around.prefix) + nbytes + place)
            container.write(suffix[place : place + 1])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_decode_checks_the_crc_when_the_payload_is_past_4_gib(tmp_path: Path) -> None:
    """Reads 4 GiB of zeros through the page cache."""
    nbytes = LIMIT + 4096
    crc = crc_of_zeros(nbytes)
    path = tmp_path / "sparse"
    around = frame("uint8", (nbytes,), nbytes, 0)
    write_sparse(path, around, nbytes, crc)
    with mapped(path) as view:
        found = decode(view, verify=True)
        assert found is not None
        assert found.checked
        found.payload.release()
    write_sparse(path, around, nbytes, crc ^ 1)
    with mapped(path) as view, pytest.raises(ContainerError, match="expected CRC"):
        decode(view, verify=True)
