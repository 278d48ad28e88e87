"""Staging of whole state dicts: plain tensors, their views and their ties."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import pytest
import torch

import mpwriter._state_staging as state_staging
from mpwriter._arena import get_arena
from mpwriter._types import PAGE_BYTES
from tests.containers import stock_dtypes
from tests.stagings import assert_own, leased_bytes, stage
from tests.states import assert_same, bits, random_bits

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of what torch calls beta


@pytest.fixture(autouse=True)
def _nothing_stays_leased() -> Iterator[None]:
    get_arena().trim()
    yield
    assert leased_bytes() == 0
    get_arena().trim()


def scribble(tensor: torch.Tensor) -> None:
    """Change every byte of a tensor's storage."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    storage.bitwise_xor_(1)


# -- plain tensors ------------------------------------------------------------------------------

_BASE = torch.randn(64, 50)

_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t,
    "part of a larger one": lambda t: t[8:12],
    "transposed": lambda t: t.t(),
    "every other": lambda t: t[::3, ::2],
    "expanded": lambda t: t[:1].expand(40, -1),
    "empty": lambda t: t[:0],
    "0-d": lambda t: t[3, 2],
    "four dimensions": lambda t: t.view(2, 8, 2, -1).permute(3, 0, 2, 1),
}


@pytest.mark.parametrize("dtype", stock_dtypes())
def test_copy_gives_every_bit_when_views_are_of_any_dtype(dtype: str) -> None:
    """E01, invariant 1: 0-d, empty, strided, of every dtype; later changes do not show."""
    base = random_bits(getattr(torch, dtype), (32, 16))
    state = {name: view(base) for name, view in _VIEWS.items()}
    if base.is_complex() and base.dtype is not torch.complex32:
        state |= {"conj": base.conj(), "neg": base.conj().imag, "both": base.conj()[::2]}
    expected = {name: bits(value) for name, value in state.items()}
    staged = stage(state)
    scribble(base)
    assert list(staged) == list(state)
    for name, value in state.items():
        found = staged[name]
        assert_own(found)
        assert (found.dtype, found.shape) == (value.dtype, value.shape), name
        assert bits(found) == expected[name], name
    if "conj" in state:
        assert state["conj"].is_conj()


def test_copy_leases_only_the_selected_bytes() -> None:
    """Invariant 11."""
    large = torch.randn(1 << 20)
    staged = stage({"a": large[100:200], "b": large[::4096]})
    assert leased_bytes() == 448 + 1024
    assert torch.equal(staged["a"], large[100:200])


@pytest.mark.parametrize("sizes", [[0], [0, 5], [1 << 20, 0], [0, 1 << 20, 0, 3, 0], []])
def test_copy_leases_next_to_nothing_for_empty_tensors(sizes: list[int]) -> None:
    """Wherever they stand among small and large ones."""
    state = {f"w{n}": torch.full((size,), n) for n, size in enumerate(sizes)}
    staged = stage(state)
    assert_same(dict(staged.__copy__()), state)
    assert leased_bytes() <= 8 * sum(sizes) + 64 * (len(sizes) + 1) + PAGE_BYTES


def test_copy_takes_no_neighbours_along_when_a_staged_tensor_is_pickled() -> None:
    """What a planner pickles whole (a tuple): not the memory of every other tensor as well."""
    state = {"large": torch.ones(4 << 20), "pair": (torch.arange(3), [torch.zeros(2), 1])}
    staged = stage(state)
    stream = io.BytesIO()
    torch.save(staged["pair"], stream)
    assert stream.tell() < 4096
    stream.seek(0)
    assert_same(torch.load(stream), state["pair"])


def test_copy_leaves_parameters_as_they_are() -> None:
    """E07: requires_grad, gradient, hooks, storage; non-leaf tensors, too."""
    called: list[int] = []
    weight = torch.nn.Parameter(torch.randn(5))
    weight.register_hook(lambda grad: called.append(1))
    (weight * 2).sum().backward()
    grad, address = weight.grad, weight.data_ptr()
    inner = weight * 3
    frozen = torch.nn.Parameter(torch.arange(4), requires_grad=False)
    staged = stage({"weight": weight, "inner": inner, "frozen": frozen, "nested": [weight]})
    for name, value in {"weight": weight, "inner": inner, "frozen": frozen}.items():
        assert_own(staged[name])
        assert_same(staged[name], value.detach())
    assert weight.requires_grad and weight.grad is grad and weight.data_ptr() == address
    assert inner.requires_grad and inner.grad_fn is not None and not frozen.requires_grad
    assert not any(t.is_shared() for t in (weight, inner, frozen))
    inner.sum().backward()
    assert called == [1, 1]


@pytest.mark.parametrize("inside", [False, True])
def test_copy_takes_inference_tensors(inside: bool) -> None:
    with torch.inference_mode():
        made = torch.randn(6)
    ordinary = torch.randn(6)
    with torch.inference_mode(inside):
        staged = stage({"made": made, "ordinary": ordinary})
    for name, value in {"made": made, "ordinary": ordinary}.items():
        assert_own(staged[name])
        assert_same(staged[name], value)


# -- tied tensors -------------------------------------------------------------------------------


def test_copy_keeps_tied_tensors_tied() -> None:
    """E09: leased and copied once."""
    weight = torch.nn.Parameter(torch.randn(1000, 100))
    state = {"a": weight, "b": {"c": [weight.data, weight.view(1000, 100)]}}
    staged = stage(state)
    assert staged["a"] is staged["b"]["c"][0] is staged["b"]["c"][1]
    assert leased_bytes() == 400_000


def test_copy_ties_each_view_of_a_storage_to_its_like() -> None:
    """The same view twice, also where other views begin at the same address."""
    base = torch.randn(24, dtype=torch.complex64)
    views = [
        base,
        base.view(4, 6),
        base.view(6, 4).t(),
        base[:12],
        base.conj(),
        base.view(torch.float32),
    ]
    again = [
        base[:],
        base.view(4, 6),
        base.view(6, 4).t(),
        base[:12],
        base.conj(),
        base.view(torch.float32),
    ]
    empties = [base[:0], base[:0]]
    staged = stage({"views": views, "again": again, "empties": empties})
    for number, view in enumerate(views):
        assert staged["views"][number] is staged["again"][number]
        assert_same(staged["views"][number], view)
    assert len(set(map(id, staged["views"]))) == len(views)


def test_prepare_stages_into_ordinary_memory_when_there_is_no_arena(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 9."""
    monkeypatch.setattr(state_staging, "arena_unavailable_reason", lambda: "it is forbidden")
    weight = torch.randn(10)
    staged = stage({"w": weight, "tied": weight, "view": weight[::2]})
    expected = weight.clone()
    weight.zero_()
    assert torch.equal(staged["w"], expected) and torch.equal(staged["view"], expected[::2])
    assert staged["w"] is staged["tied"]
    assert get_arena().stats().num_leases == 0
