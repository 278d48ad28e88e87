"""What a load opens, and how torch finds and converts a checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from mpwriter import FsspecReader, MPFsspecWriter
from mpwriter._compat import StockFsspecReader
from tests.fakes import FaultPlan
from tests.states import (
    Tied,
    assert_same,
    blank,
    load_into,
    mixed_items,
    outcome,
    save_with,
    shard_names,
)

State = dict[str, Any]

# -- what a load opens ---------------------------------------------------------------------


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "plan")


def _opened(plan: FaultPlan) -> list[str]:
    return sorted(call.name for call in plan.calls("open_read", "*.distcp"))


def test_load_opens_only_the_files_it_needs(plan: FaultPlan, checkpoint_dir: Path) -> None:
    """G12: one of many."""
    state = mixed_items(20)
    save_with(MPFsspecWriter(checkpoint_dir, False, num_workers=2), state)
    reader = FsspecReader(f"fault://{checkpoint_dir}", **plan.options)
    places = reader.read_metadata().storage_data
    wanted = {key: state[key] for key in ("item6", "item7", "item14")}
    expected = {place.relative_path for index, place in places.items() if index.fqn in wanted}
    assert_same(load_into(blank(wanted), reader), wanted)
    assert _opened(plan) == sorted(expected)
    assert len(expected) == 3


def test_load_opens_each_file_once(plan: FaultPlan, checkpoint_dir: Path) -> None:
    """G12: all of it."""
    state = mixed_items(60)
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=3), state)
    reader = FsspecReader(f"fault://{checkpoint_dir}", **plan.options)
    assert_same(load_into(blank(state), reader), state)
    assert _opened(plan) == shard_names(checkpoint_dir)


def test_load_takes_what_there_is_when_partial_loads_are_allowed(
    plan: FaultPlan, checkpoint_dir: Path
) -> None:
    """G12: keys that the checkpoint lacks keep their values; without the option it raises."""
    state = mixed_items(8)
    save_with(MPFsspecWriter(checkpoint_dir, False, num_workers=2), state)
    target = blank({"item2": state["item2"], "item6": state["item6"]})
    target |= {"new tensor": torch.full((3,), 7.0), "new object": "kept"}
    reader = FsspecReader(f"fault://{checkpoint_dir}", **plan.options)
    load_into(target, reader, DefaultLoadPlanner(allow_partial_load=True))
    expected = {
        "item2": state["item2"],
        "item6": state["item6"],
        "new tensor": torch.full((3,), 7.0),
        "new object": "kept",
    }
    assert_same(target, expected)
    assert len(_opened(plan)) == 2

    def strict(reader: Any) -> Any:
        return outcome(lambda: load_into({"new tensor": torch.zeros(3)}, reader(checkpoint_dir)))

    assert strict(FsspecReader)[0] is strict(StockFsspecReader)[0] is RuntimeError
    assert strict(FsspecReader) == strict(StockFsspecReader)


@pytest.mark.parametrize(
    "keys", [None, {"model"}, {"model.layer.weight"}, {"step", "model.layer"}, {"absent"}, set()]
)
def test_load_makes_the_state_that_stock_makes_out_of_the_metadata(
    keys: set[str] | None, plan: FaultPlan, checkpoint_dir: Path
) -> None:
    """G12: into an empty state, by key or by the beginning of one."""
    state = {
        "model": {"layer": {"weight": torch.randn(9, 4), "bias": torch.randn(9)}},
        "optim": [torch.randn(5), {"lr": 0.1}],
        "step": 17,
    }
    save_with(MPFsspecWriter(checkpoint_dir, False, num_workers=2), state)
    expected: State = {}
    _load_state_dict(
        expected,
        StockFsspecReader(checkpoint_dir),
        planner=_EmptyStateDictLoadPlanner(keys=keys),
        no_dist=True,
    )
    found: State = {}
    _load_state_dict(
        found,
        FsspecReader(f"fault://{checkpoint_dir}", **plan.options),
        planner=_EmptyStateDictLoadPlanner(keys=keys),
        no_dist=True,
    )
    assert_same(found, expected)
    num_values = len(_leaves(found))
    assert len(_opened(plan)) == num_values
    assert (num_values == 5) is (keys is None)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for entry in value.values() for leaf in _leaves(entry)]
    if isinstance(value, list):
        return [leaf for entry in value for leaf in _leaves(entry)]
    return [value]


# -- found by DCP itself -------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_load_finds_the_checkpoint_when_only_its_id_is_given(
    scheme: str, checkpoint_dir: Path
) -> None:
    """G07: DCP chooses a stock reader by the id."""
    state = mixed_items(9)
    save_with(MPFsspecWriter(f"{scheme}{checkpoint_dir}", num_workers=2), state)
    loaded = load_into(blank(state), None, checkpoint_id=f"{scheme}{checkpoint_dir}")
    assert_same(loaded, state)


def test_save_and_load_go_to_the_id_when_one_is_given_beside_a_writer(tmp_path: Path) -> None:
    """G07: the id counts, not the path of the writer or reader."""
    state = mixed_items(9)
    writer = MPFsspecWriter(tmp_path / "elsewhere", num_workers=2)
    there = f"file://{tmp_path / 'there'}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=there, storage_writer=writer, no_dist=True)
    reader = FsspecReader(tmp_path / "elsewhere")
    assert_same(load_into(blank(state), reader, checkpoint_id=there), state)
    assert not (tmp_path / "elsewhere").exists()


def test_save_can_be_turned_into_a_torch_file(checkpoint_dir: Path, tmp_path: Path) -> None:
    """G07: by torch's own conversion."""
    state = {**Tied().state_dict(), **mixed_items(9), "nested": {"list": [torch.ones(2), 5]}}
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=2), state)
    dcp_to_torch_save(checkpoint_dir, tmp_path / "state.pt")
    assert_same(torch.load(tmp_path / "state.pt", weights_only=False), state)
