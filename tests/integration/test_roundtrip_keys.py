"""Nesting and keys through a save and a load, held against stock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mpwriter import FsspecReader, MPFsspecWriter
from mpwriter._compat import StockFsspecReader, StockFsspecWriter
from tests.saves import names_in
from tests.states import (
    UNSET,
    assert_loads_everywhere,
    assert_same,
    load_into,
    outcome,
    save_with,
    shard_names,
)

# -- nesting -------------------------------------------------------------------------------


def _ones(number: float = 1.0) -> torch.Tensor:
    return torch.full((3,), number)


# What is saved, and what it is loaded into.
_NESTED: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "empty list into a list": (lambda: {"k": []}, lambda: {"k": [1, 2]}),
    "list into an empty list": (lambda: {"k": [1, 2]}, lambda: {"k": []}),
    "grown list of tensors": (
        lambda: {"k": [_ones(2)]},
        lambda: {"k": [_ones(), _ones()]},
    ),
    "shrunk list of tensors": (
        lambda: {"k": [_ones(2), _ones(3)]},
        lambda: {"k": [_ones()]},
    ),
    "grown dict": (lambda: {"k": {"a": 1}}, lambda: {"k": {"a": 0, "b": 0}}),
    "shrunk dict": (lambda: {"k": {"a": 1, "b": 2}}, lambda: {"k": {"a": 0}}),
    "empty dict": (lambda: {"k": {}, "x": 1}, lambda: {"k": {}, "x": 0}),
    "dict into an empty dict": (lambda: {"k": {"a": 1}}, lambda: {"k": {}}),
    "nothing": (dict, dict),
    "dots that collide": (lambda: {"a.b": 1, "a": {"b": 2}}, lambda: {"a.b": 0}),
    "dots": (lambda: {"a.b": 1, "a": {"c": _ones(4)}}, lambda: {"a.b": 0, "a": {"c": _ones()}}),
    "dots into a dict": (lambda: {"a.b": 1}, lambda: {"a": {"b": 0}}),
    "int keys": (
        lambda: {1: _ones(5), "k": {0: 7, 10: _ones(6)}},
        lambda: {1: _ones(), "k": {0: 0, 10: _ones()}},
    ),
    "int and str keys that collide": (lambda: {"k": {1: 7, "1": 8}}, lambda: {"k": {1: 0}}),
    "int keys into str keys": (lambda: {"k": {1: 7}}, lambda: {"k": {"1": 0}}),
    "tuple of tensors": (
        lambda: {"k": (_ones(7), _ones(8))},
        lambda: {"k": (_ones(), _ones())},
    ),
    "tuple of tensor and object": (lambda: {"k": (_ones(7), 8)}, lambda: {"k": (_ones(), 0)}),
    "list of tensor and object": (
        lambda: {"k": [_ones(7), 8, {"x": [_ones(9)]}]},
        lambda: {"k": [_ones(), 0, {"x": [_ones()]}]},
    ),
    "tensor into an object": (lambda: {"k": _ones(2)}, lambda: {"k": 5}),
    "object into a tensor": (lambda: {"k": 5}, lambda: {"k": _ones()}),
    "optimizer": (
        lambda: {"state": {0: {"step": torch.tensor(3.0), "m": _ones(2)}}, "groups": [{"lr": 1}]},
        lambda: {"state": {0: {"step": torch.tensor(0.0), "m": _ones()}}, "groups": [{"lr": 0}]},
    ),
}


@pytest.mark.parametrize("case", _NESTED)
def test_save_and_load_flatten_as_stock_does(case: str, tmp_path: Path) -> None:
    """E11: same values, or the same error, with either writer and either reader."""
    make, make_target = _NESTED[case]

    def run(name: str, writer: Any, reader: Any) -> Any:
        def roundtrip() -> Any:
            save_with(writer(tmp_path / name), make())
            return load_into(make_target(), reader(tmp_path / name))

        return outcome(roundtrip)

    expected = run("stock", StockFsspecWriter, StockFsspecReader)
    for name, writer, reader in (
        ("ours", MPFsspecWriter, FsspecReader),
        ("ours into stock", MPFsspecWriter, StockFsspecReader),
        ("stock into ours", StockFsspecWriter, FsspecReader),
    ):
        assert_same(run(name, writer, reader), expected, name)


# -- keys ----------------------------------------------------------------------------------

_KEYS = [
    "foo",
    "Foo",
    "FOO",
    "",
    " ",
    ".",
    "..",
    "../../x",
    "/etc/x",
    "a/b/c",
    "a\\b",
    "C:\\x",
    "~",
    "~/x",
    "$HOME",
    "%20",
    "#",
    "?a=b&c",
    "*",
    "[a]",
    "{a}",
    "a:b",
    "s3://bucket/key",
    "memory::x",
    ".metadata",
    "__0_0.distcp",
    ".__0_0.distcp.tmp",
    "a.distcp",
    "with space",
    "tab\tand\nline",
    "nul\x00inside",
    "\x00",
    "ünïcödé",
    "u\u0308 decomposed",
    "日本語",
    "\U0001f600",
    "\u202eright to left",
    "k" * 5000,
    "é" * 5000,
    "__metadata__",
    "None",
    "0",
]


@pytest.mark.parametrize("single_file", [True, False])
def test_save_takes_any_key(single_file: bool, tmp_path: Path) -> None:
    """E12: no key is used as a path, two that differ in case only are two."""
    state: dict[str, Any] = {key: torch.randn(5, 2) for key in _KEYS}
    state["objects"] = dict.fromkeys(_KEYS)
    for number, key in enumerate(_KEYS):
        state["objects"][key] = number
    folder = tmp_path / "a" / "b" / "checkpoint"
    save_with(MPFsspecWriter(folder, single_file, num_workers=2), state)
    assert names_in(tmp_path) == sorted(
        ["a", "a/b", "a/b/checkpoint", "a/b/checkpoint/.metadata"]
        + [f"a/b/checkpoint/{name}" for name in shard_names(folder)]
    )
    assert len(shard_names(folder)) == (2 if single_file else 2 * len(_KEYS))
    assert not Path("/etc/x").exists()
    assert_loads_everywhere(folder, state)


def test_save_takes_a_key_that_is_half_a_surrogate_pair(checkpoint_dir: Path) -> None:
    """E12: it cannot be encoded, but stock pickles it."""
    state = {"\ud800": torch.ones(2), "fine": 1}
    save_with(StockFsspecWriter(checkpoint_dir / "stock"), state)
    save_with(MPFsspecWriter(checkpoint_dir / "ours", num_workers=1), state)
    assert_loads_everywhere(checkpoint_dir / "stock", state)
    assert_loads_everywhere(checkpoint_dir / "ours", state)


def test_load_leaves_the_target_when_nothing_is_asked_for(checkpoint_dir: Path) -> None:
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=1), {"a": 1})
    assert load_into({}, FsspecReader(checkpoint_dir)) == {}
    assert load_into({"a": UNSET}, FsspecReader(checkpoint_dir)) == {"a": 1}
