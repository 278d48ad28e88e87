"""Every dtype and layout through a save and a load, held against the stock writer and readers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpwriter import FsspecReader, MPFsspecWriter
from mpwriter._compat import StockFsspecReader, StockFsspecWriter
from tests.states import (
    assert_loads_everywhere,
    assert_same,
    bits,
    blank,
    load_into,
    random_bits,
    save_with,
    shard_names,
)


def _dtypes() -> list[torch.dtype]:
    named = {name: getattr(torch, name) for name in dir(torch)}
    return sorted({kind for name, kind in named.items() if isinstance(kind, torch.dtype)}, key=str)


def _tensor_of(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    try:
        return random_bits(dtype, shape)
    except (RuntimeError, NotImplementedError):  # quantized: no plain tensor of such a dtype
        return torch.empty(shape, dtype=dtype)


def _roundtrips(path: Path, tensor: torch.Tensor, writer: Any, reader: Any) -> bool:
    """Whether the value comes back; a wrong value is a failure, not a refusal."""
    try:
        save_with(writer(path), {"layer.weight": tensor})
        loaded = load_into({"layer.weight": blank(tensor)}, reader(path))
    except BaseException as error:
        assert not isinstance(error, KeyboardInterrupt)
        return False
    assert bits(loaded["layer.weight"]) == bits(tensor)
    return True


@pytest.fixture(scope="module")
def stock_dtypes(tmp_path_factory: pytest.TempPathFactory) -> list[torch.dtype]:
    """The dtypes that the stock writer and reader bring back, by trying."""
    folder = tmp_path_factory.mktemp("stock")
    found = [
        dtype
        for dtype in _dtypes()
        if _roundtrips(
            folder / str(dtype), _tensor_of(dtype, (7,)), StockFsspecWriter, StockFsspecReader
        )
    ]
    assert len(found) >= 20
    return found


def test_save_takes_the_dtypes_that_stock_takes(
    stock_dtypes: list[torch.dtype], tmp_path: Path
) -> None:
    """E05: no more, no less."""
    ours = [
        dtype
        for dtype in _dtypes()
        if _roundtrips(tmp_path / str(dtype), _tensor_of(dtype, (7,)), MPFsspecWriter, FsspecReader)
    ]
    assert ours == stock_dtypes


def _layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    matrix = random_bits(dtype, (6, 10), "matrix", spare=3)
    cube = random_bits(dtype, (2, 3, 5, 7), "cube")
    return {
        "scalar": random_bits(dtype, ()),
        "scalar of a larger one": matrix[3, 4],
        "one": random_bits(dtype, (1,)),
        "one of one": random_bits(dtype, (1, 1, 1)),
        "empty": random_bits(dtype, (0,)),
        "empty matrix": random_bits(dtype, (3, 0, 2)),
        "odd": random_bits(dtype, (7, 11)),
        "rows": matrix[1:4],
        "columns": matrix[:, 2:5],
        "steps": matrix[::2, ::3],
        "transposed": matrix.t(),
        "expanded": matrix[:1].expand(5, 10),
        "expanded scalar": random_bits(dtype, ()).expand(4),
        "permuted": cube.permute(0, 2, 3, 1),
        "column": matrix[:, 4],
        "overlapping": matrix.as_strided((8, 4), (2, 1)),
        "large": random_bits(dtype, (300, 71)),
        "large transposed": random_bits(dtype, (300, 71)).t(),
    }


@pytest.mark.parametrize("copy_ahead", [1, 64 * 2**20], ids=["streamed", "at once"])
def test_save_keeps_every_bit_of_every_dtype_and_layout(
    copy_ahead: int, stock_dtypes: list[torch.dtype], checkpoint_dir: Path
) -> None:
    """E01, E05: 0-d, one element, none, any stride; in pieces and in one."""
    state = {str(dtype): _layouts(dtype) for dtype in stock_dtypes}
    writer = MPFsspecWriter(checkpoint_dir, num_workers=2, per_worker_copy_ahead=copy_ahead)
    save_with(writer, state)
    assert_loads_everywhere(checkpoint_dir, state)


def test_save_keeps_zero_dim_tensors_in_one_file_each(
    stock_dtypes: list[torch.dtype], checkpoint_dir: Path
) -> None:
    """E01: 0-d of every dtype, each the only item of a file."""
    state = {str(dtype): random_bits(dtype, ()) for dtype in stock_dtypes}
    save_with(MPFsspecWriter(checkpoint_dir, False, num_workers=2), state)
    assert len(shard_names(checkpoint_dir)) == len(state)
    assert_loads_everywhere(checkpoint_dir, state)


def test_save_resolves_conjugated_and_negated_views(checkpoint_dir: Path) -> None:
    state: dict[str, torch.Tensor] = {}
    for dtype in (torch.complex32, torch.complex64, torch.complex128):
        plain = torch.randn(9, 6, dtype=torch.complex128).to(dtype)
        state |= {
            f"{dtype} conjugated": plain.conj(),
            f"{dtype} transposed": plain.conj().t()[::2],
            f"{dtype} negated": plain.conj().imag,
            f"{dtype} negated part": plain.conj().imag[::2, 1:],
            f"{dtype} plain": plain,
        }
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=2, per_worker_copy_ahead=1), state)
    assert_loads_everywhere(checkpoint_dir, state)


def test_save_keeps_tensors_of_odd_origin(checkpoint_dir: Path) -> None:
    """Memory that is shared, foreign, read-only or not aligned."""
    with torch.inference_mode():
        inference = torch.randn(50)
    frozen = np.arange(60, dtype=np.float32)
    frozen.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        foreign = torch.from_numpy(frozen)
        misaligned = torch.frombuffer(memoryview(bytes(range(256)))[1:241], dtype=torch.float64)
    assert misaligned.data_ptr() % 8
    state = {
        "inference": inference,
        "shared": torch.randn(40).share_memory_(),
        "foreign": foreign,
        "misaligned": misaligned,
        "misaligned matrix": misaligned.view(5, 6).t(),
    }
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=1), state)
    assert_loads_everywhere(checkpoint_dir, state)


def test_load_takes_what_stock_put_at_an_odd_offset(tmp_path: Path) -> None:
    """E05: torch ends the process where it copies complex128 from such an address."""
    residues = set()
    for length in range(24):
        state = {
            "text": "x" * length,
            **{f"{number}": random_bits(torch.complex128, (number,)) for number in range(1, 5)},
            **{f"odd{number}": random_bits(torch.uint8, (number,)) for number in range(1, 5)},
        }
        path = tmp_path / str(length)
        save_with(StockFsspecWriter(path, sync_files=False), state)
        places = FsspecReader(path).read_metadata().storage_data
        residues |= {place.offset % 16 for place in places.values()}
        assert_same(load_into(blank(state), FsspecReader(path)), state)
    assert len(residues) > 8
