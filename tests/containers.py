"""Tensors of every dtype, their containers, and what stock torch makes of them."""

from __future__ import annotations

import io
import math
import random
import warnings
import zipfile
from functools import lru_cache
from typing import Any

import torch

from mpwriter._checksum import crc32
from mpwriter._container import frame
from mpwriter._decode import DecodedTensor

SHAPES: list[tuple[int, ...]] = [
    (),
    (0,),
    (1,),
    (7,),
    (2, 0, 3),
    (3, 5),
    (2, 1, 3),
    (1, 2, 3, 2),
    (2, 1, 2, 3, 1),
]


def saved(value: Any, **options: Any) -> bytes:
    """What torch.save writes."""
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def loaded(container: bytes | memoryview, **options: Any) -> Any:
    return torch.load(io.BytesIO(container), **{"weights_only": True, **options})


def strided(
    storage: bytes,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
    offset: int = 0,
) -> torch.Tensor:
    """A tensor over a storage of its own that holds exactly these bytes."""
    copied = torch.tensor(list(storage), dtype=torch.uint8)
    if stride is None:
        stride = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(copied.untyped_storage(), offset, shape, stride)


def random_tensor(name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bits as a contiguous tensor; they mean NaNs and odd booleans too."""
    dtype: torch.dtype = getattr(torch, name)
    nbytes = math.prod(shape) * dtype.itemsize
    return strided(random.Random(f"{name} {shape} {seed}").randbytes(nbytes), dtype, shape)


def storage_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy())


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to the last bit of their storages, and laid out alike."""
    assert type(found) is type(expected)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.stride() == expected.stride()
    assert found.storage_offset() == expected.storage_offset()
    assert storage_bytes(found) == storage_bytes(expected)


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def contained(tensor: torch.Tensor, position: int = 0) -> bytes:
    """Our container around a contiguous tensor, as a worker would write it."""
    payload = storage_bytes(tensor)
    around = frame(dtype_name(tensor), tuple(tensor.shape), len(payload), position)
    container = around.prefix + payload + around.suffix(crc32(payload))
    assert len(container) == around.length
    assert (position + len(around.prefix)) % 64 == 0
    return container


def rebuilt(decoded: DecodedTensor) -> torch.Tensor:
    """The tensor that `decode` found."""
    dtype = getattr(torch, decoded.dtype)
    payload = bytes(decoded.payload)
    return strided(payload, dtype, decoded.shape, decoded.stride, decoded.storage_offset)


def zipped(records: dict[str, bytes], *, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A zip by the standard library, CRCs and all: stands for a file made to look right."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return stream.getvalue()


def records_of(container: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(container)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@lru_cache(maxsize=1)
def stock_dtypes() -> list[str]:
    """Every dtype of this torch whose plain tensors torch.save and torch.load take: tried."""
    names = []
    for name in sorted(dir(torch)):
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype) or str(dtype) != f"torch.{name}":
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loaded(saved(torch.empty(4, dtype=dtype)))
        except (RuntimeError, KeyError, TypeError):
            continue
        names.append(name)
    assert len(names) >= 20, names
    return names
