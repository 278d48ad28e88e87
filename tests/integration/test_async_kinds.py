"""Kinds of values in an asynchronous save, held against what is loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.testing._internal.two_tensor import TwoTensor

from mpwriter import FsspecReader
from mpwriter._arena import get_arena
from mpwriter._compat import SerializationFormat
from tests.asyncs import async_save, settled, wait_for_saves
from tests.extensions import Mask, Rotate, registry
from tests.states import (
    Tied,
    assert_loads_everywhere,
    assert_same,
    blank,
    load_into,
    shard_bytes,
)


@pytest.fixture(autouse=True)
def _nothing_stays_leased() -> Iterator[None]:
    get_arena().trim()
    yield
    wait_for_saves()


class _Progress:
    """Has a state dict of its own."""

    def __init__(self) -> None:
        self.weight = torch.ones(3)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "history": [1, 2]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.weight = state_dict["weight"]


def test_save_holds_the_state_of_objects_with_a_state_dict(tmp_path: Path) -> None:
    """Stateful values, as torch's own applications pass them."""
    progress = _Progress()
    future = async_save({"progress": progress}, tmp_path / "x")
    progress.weight.zero_()
    assert settled(future) is None
    expected = {"progress": {"weight": torch.ones(3), "history": [1, 2]}}
    assert_loads_everywhere(tmp_path / "x", expected)


def test_save_writes_tied_weights_once(tmp_path: Path) -> None:
    """E09: staged and written once, both keys load."""
    module = Tied()
    state = {"model": module.state_dict()}
    expected = {"model": {key: value.clone() for key, value in state["model"].items()}}
    future = async_save(state, tmp_path / "x")
    module.embedding.weight.data.zero_()
    assert settled(future) is None
    assert shard_bytes(tmp_path / "x") < 2_400_000
    assert_loads_everywhere(tmp_path / "x", expected)


def test_save_writes_only_what_belongs_to_a_value(tmp_path: Path) -> None:
    """Values that are pickled whole take no staged neighbours along; nested, unflattened, too."""
    state = {
        "large": torch.randn(1 << 20),
        "pair": (torch.arange(5), "text"),
        "nested": {"list": [(torch.ones(2), 1)], "w": torch.zeros(3)},
    }
    for name, flat in (("flat", True), ("nested", False)):
        planner = DefaultSavePlanner(flatten_state_dict=flat)
        path = tmp_path / name
        assert settled(async_save(state, path, dcp_options={"planner": planner})) is None
        assert shard_bytes(path) < (4 << 20) + 20_000
        if flat:
            assert_loads_everywhere(path, state)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_save_keeps_what_is_no_plain_tensor(tmp_path: Path) -> None:
    """E06: the same as in a save that is not asynchronous."""
    state = {
        "quantized": torch.quantize_per_tensor(torch.randn(9), 0.1, 3, torch.qint8),
        "two": TwoTensor(torch.randn(30), torch.randn(30)),
        "parameter": torch.nn.Parameter(torch.randn(30)),
        "buffer": torch.nn.Buffer(torch.randn(30)),
    }
    assert settled(async_save(state, tmp_path / "x")) is None
    target = {
        "quantized": torch.empty_quantized((9,), state["quantized"]),
        "two": TwoTensor(torch.zeros(30), torch.zeros(30)),
        "parameter": torch.zeros(30),
        "buffer": torch.zeros(30),
    }
    with torch.serialization.safe_globals([TwoTensor]):
        load_into(target, FsspecReader(tmp_path / "x"))
    assert torch.equal(target["quantized"].int_repr(), state["quantized"].int_repr())
    assert_same([target["two"].a, target["two"].b], [state["two"].a, state["two"].b])
    for name in ("parameter", "buffer"):
        assert_same(target[name], state[name].detach())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["sparse", "meta", "jagged"])
def test_save_names_the_key_when_it_refuses_a_tensor(kind: str, tmp_path: Path) -> None:
    """E06: from the future, where the staging could take it."""
    make: dict[str, Callable[[], torch.Tensor]] = {
        "sparse": lambda: torch.eye(4).to_sparse(),
        "meta": lambda: torch.empty(3, device="meta"),
        "jagged": lambda: torch.nested.nested_tensor([torch.randn(2)], layout=torch.jagged),
    }
    state = {"plain": torch.ones(3), "odd.one": make[kind]()}
    error = settled(async_save(state, tmp_path / "x"))
    assert error is not None and ("odd.one" in str(error) or kind == "jagged")
    assert not (tmp_path / "x" / ".metadata").exists()


# -- ways to write ------------------------------------------------------------------------------

_WAYS: dict[str, dict[str, Any]] = {
    "safetensors": {"serialization_format": SerializationFormat.SAFETENSORS},
    "transformed": {"_extensions": [Mask(3), Rotate(5)]},
    "a file for each": {"single_file_per_rank": False},
    "a tiny window": {"per_worker_copy_ahead": 1},
    "durable": {"sync_files": True, "num_workers": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", [*_WAYS, "in the trainer"])
def test_save_holds_the_values_of_the_call_however_they_are_written(
    way: str, tmp_path: Path
) -> None:
    """A01: workers read the staged memory in every format, and so does the trainer itself."""
    path = "memory://async-kinds" if way == "in the trainer" else str(tmp_path / "x")
    state = {
        **{f"w{n}": torch.randn(n * 1000, 3).to(torch.bfloat16) for n in range(5)},
        "large": torch.randn(1 << 20).t(),
        "strided": torch.randn(40, 60).t()[::2],
        "scalar": torch.tensor(2.5),
        "text": "x" * 10_000,
    }
    expected = copy.deepcopy(state)
    for number in range(2):
        future = async_save(state, path, **_WAYS.get(way, {}))
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
        assert settled(future) is None
        reader = FsspecReader(path, _extension_registry=registry())
        assert_same(load_into(blank(expected), reader), expected, str(number))
        state = copy.deepcopy(expected)
