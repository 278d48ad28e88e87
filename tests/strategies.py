"""Random states and random ways to write them, for the property tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st

from mpwriter._safetensors import SAFETENSORS_DTYPES
from tests.containers import stock_dtypes
from tests.states import random_bits

__all__ = [
    "COPIED_DTYPES",
    "DTYPES",
    "SAFETENSORS_TORCH_DTYPES",
    "Printable",
    "states",
    "tensor_leaves",
    "writer_options",
]

State = dict[str, Any]

# DCP's own planning refuses bits8 and its kin.
DTYPES = [getattr(torch, name) for name in stock_dtypes() if not name.startswith("bits")]
# Stock keeps strides in its files, and torch copies this one only where it is contiguous.
COPIED_DTYPES = [dtype for dtype in DTYPES if str(dtype) != "torch.float4_e2m1fn_x2"]
# A 0-d float4 is refused: the format counts its elements in pairs along the last dimension.
SAFETENSORS_TORCH_DTYPES = [
    getattr(torch, name)
    for name in SAFETENSORS_DTYPES
    if hasattr(torch, name) and name != "float4_e2m1fn_x2"
]
_FLIPPABLE = (torch.complex32, torch.complex64, torch.complex128)

_sizes = st.one_of(st.integers(0, 5), st.sampled_from([1, 7, 8, 9, 31, 64, 65]))


def _within(dims: list[int], limit: int) -> Iterator[int]:
    """As many of the sizes as stay below `limit` elements altogether, then ones."""
    total = 1
    for size in dims:
        size = size if total * max(1, size) <= limit else 1
        total *= max(1, size)
        yield size


_shapes = st.lists(_sizes, max_size=4).map(lambda sizes: tuple(_within(sizes, 8000)))


@st.composite
def _tensors(draw: st.DrawFn, dtypes: list[torch.dtype]) -> torch.Tensor:
    dtype = draw(st.sampled_from(dtypes))
    tensor = random_bits(
        dtype, draw(_shapes), draw(st.integers(0, 99)), spare=draw(st.sampled_from([0, 0, 1, 5]))
    )
    return draw(_views_of(tensor))


@st.composite
def _views_of(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    """Another way to look at the same memory."""
    for _ in range(draw(st.integers(0, 3))):
        dims = tensor.dim()
        kinds = ["expand"]
        if dims:
            kinds += ["permute", "slice", "select", "flat", "unsqueeze"]
        if tensor.dtype in _FLIPPABLE:
            kinds += ["conj", "neg"]
        kind = draw(st.sampled_from(kinds))
        if kind == "expand" and tensor.numel() < 2000:
            tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)
        elif kind == "permute":
            tensor = tensor.permute(draw(st.permutations(range(dims))))
        elif kind == "slice":
            dim = draw(st.integers(0, dims - 1))
            start = draw(st.integers(0, tensor.shape[dim]))
            stop = draw(st.integers(start, tensor.shape[dim]))
            tensor = tensor[(slice(None),) * dim + (slice(start, stop, draw(st.integers(1, 3))),)]
        elif kind == "select":
            dim = draw(st.integers(0, dims - 1))
            if tensor.shape[dim]:
                tensor = tensor.select(dim, draw(st.integers(0, tensor.shape[dim] - 1)))
        elif kind == "flat" and tensor.is_contiguous():
            tensor = tensor.view(-1)
        elif kind == "unsqueeze":
            tensor = tensor.unsqueeze(draw(st.integers(0, dims)))
        elif kind == "conj":
            tensor = tensor.conj()
        elif kind == "neg":
            tensor = tensor.conj().imag
    return tensor


_objects = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=300)
    | st.binary(max_size=9).map(bytearray)
    | st.sampled_from([b"x" * 30_000, "y" * 5000, range(3), frozenset({1})]),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=6,
)


class Printable:
    """Holds a state; torch cannot print every tensor, and nobody wants to read thousands."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return _described(self.state)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        place = f"{value.data_ptr():#x}"
        flags = "conj " * value.is_conj() + "neg " * value.is_neg()
        return f"<{value.dtype} {tuple(value.shape)} {value.stride()} {flags}at {place}>"
    if isinstance(value, dict):
        return str({key: Printable(entry) for key, entry in value.items()})
    if isinstance(value, list):
        return str([Printable(entry) for entry in value])
    return repr(value)[:80]


# No dots: DCP joins the keys of a path with them, and refuses two paths that come out alike.
_keys = st.text(max_size=12).map(lambda key: key.replace(".", "_"))


@st.composite
def states(draw: st.DrawFn, dtypes: list[torch.dtype] = DTYPES) -> Printable:
    """Nested; some tensors are tied, and some are views of others."""
    seen: list[torch.Tensor] = []

    def tensor() -> torch.Tensor:
        kind = draw(st.sampled_from(["new", "new", "same", "alike", "view"]))
        if not seen or kind == "new":
            made = draw(_tensors(dtypes))
        else:
            made = draw(st.sampled_from(seen))
            if kind == "alike":
                made = made.detach()
            elif kind == "view":
                made = draw(_views_of(made))
                if made.dtype not in dtypes:  # the imaginary part of complex32, say
                    made = seen[0]
        seen.append(made)
        return made

    def value(depth: int) -> Any:
        kinds = ["tensor", "tensor", "tensor"]
        kinds += ["object", "object"] + ["dict", "list"] * (depth < 2)
        kind = draw(st.sampled_from(kinds))
        if kind == "tensor":
            return tensor()
        if kind == "object":
            return draw(_objects)
        if kind == "dict":
            # Stock loses count where an empty dict is inside a list.
            keys = st.lists(_keys, unique=True, min_size=min(1, depth), max_size=4)
            return {key: value(depth + 1) for key in draw(keys)}
        return [tensor(), *(value(depth + 1) for _ in range(draw(st.integers(0, 3))))]

    keys = draw(st.lists(_keys, unique=True, max_size=8))
    return Printable({key: value(0) for key in keys})


# -- ways to write it ----------------------------------------------------------------------------

_copy_aheads = st.one_of(
    st.integers(1, 5000), st.sampled_from([1, 2, 4095, 4096, 4097, 65536]), st.just(64 * 2**20)
)


@st.composite
def writer_options(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "single_file_per_rank": draw(st.booleans()),
        "num_workers": draw(st.integers(1, 4)),
        "per_worker_copy_ahead": draw(_copy_aheads),
        # What fsync does to a disk is not what is looked at here.
        "sync_files": draw(st.sampled_from([False, False, False, True])),
    }


def tensor_leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    entries = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list)):
        return []
    return [leaf for entry in entries for leaf in tensor_leaves(entry)]
