"""Our pickle of a tensor against the one that torch.save makes."""

from __future__ import annotations

import pytest
import torch

from mpwriter._tensor_pickle import contiguous_stride, dump_tensor, num_elements
from tests.containers import SHAPES, random_tensor, records_of, saved, stock_dtypes

# Zero-sized, so that sizes and strides of every pickled width come without the memory.
WIDE_SHAPES: list[tuple[int, ...]] = [
    (0, 255),
    (0, 256, 255),
    (0, 65535, 2),
    (0, 65536, 65535),
    (0, 2**31 - 1),
    (0, 2**31),
    (0, 2**32, 127),
    (0, 2**39 - 1, 3),
    (0, 3, 2**55),
    (0,) * 20,
]


@pytest.mark.parametrize("name", stock_dtypes())
def test_dump_tensor_equals_stock_when_dtype_and_shape_vary(name: str) -> None:
    for shape in [*SHAPES, (255,), (256,), (65535,), (65536,), *WIDE_SHAPES]:
        stock = records_of(saved(random_tensor(name, shape)))["archive/data.pkl"]
        assert dump_tensor(name, shape) == stock, shape


def test_dump_tensor_raises_when_the_dtype_has_no_container() -> None:
    with pytest.raises(KeyError):
        dump_tensor("int4", (3,))


def test_contiguous_stride_equals_torch_when_shapes_vary() -> None:
    for shape in [*SHAPES, *WIDE_SHAPES]:
        tensor = torch.empty(shape, device="meta")
        assert contiguous_stride(shape) == tensor.stride()
        assert num_elements(shape) == tensor.numel()
