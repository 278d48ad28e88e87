"""Whatever a state holds, and however it is written: it loads to the last bit, everywhere."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

from mpwriter import FsspecReader, MPFsspecWriter, SerializationFormat
from mpwriter._safetensors import SAFETENSORS_DTYPES
from tests.containers import stock_dtypes
from tests.states import (
    STOCK_WRITERS,
    assert_loads_everywhere,
    assert_same,
    bits,
    blank,
    load_into,
    random_bits,
    save_with,
    shard_bytes,
    shard_names,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of complex32

State = dict[str, Any]

# DCP's own planning refuses bits8 and its kin.
_DTYPES = [getattr(torch, name) for name in stock_dtypes() if not name.startswith("bits")]
# Stock keeps strides in its files, and torch copies this one only where it is contiguous.
_COPIED_DTYPES = [dtype for dtype in _DTYPES if str(dtype) != "torch.float4_e2m1fn_x2"]
# A 0-d float4 is refused: the format counts its elements in pairs along the last dimension.
_SAFE_DTYPES = [
    getattr(torch, name)
    for name in SAFETENSORS_DTYPES
    if hasattr(torch, name) and name != "float4_e2m1fn_x2"
]
_FLIPPABLE = (torch.complex32, torch.complex64, torch.complex128)

_examples = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

# -- states ------------------------------------------------------------------------------------

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


class _Printable:
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
        return str({key: _Printable(entry) for key, entry in value.items()})
    if isinstance(value, list):
        return str([_Printable(entry) for entry in value])
    return repr(value)[:80]


# No dots: DCP joins the keys of a path with them, and refuses two paths that come out alike.
_keys = st.text(max_size=12).map(lambda key: key.replace(".", "_"))


@st.composite
def _states(draw: st.DrawFn, dtypes: list[torch.dtype] = _DTYPES) -> _Printable:
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
    return _Printable({key: value(0) for key in keys})


# -- ways to write it ----------------------------------------------------------------------------

_copy_aheads = st.one_of(
    st.integers(1, 5000), st.sampled_from([1, 2, 4095, 4096, 4097, 65536]), st.just(64 * 2**20)
)


@st.composite
def _writer_options(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "single_file_per_rank": draw(st.booleans()),
        "num_workers": draw(st.integers(1, 4)),
        "per_worker_copy_ahead": draw(_copy_aheads),
        # What fsync does to a disk is not what is looked at here.
        "sync_files": draw(st.sampled_from([False, False, False, True])),
    }


@contextmanager
def _folder() -> Iterator[Path]:
    """A place for a checkpoint; what DCP raises becomes an exception that Hypothesis shrinks."""
    with tempfile.TemporaryDirectory() as name:
        try:
            yield Path(name) / "checkpoint"
        except CheckpointException as error:
            raise AssertionError(str(error)) from None


def _tensor_leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    entries = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list)):
        return []
    return [leaf for entry in entries for leaf in _tensor_leaves(entry)]


def _facts(state: State) -> list[Any]:
    return [
        (leaf.data_ptr(), leaf.is_shared(), leaf.stride(), leaf._version, bits(leaf))
        for leaf in _tensor_leaves(state)
    ]


@_examples
@given(case=_states(), options=_writer_options())
def test_load_gives_back_what_was_saved(case: _Printable, options: dict[str, Any]) -> None:
    """By our reader and both of stock; and the state is as it was."""
    state = case.state
    before = _facts(state)
    with _folder() as path:
        writer = MPFsspecWriter(path, **options)
        save_with(writer, state)
        assert _facts(state) == before
        assert_loads_everywhere(path, state)
        report = writer.last_report
        assert report is not None and report.nbytes == shard_bytes(path)
        assert all((path / name).stat().st_size for name in shard_names(path))
        if options["single_file_per_rank"]:
            assert len(shard_names(path)) <= options["num_workers"]


@_examples
@given(
    case=_states(_COPIED_DTYPES),
    writer=st.sampled_from(sorted(STOCK_WRITERS)),
    verify=st.booleans(),
)
def test_load_gives_back_what_stock_saved(case: _Printable, writer: str, verify: bool) -> None:
    """FsspecWriter with one thread and with four, FileSystemWriter."""
    state = case.state
    with _folder() as path:
        save_with(STOCK_WRITERS[writer](path), state)
        assert_same(load_into(blank(state), FsspecReader(path, verify=verify)), state)


@_examples
@given(
    cases=st.lists(_states(), min_size=2, max_size=3),
    options=st.lists(_writer_options(), min_size=3, max_size=3),
)
def test_load_gives_back_the_last_when_saved_over_each_other(
    cases: list[_Printable], options: list[dict[str, Any]]
) -> None:
    """Nothing of an earlier save is mixed in or left behind."""
    with _folder() as path:
        for state, chosen in zip([case.state for case in cases], options):
            save_with(MPFsspecWriter(path, **chosen), state)
            assert_same(load_into(blank(state), FsspecReader(path)), state)
        places = FsspecReader(path).read_metadata().storage_data
        assert {place.relative_path for place in places.values()} == set(shard_names(path))


@_examples
@given(
    case=_states(_SAFE_DTYPES),
    options=_writer_options(),
)
def test_load_gives_back_what_was_saved_as_safetensors(
    case: _Printable, options: dict[str, Any]
) -> None:
    """By our reader; every tensor by the safetensors package, too."""
    state = case.state
    with _folder() as path:
        writer = MPFsspecWriter(
            path, serialization_format=SerializationFormat.SAFETENSORS, **options
        )
        save_with(writer, state)
        assert_same(load_into(blank(state), FsspecReader(path)), state)
        stored = [
            bits(tensor)
            for name in shard_names(path)
            if name.endswith(".safetensors")
            for tensor in safetensors.torch.load_file(path / name).values()
        ]
        assert sorted(stored) == sorted(bits(leaf) for leaf in _tensor_leaves(state))
