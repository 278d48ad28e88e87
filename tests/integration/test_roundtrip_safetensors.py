"""Safetensors files through a save and a load."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch.distributed.checkpoint import filesystem

from mpwriter import FsspecReader, MPFsspecWriter, SerializationFormat
from mpwriter._compat import StockFsspecWriter
from mpwriter._safetensors import SAFETENSORS_DTYPES
from tests.extensions import Mask
from tests.states import (
    assert_same,
    blank,
    load_into,
    outcome,
    random_bits,
    save_with,
    shard_names,
)


def _safetensors_writer(path: Path, **options: Any) -> MPFsspecWriter:
    return MPFsspecWriter(path, serialization_format=SerializationFormat.SAFETENSORS, **options)


def _files(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """What the safetensors package reads of each file."""
    return {
        name: safetensors.torch.load_file(path / name)
        for name in shard_names(path)
        if name.endswith(".safetensors")
    }


def _tensors() -> dict[str, torch.Tensor]:
    base = torch.randn(40, 30)
    shared = torch.randn(300)
    return {
        **{
            name: random_bits(getattr(torch, name), (6, 4))
            for name in SAFETENSORS_DTYPES
            if hasattr(torch, name)
        },
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(3, 0, dtype=torch.int16),
        "odd": torch.arange(7, dtype=torch.uint8),
        "transposed": base.t(),
        "part": base[3:30:4, 2:9],
        "tied": shared,
        "tied too": shared,
        "conjugated": torch.randn(9, dtype=torch.complex64).conj(),
        "large": torch.randn(150_000),
        "ünïcödé / key": torch.ones(2),
    }


@pytest.mark.parametrize("copy_ahead", [1, 64 * 2**20], ids=["streamed", "at once"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_save_makes_a_safetensors_file_per_worker(
    num_workers: int, copy_ahead: int, checkpoint_dir: Path
) -> None:
    """G13: read by the safetensors package and by our reader, to the last bit."""
    state = _tensors()
    writer = _safetensors_writer(
        checkpoint_dir, num_workers=num_workers, per_worker_copy_ahead=copy_ahead
    )
    save_with(writer, dict(state))
    assert len(shard_names(checkpoint_dir)) == num_workers
    save8 = str(FsspecReader(checkpoint_dir).read_metadata().storage_meta.save_id)[:8]
    assert all(
        re.fullmatch(rf"__0_\d+\.{save8}\.safetensors", name)
        for name in shard_names(checkpoint_dir)
    )
    found: dict[str, torch.Tensor] = {}
    for tensors in _files(checkpoint_dir).values():
        assert not found.keys() & tensors.keys()
        found |= tensors
    assert_same(found, state)
    assert_same(load_into(blank(state), FsspecReader(checkpoint_dir)), state)


def test_save_puts_objects_beside_the_safetensors_files(checkpoint_dir: Path) -> None:
    """G13: bytes items in one file of their own, whatever the number of workers."""
    state = {**_tensors(), "objects": {"step": 3, "names": ["a"], "none": None}, "text": "x" * 9999}
    save_with(_safetensors_writer(checkpoint_dir, num_workers=2), state)
    names = shard_names(checkpoint_dir)
    assert sorted(name.rsplit(".", 1)[1] for name in names) == [
        "distcp",
        "safetensors",
        "safetensors",
    ]
    assert_same(load_into(blank(state), FsspecReader(checkpoint_dir)), state)


def test_save_makes_a_safetensors_file_per_tensor_when_asked_to(checkpoint_dir: Path) -> None:
    """G13, G04: with single_file_per_rank=False."""
    state = {**_tensors(), "step": 3, "none": None}
    writer = _safetensors_writer(checkpoint_dir, single_file_per_rank=False, num_workers=2)
    save_with(writer, state)
    files = _files(checkpoint_dir)
    assert [len(tensors) for tensors in files.values()] == [1] * len(_tensors())
    assert len(shard_names(checkpoint_dir)) == len(state)
    assert_same(load_into(blank(state), FsspecReader(checkpoint_dir)), state)


@pytest.mark.parametrize("state", [{}, {"step": 3}, {"weight": torch.ones(5)}], ids=str)
def test_save_makes_no_empty_safetensors_file(state: dict[str, Any], checkpoint_dir: Path) -> None:
    """G04: nothing, an object only, a tensor only."""
    save_with(_safetensors_writer(checkpoint_dir, num_workers=4), state)
    assert len(shard_names(checkpoint_dir)) == len(state)
    assert_same(load_into(blank(state), FsspecReader(checkpoint_dir)), state)


def _header(path: Path) -> dict[str, Any]:
    (name,) = shard_names(path)
    content = (path / name).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    metadata = header["__metadata__"]
    metadata["DCP_SHARDING_INFO"] = json.loads(metadata["DCP_SHARDING_INFO"])
    return header


def test_save_says_in_a_safetensors_file_what_stock_says(tmp_path: Path) -> None:
    """G13: the same metadata, types and shapes; the order of the tensors is each one's own."""
    state = {"a": torch.randn(4, 5), "b": torch.arange(3)}
    save_with(_safetensors_writer(tmp_path / "ours", num_workers=1), state)
    ours = _header(tmp_path / "ours")
    assert ours["__metadata__"] == {
        "DCP_SHARDING_INFO": {"a": {"saved_offsets": [0, 0]}, "b": {"saved_offsets": [0]}},
        "DCP_VERSION": "1.0",
        "format": "pt",
    }
    (name,) = shard_names(tmp_path / "ours")
    begin = (tmp_path / "ours" / name).read_bytes()[:8]
    assert (8 + int.from_bytes(begin, "little")) % 64 == 0
    if not hasattr(filesystem, "SerializationFormat"):
        return  # torch 2.7 writes none
    safe = filesystem.SerializationFormat.SAFETENSORS
    save_with(StockFsspecWriter(tmp_path / "stock", serialization_format=safe), state)
    stock = _header(tmp_path / "stock")
    assert ours.pop("__metadata__") == stock.pop("__metadata__")
    for header in (ours, stock):
        for entry in header.values():
            del entry["data_offsets"]
    assert ours == stock


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.randn(3, dtype=torch.complex128), id="dtype"),
        pytest.param(torch.eye(3).to_sparse(), id="layout"),
    ],
)
def test_save_names_the_key_when_safetensors_cannot_hold_a_tensor(
    tensor: torch.Tensor, checkpoint_dir: Path
) -> None:
    """G13: and leaves nothing."""
    state = {"fine": torch.ones(3), "not.fine": tensor}
    found = outcome(lambda: save_with(_safetensors_writer(checkpoint_dir, num_workers=2), state))
    assert isinstance(found, tuple)
    assert "'not.fine'" in found[1]
    assert list(checkpoint_dir.iterdir()) == []


def test_writer_refuses_extensions_beside_safetensors(checkpoint_dir: Path) -> None:
    """G13: at construction."""
    with pytest.raises(NotImplementedError, match="safetensors"):
        _safetensors_writer(checkpoint_dir, _extensions=[Mask(1)])
    _safetensors_writer(checkpoint_dir, _extensions=[])
    assert not checkpoint_dir.exists()
