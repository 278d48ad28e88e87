"""What a save leaves of the user's tensors, and a load of its targets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mpwriter import FsspecReader, MPFsspecWriter
from mpwriter._compat import StockFsspecReader
from tests.states import (
    assert_loads_everywhere,
    assert_same,
    bits,
    load_into,
    outcome,
    save_with,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of quantized tensors


def _facts(tensor: torch.Tensor) -> dict[str, Any]:
    inference = tensor.is_inference()
    return {
        "type": type(tensor),
        "shared": tensor.is_shared(),
        "address": tensor.data_ptr(),
        "storage": tensor.untyped_storage().data_ptr(),
        "storage bytes": tensor.untyped_storage().nbytes(),
        "layout": (tensor.shape, tensor.stride(), tensor.storage_offset()),
        "requires_grad": tensor.requires_grad,
        "leaf": tensor.is_leaf,
        "grad_fn": tensor.grad_fn,
        "grad": id(tensor.grad) if tensor.is_leaf else None,
        "hooks": None if tensor._backward_hooks is None else dict(tensor._backward_hooks),
        "base": id(tensor._base),
        "version": None if inference else tensor._version,
        "bits": bits(tensor),
    }


def test_save_and_load_leave_the_users_tensors_as_they_are(checkpoint_dir: Path) -> None:
    """E07: autograd state, hooks and memory stay; nothing is refused."""
    calls: list[str] = []
    hooked = torch.nn.Parameter(torch.randn(40, 3))
    hooked.register_hook(lambda grad: calls.append("hook"))
    hooked.register_post_accumulate_grad_hook(lambda tensor: calls.append("accumulated"))
    with_grad = torch.randn(20, requires_grad=True)
    (with_grad * 2).sum().backward()
    large = torch.randn(1000, 8)
    with torch.inference_mode():
        inference = torch.randn(5)
    state: dict[str, Any] = {
        "hooked": hooked,
        "non-leaf": hooked * 2,
        "int parameter": torch.nn.Parameter(torch.arange(9), requires_grad=False),
        "with grad": with_grad,
        "grad": with_grad.grad,
        "part": large[100:200, 2],
        "shared": torch.randn(30).share_memory_(),
        "inference": inference,
        "conjugated": torch.randn(4, dtype=torch.complex64).conj(),
    }
    before = {key: _facts(tensor) for key, tensor in state.items()}
    objects = dict(state)
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=2, per_worker_copy_ahead=1), state)
    assert all(state[key] is objects[key] for key in objects)
    assert {key: _facts(tensor) for key, tensor in state.items()} == before
    assert_loads_everywhere(checkpoint_dir, state)
    # The graph still works, and each hook is called once.
    assert calls == []
    state["non-leaf"].sum().backward()
    assert calls == ["hook", "accumulated"]


def test_load_leaves_targets_in_place(checkpoint_dir: Path) -> None:
    """E07: a target keeps its memory, its grad, its hooks."""
    state = {"weight": torch.randn(30, 4), "part": torch.randn(6)}
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=1), state)
    weight = torch.nn.Parameter(torch.zeros(30, 4))
    calls: list[int] = []
    weight.register_hook(lambda grad: calls.append(1))
    weight.sum().backward()
    grad = weight.grad
    memory = torch.zeros(20, 6)
    loaded = load_into({"weight": weight, "part": memory[7]}, FsspecReader(checkpoint_dir))
    assert loaded["weight"] is weight and loaded["weight"].requires_grad
    assert weight.grad is grad
    assert_same(weight.data, state["weight"])
    assert_same(memory[7], state["part"])
    assert memory[:7].count_nonzero() == memory[8:].count_nonzero() == 0
    weight.sum().backward()
    assert calls == [1, 1]


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.is_quantized:
        return [tensor.int_repr(), torch.tensor(tensor.q_scale())]
    return [tensor.detach()]


_TARGETS: dict[str, Callable[[], torch.Tensor]] = {
    "bfloat16": lambda: torch.zeros(6, 4, dtype=torch.bfloat16),
    "float64": lambda: torch.zeros(6, 4, dtype=torch.float64),
    "int32": lambda: torch.zeros(6, 4, dtype=torch.int32),
    "complex64": lambda: torch.zeros(6, 4, dtype=torch.complex64),
    "float8": lambda: torch.zeros(6, 4, dtype=torch.float8_e5m2),
    "transposed": lambda: torch.zeros(4, 6).t(),
    "part": lambda: torch.zeros(12, 9)[::2, 1:5],
    "parameter": lambda: torch.nn.Parameter(torch.zeros(6, 4)),
    "conjugated": lambda: torch.zeros(6, 4, dtype=torch.complex64).conj(),
    "expanded": lambda: torch.zeros(6, 1).expand(6, 4),
    "another shape": lambda: torch.zeros(4, 6),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(6, 4), 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("kind", _TARGETS)
def test_load_converts_as_stock_does(
    kind: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> None:
    """E15: into another dtype, a view, a Parameter; an expanded target raises."""
    folder = tmp_path_factory.getbasetemp() / "converted"
    if not folder.exists():
        state = {"weight": torch.randn(6, 4)}
        save_with(MPFsspecWriter(folder, num_workers=1), state)

    def loaded(reader: Any) -> Any:
        target = load_into({"weight": _TARGETS[kind]()}, reader(folder))["weight"]
        return target.dtype, target.is_conj(), type(target), _parts(target)

    found, expected = (
        outcome(lambda: loaded(FsspecReader)),
        outcome(lambda: loaded(StockFsspecReader)),
    )
    if kind in ("expanded", "another shape"):
        assert isinstance(expected[0], type), "stock raises"
        assert found[0] is expected[0]
        assert found[1].splitlines()[0] == expected[1].splitlines()[0]
    else:
        assert found[:3] == expected[:3]
        for one, other in zip(found[3], expected[3], strict=True):
            assert_same(one, other)
