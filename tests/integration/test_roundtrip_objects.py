"""Python objects, nesting and keys through a save and a load, held against stock."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import io
import os
import pathlib
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from mpwriter import FsspecReader, MPFsspecWriter
from mpwriter._compat import StockFsspecWriter
from tests.saves import names_in
from tests.states import (
    assert_loads_everywhere,
    assert_same,
    blank,
    load_into,
    outcome,
    save_with,
    shard_names,
)

# -- values ------------------------------------------------------------------------------


@dataclasses.dataclass
class _Config:
    depth: int
    names: list[str]


class _Mode(enum.Enum):
    TRAIN = "train"


class _Level(enum.IntEnum):
    HIGH = 3


def _rng_states() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "numpy generator": np.random.default_rng(3).bit_generator.state,
        "torch": torch.get_rng_state(),
    }


_OBJECTS: dict[str, Any] = {
    "bytes": b"\x00\xff" * 40,
    "no bytes": b"",
    "many bytes": os.urandom(300_000),
    "zip in bytes": b"PK\x03\x04 not a zip at all PK\x05\x06" + bytes(18),
    "bytearray": bytearray(b"abc"),
    "text": "grüße \U0001f600 \x00 end",
    "none": None,
    "numbers": [1, -(2**80), 1.5, float("inf"), 2 + 3j, True],
    "nested": [[1, [2, [3, []]]], [], ({}, {"a": (1,)}), None],
    "tuple": (1, "two", (3.0,)),
    "set": {1, 2, 3},
    "frozenset": frozenset({"a"}),
    "range": range(3, 9, 2),
    "array": np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
    "scalar": np.float64(2.5),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "size": torch.Size([2, 3]),
    "dataclass": _Config(3, ["a", "b"]),
    "enum": _Mode.TRAIN,
    "int enum": _Level.HIGH,
    "namespace": argparse.Namespace(lr=0.1, steps=[1, 2]),
    "counter": collections.Counter("abca"),
    "ordered": collections.OrderedDict(b=1, a=[2]),
    "default": collections.defaultdict(list, {"x": [1]}),
    "deque": collections.deque([1, 2], maxlen=5),
    "path": pathlib.PurePosixPath("/a/b"),
    "time": datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.timezone.utc),
    "decimal": decimal.Decimal("1.10"),
    "fraction": fractions.Fraction(1, 3),
    "function": os.path.join,
    "class": _Config,
}


@pytest.mark.parametrize("single_file", [True, False])
def test_save_keeps_objects(single_file: bool, checkpoint_dir: Path) -> None:
    """E08: whatever can be pickled, as stock."""
    state = {**_OBJECTS, "rng": _rng_states(), "weight": torch.randn(100)}
    save_with(MPFsspecWriter(checkpoint_dir, single_file, num_workers=2), state)
    assert_loads_everywhere(checkpoint_dir, state)


def test_load_takes_objects_that_stock_wrote(checkpoint_dir: Path) -> None:
    """E08: the other way round."""
    state = {**_OBJECTS, "rng": _rng_states(), "weight": torch.randn(100)}
    save_with(StockFsspecWriter(checkpoint_dir, thread_count=3), state)
    assert_same(load_into(blank(state), FsspecReader(checkpoint_dir)), state)


def test_save_keeps_partials_by_value(checkpoint_dir: Path) -> None:
    """E08: an object that only compares by identity."""
    save_with(
        MPFsspecWriter(checkpoint_dir, num_workers=1),
        {"partial": functools.partial(int, base=2), "shared": [bytearray(b"a")] * 2},
    )
    loaded = load_into({"partial": None, "shared": None}, FsspecReader(checkpoint_dir))
    assert loaded["partial"]("101") == 5
    assert loaded["shared"][0] is loaded["shared"][1]


@pytest.mark.parametrize(
    "value",
    [lambda: 1, sys.stderr, (n for n in ())],
    ids=["function without a name", "file", "generator"],
)
def test_save_raises_as_stock_does_when_an_object_cannot_be_pickled(
    value: Any, tmp_path: Path
) -> None:
    """E08: the error names the key, and nothing is left."""
    state = {"fine": torch.ones(4), "optim.broken": value}
    expected = outcome(lambda: save_with(StockFsspecWriter(tmp_path / "stock"), state))
    assert isinstance(expected, tuple), "stock takes it"
    found = outcome(lambda: save_with(MPFsspecWriter(tmp_path / "ours", num_workers=2), state))
    assert isinstance(found, tuple)
    assert "'optim.broken'" in found[1]
    assert expected[1] in found[1]
    assert names_in(tmp_path / "ours") == []


# -- how a tensor's bytes are looked at -----------------------------------------------------


@pytest.fixture
def unpickled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keywords of every call of torch.load."""
    calls: list[dict[str, Any]] = []
    original = torch.load

    def recording(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "load", recording)
    return calls


@pytest.mark.parametrize("writer", [MPFsspecWriter, StockFsspecWriter], ids=["ours", "stock"])
def test_load_reads_tensors_without_pickle_or_with_weights_only(
    writer: Any, checkpoint_dir: Path, unpickled: list[dict[str, Any]]
) -> None:
    """E08: plain ones need no torch.load at all, others one that runs no code."""
    plain = {"a": torch.randn(30), "b": torch.arange(9).view(3, 3), "c": torch.tensor(1.5)}
    quantized = torch.quantize_per_tensor(torch.randn(9), 0.1, 0, torch.qint8)
    save_with(writer(checkpoint_dir), {**plain, "quantized": quantized, "object": {1, 2}})
    unpickled.clear()
    assert_same(load_into(blank(plain), FsspecReader(checkpoint_dir)), plain)
    assert unpickled == []
    target = torch.empty_quantized(quantized.shape, quantized)
    load_into({"quantized": target}, FsspecReader(checkpoint_dir))
    assert torch.equal(target.int_repr(), quantized.int_repr())
    assert [call["weights_only"] for call in unpickled] == [True]


class _Trap(torch.Tensor):
    """Makes a directory where it is unpickled with trust."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return os.mkdir, (self.folder,)  # type: ignore[attr-defined]


class _Trapped(DefaultSavePlanner):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = str(folder)

    def resolve_data(self, write_item: WriteItem) -> Any:
        trap = torch.randn(3).as_subclass(_Trap)
        trap.folder = self._folder
        trap.detach = lambda: trap  # type: ignore[method-assign]
        trap.cpu = lambda: trap  # type: ignore[method-assign]
        return trap


@pytest.mark.parametrize("writer", [MPFsspecWriter, StockFsspecWriter], ids=["ours", "stock"])
def test_load_runs_no_code_when_a_tensor_is_a_trap(writer: Any, tmp_path: Path) -> None:
    """E08: what stands where a tensor should is not trusted."""
    folder = tmp_path / "sprung"
    save_with(writer(tmp_path / "trap"), {"weight": torch.randn(3)}, _Trapped(folder))
    (shard,) = shard_names(tmp_path / "trap")
    content = (tmp_path / "trap" / shard).read_bytes()
    assert str(folder).encode() in content
    torch.load(io.BytesIO(content), weights_only=False)
    folder.rmdir()  # the trap works
    error = outcome(lambda: load_into({"weight": torch.zeros(3)}, FsspecReader(tmp_path / "trap")))
    assert isinstance(error, tuple)
    assert "mkdir" in error[1]
    assert not folder.exists()
