"""Our container against what torch.save makes and torch.load takes."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.utils import _create_file_view

from mpwriter._checksum import crc32
from mpwriter._compat import StockFsspecReader, StockFsspecWriter
from mpwriter._container import ELEMENT_BYTES, frame
from tests.containers import (
    SHAPES,
    assert_same_bits,
    contained,
    loaded,
    random_tensor,
    records_of,
    saved,
    stock_dtypes,
    storage_bytes,
)

DTYPES = stock_dtypes()


def test_element_bytes_names_exactly_the_dtypes_that_stock_takes() -> None:
    """E05: a dtype that a later torch learns to save shows up here."""
    assert sorted(name for name in ELEMENT_BYTES if hasattr(torch, name)) == DTYPES
    assert all(ELEMENT_BYTES[name] == getattr(torch, name).itemsize for name in DTYPES)


@pytest.mark.parametrize("name", DTYPES)
def test_frame_loads_as_stock_when_dtype_and_shape_vary(name: str) -> None:
    """E03, E05."""
    for shape in SHAPES:
        tensor = random_tensor(name, shape)
        stock = loaded(saved(tensor))
        assert_same_bits(loaded(contained(tensor)), stock)
        assert_same_bits(loaded(contained(tensor), weights_only=False), stock)


@pytest.mark.parametrize("dtype", ["float32", "uint8", "float8_e4m3fn"])
def test_frame_aligns_the_payload_when_it_starts_anywhere(dtype: str) -> None:
    for position in [*range(64), 4096 + 5, 2**40 + 63]:
        tensor = random_tensor(dtype, (position % 7,), position)
        assert_same_bits(loaded(contained(tensor, position)), tensor)


def test_frame_is_a_sound_zip_when_others_read_it() -> None:
    tensor = random_tensor("int16", (3, 7))
    for position in range(64):
        with zipfile.ZipFile(io.BytesIO(contained(tensor, position))) as archive:
            assert archive.testzip() is None
            assert archive.read("archive/data/0") == storage_bytes(tensor)


def test_frame_holds_the_records_of_stock_when_compared() -> None:
    tensor = random_tensor("float32", (300, 2))
    stock = records_of(saved(tensor))
    for name, content in records_of(contained(tensor)).items():
        assert stock[name] == content


def test_containers_load_through_the_file_view_when_they_share_a_file(tmp_path: Path) -> None:
    tensors = [random_tensor(name, shape) for name in DTYPES for shape in SHAPES[:6]]
    path = tmp_path / "shard"
    ranges = []
    with path.open("wb") as shard:
        shard.write(b"bytes item")
        for tensor in tensors:
            start = shard.tell()
            shard.write(contained(tensor, start))
            ranges.append((start, shard.tell() - start))
    with path.open("rb") as shard:
        for tensor, (start, length) in zip(tensors, ranges):
            view: Any = _create_file_view(shard, start, length)
            assert_same_bits(torch.load(view, map_location="cpu", weights_only=True), tensor)


@pytest.mark.parametrize("reader", [StockFsspecReader, FileSystemReader])
def test_stock_readers_load_a_checkpoint_when_its_shard_holds_our_containers(
    tmp_path: Path, reader: type
) -> None:
    state = {
        f"{name}{shape}": random_tensor(name, shape)
        for name in ("float32", "bfloat16", "int64", "uint8", "uint16")
        for shape in SHAPES
    }
    save(state, storage_writer=StockFsspecWriter(str(tmp_path)), no_dist=True)
    metadata = StockFsspecReader(str(tmp_path)).read_metadata()
    with (tmp_path / "ours.distcp").open("wb") as shard:
        for index, place in metadata.storage_data.items():
            place.relative_path, place.offset = "ours.distcp", shard.tell()
            shard.write(contained(state[index.fqn], place.offset))
            place.length = shard.tell() - place.offset
    (tmp_path / "__0_0.distcp").unlink()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))

    found = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    load(found, storage_reader=reader(str(tmp_path)), no_dist=True)
    for key, tensor in state.items():
        assert storage_bytes(found[key]) == storage_bytes(tensor), key


@pytest.mark.parametrize("debug", ["0", "1"])
def test_frame_loads_with_mmap_when_the_file_holds_one_item(
    tmp_path: Path, debug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", debug)
    for name in ("float32", "uint16", "bool"):
        tensor = random_tensor(name, (17, 3))
        path = tmp_path / name
        path.write_bytes(contained(tensor))
        mapped = torch.load(path, weights_only=True, mmap=True)
        assert mapped.shape == tensor.shape
        assert mapped.dtype == tensor.dtype
        assert torch.equal(mapped.view(torch.uint8), tensor.view(torch.uint8))
        if ELEMENT_BYTES[name] > 1:
            assert mapped.data_ptr() % 64 == 0


def test_frame_loads_onto_meta_when_asked() -> None:
    found = loaded(contained(random_tensor("float32", (4, 5))), map_location="meta")
    assert found.shape == (4, 5)
    assert found.is_meta


def test_frame_is_the_same_object_when_asked_again() -> None:
    assert frame("int8", (5,), 5, 3) is frame("int8", (5,), 5, 64 + 3)


def test_frame_raises_when_dtype_has_no_container() -> None:
    for name in ("int4", "qint8", "float3", "", "torch.float32"):
        with pytest.raises(ValueError, match=repr(name)):
            frame(name, (4,), 4, 0)


def test_frame_raises_when_nbytes_is_not_that_of_the_shape() -> None:
    with pytest.raises(ValueError, match="24 bytes, not 23"):
        frame("float32", (2, 3), 23, 0)
    with pytest.raises(ValueError):
        frame("float32", (-2, -3), 24, 0)


def test_crc32_matches_zlib_when_run_in_pieces() -> None:
    content = bytes(range(256)) * 33
    for cut in (0, 1, 7, 4096, len(content)):
        assert crc32(content[cut:], crc32(content[:cut])) == zlib.crc32(content)
    assert crc32(memoryview(content)) == zlib.crc32(content)
    assert crc32(b"") == 0


def test_import_leaves_torch_out_when_a_worker_does_it() -> None:
    modules = "_container, _decode, _safetensors, _tensor_pickle, _tensor_unpickle, _zipread"
    code = f"import sys; from mpwriter import {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
