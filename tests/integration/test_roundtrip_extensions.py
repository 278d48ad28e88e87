"""Stream transforms through a save and a load."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.api import CheckpointException

from mpwriter import FsspecReader, MPFsspecWriter
from mpwriter._compat import StockFsspecReader, StockFsspecWriter
from mpwriter.errors import CorruptCheckpointError
from tests.extensions import Mask, Rotate, Stubborn, registry
from tests.states import (
    READERS,
    assert_same,
    blank,
    load_into,
    mixed_items,
    outcome,
    save_with,
    shard_bytes,
    shard_names,
)


def _state() -> dict[str, Any]:
    return {
        **mixed_items(30),
        "large": torch.arange(200_000, dtype=torch.float32),
        "scalar": torch.tensor(2.0, dtype=torch.bfloat16),
        "empty": torch.empty(0),
        "quantized": torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8).int_repr(),
        "text": "text" * 50_000,
    }


def _content(path: Path) -> bytes:
    return b"".join((path / name).read_bytes() for name in shard_names(path))


def _descriptors(path: Path) -> list[Any]:
    places = StockFsspecReader(path).read_metadata().storage_data
    return [place.transform_descriptors for place in places.values()]


@pytest.mark.parametrize("copy_ahead", [1, 64 * 2**20], ids=["streamed", "at once"])
@pytest.mark.parametrize("single_file", [True, False])
def test_save_applies_an_extension_in_the_workers(
    single_file: bool, copy_ahead: int, tmp_path: Path
) -> None:
    """G13: without seek or tell; stock reads what we write, and we what stock wrote."""
    state = _state()
    save_with(StockFsspecWriter(tmp_path / "stock", _extensions=[Mask(0x5A)]), state)
    writer = MPFsspecWriter(
        tmp_path / "ours",
        single_file,
        num_workers=2,
        per_worker_copy_ahead=copy_ahead,
        _extensions=[Mask(0x5A)],
    )
    save_with(writer, state)
    assert writer.last_report is not None and writer.last_report.num_workers == 2
    assert writer.last_report.nbytes == shard_bytes(tmp_path / "ours")
    assert _descriptors(tmp_path / "ours") == _descriptors(tmp_path / "stock")
    for folder in ("ours", "stock"):
        for reader in (FsspecReader, FileSystemReader):
            loaded = load_into(blank(state), reader(tmp_path / folder, registry()))
            assert_same(loaded, state, f"{folder} {reader.__module__}")
    assert b"PK\x03\x04" not in _content(tmp_path / "ours")
    assert b"texttext" not in _content(tmp_path / "ours")


def test_save_applies_extensions_in_the_order_in_which_they_are_undone(tmp_path: Path) -> None:
    """G13: two that do not commute.

    Stock names them as we do, but applies them the other way round: it cannot read its own.
    """
    state = _state()
    extensions = [Mask(0x5A), Rotate(7)]
    save_with(MPFsspecWriter(tmp_path / "ours", num_workers=2, _extensions=extensions), state)
    save_with(StockFsspecWriter(tmp_path / "stock", _extensions=extensions), state)
    assert _descriptors(tmp_path / "ours") == _descriptors(tmp_path / "stock")
    assert _descriptors(tmp_path / "ours")[0] == ["stream.rotate/7", "stream.mask/90"]
    for reader in (FsspecReader, FileSystemReader):
        assert_same(load_into(blank(state), reader(tmp_path / "ours", registry())), state)
    with pytest.raises(CheckpointException, match="not closed"):
        load_into(blank(state), FileSystemReader(tmp_path / "stock", registry()))


def test_save_compresses_with_the_extension_of_torch(tmp_path: Path) -> None:
    """G13: ZStandard; stock reads it without being told of it."""
    state = {"zeros": torch.zeros(500_000), "ramp": torch.arange(1000), "text": "a" * 100_000}
    writer = MPFsspecWriter(tmp_path / "ours", num_workers=2, _extensions=[ZStandard()])
    save_with(writer, state)
    assert shard_bytes(tmp_path / "ours") < 20_000
    for name, reader in READERS.items():
        assert_same(load_into(blank(state), reader(tmp_path / "ours")), state, name)
    save_with(StockFsspecWriter(tmp_path / "stock", _extensions=[ZStandard()]), state)
    assert_same(load_into(blank(state), FsspecReader(tmp_path / "stock")), state)


def test_save_leaves_nothing_when_an_extension_fails(checkpoint_dir: Path) -> None:
    """G13: its error comes back from the worker."""
    writer = MPFsspecWriter(checkpoint_dir, num_workers=1, _extensions=[Stubborn(0)])
    found = outcome(lambda: save_with(writer, {"a": torch.ones(3), "b": torch.ones(9)}))
    assert isinstance(found, tuple)
    assert "ArithmeticError: this transform does not want to" in found[1]
    assert list(checkpoint_dir.iterdir()) == []


def test_save_applies_extensions_in_the_trainer_when_no_worker_can_import_them(
    checkpoint_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """G13: a class inside a function cannot be sent; one warning says so."""

    class LocalMask(Mask):
        pass

    with caplog.at_level(logging.WARNING, "mpwriter"):
        for number in range(2):
            writer = MPFsspecWriter(
                checkpoint_dir / str(number), num_workers=2, _extensions=[LocalMask(3)]
            )
            state = mixed_items(12)
            save_with(writer, state)
            assert writer.last_report is not None and writer.last_report.num_workers == 0
            reader = FsspecReader(checkpoint_dir / str(number), registry())
            assert_same(load_into(blank(state), reader), state)
    assert len([r for r in caplog.records if "LocalMask" in r.getMessage()]) == 1


@pytest.mark.parametrize("reader", [FsspecReader, FileSystemReader])
def test_load_raises_as_stock_does_when_it_does_not_know_the_extension(
    reader: Any, checkpoint_dir: Path
) -> None:
    """G13: both name it."""
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=1, _extensions=[Mask(1)]), {"a": 1})
    found = outcome(lambda: load_into({"a": 0}, reader(checkpoint_dir)))
    assert found[0] is ValueError
    assert "stream.mask" in found[1]


def test_load_names_the_file_when_a_transformed_one_is_damaged(checkpoint_dir: Path) -> None:
    """G13: damage below the transform is found too."""
    state = {"weight": torch.randn(5000)}
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=1, _extensions=[Mask(1)]), state)
    (name,) = shard_names(checkpoint_dir)
    content = bytearray((checkpoint_dir / name).read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint_dir / name).write_bytes(content)
    found = outcome(lambda: load_into(blank(state), FsspecReader(checkpoint_dir, registry())))
    assert found[0] is CorruptCheckpointError
    assert name in found[1] and "weight" in found[1]
