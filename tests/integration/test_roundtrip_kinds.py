"""Tensors that are not plain, and those that cannot be saved, held against stock."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.testing._internal.two_tensor import TwoTensor

from mpwriter import FsspecReader, MPFsspecWriter
from mpwriter._compat import StockFsspecReader, StockFsspecWriter
from mpwriter.errors import StagingError
from tests.saves import worker_pids
from tests.states import (
    assert_loads_everywhere,
    assert_same,
    load_into,
    outcome,
    save_with,
    shard_names,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of what torch calls beta


class _Subclass(torch.Tensor):
    pass


class _NoStorage(torch.Tensor):
    def untyped_storage(self) -> Any:
        raise NotImplementedError("this tensor has no storage")


class _NotPinned(torch.Tensor):
    def is_pinned(self, *args: Any, **kwargs: Any) -> bool:
        raise AttributeError("is_pinned")


class _NamedParameter(torch.nn.Parameter):
    pass


@pytest.fixture
def _known_classes() -> Any:
    known = [_Subclass, _NamedParameter, TwoTensor]
    with torch.serialization.safe_globals(known):
        yield


def _values(tensor: torch.Tensor) -> list[torch.Tensor]:
    if isinstance(tensor, TwoTensor):
        return [tensor.a, tensor.b]
    if tensor.is_quantized:
        per_channel = tensor.qscheme() == torch.per_channel_affine
        scale = tensor.q_per_channel_scales() if per_channel else torch.tensor(tensor.q_scale())
        return [tensor.int_repr(), scale]
    return [tensor.detach()]


def _target(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_quantized:
        return torch.empty_quantized(tensor.shape, tensor)
    return torch.zeros_like(tensor)


def _quantized(axis: int | None) -> torch.Tensor:
    values = torch.randn(3, 40)
    if axis is None:
        return torch.quantize_per_tensor(values, 0.1, 3, torch.qint8)
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2])
    return torch.quantize_per_channel(values, scales, zeros, axis, torch.quint8)


_KEPT: dict[str, Callable[[], torch.Tensor]] = {
    "subclass": lambda: torch.randn(30).as_subclass(_Subclass),
    "view of a subclass": lambda: torch.randn(30, 4).as_subclass(_Subclass)[3:9, 1],
    "two tensors in one": lambda: TwoTensor(torch.randn(30), torch.randn(30)),
    "quantized": lambda: _quantized(None),
    "quantized by channel": lambda: _quantized(0),
    "part of quantized": lambda: _quantized(None)[1],
    "parameter": lambda: torch.nn.Parameter(torch.randn(30)),
    "parameter of a class": lambda: _NamedParameter(torch.randn(30)),
    "buffer": lambda: torch.nn.Buffer(torch.randn(30)),
}


@pytest.mark.parametrize("kind", _KEPT)
@pytest.mark.usefixtures("_known_classes")
def test_save_keeps_what_is_not_a_plain_tensor(kind: str, tmp_path: Path) -> None:
    """E06: as stock, both ways round."""
    tensor = _KEPT[kind]()
    writers: dict[str, Any] = {"ours": MPFsspecWriter, "stock": StockFsspecWriter}
    for name, writer in writers.items():
        save_with(writer(tmp_path / name), {"kind": tensor, "plain": torch.ones(3)})
        for reader in (FsspecReader, StockFsspecReader):
            target = {"kind": _target(tensor), "plain": torch.zeros(3)}
            loaded = load_into(target, reader(tmp_path / name))["kind"]
            assert type(loaded) is type(target["kind"])
            for found, expected in zip(_values(loaded), _values(tensor), strict=True):
                assert_same(found, expected, f"{name}, {reader.__module__}")


def _fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(torch.randn(3))


_REFUSED: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "sparse rows": lambda: torch.eye(4).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.randn(2), torch.randn(3)], layout=torch.jagged
    ),
    "meta": lambda: torch.empty(3, device="meta"),
    "zero tensor": lambda: torch._efficientzerotensor((3,)),
    "fake": _fake,
    "opaque": lambda: torch.randn(3, 4).to_mkldnn(),
    "without storage": lambda: torch.randn(3).as_subclass(_NoStorage),
    "without is_pinned": lambda: torch.randn(3).as_subclass(_NotPinned),
    "parameter without a shape": lambda: torch.nn.UninitializedParameter(),
    "quantized without a scale": lambda: torch.empty(3, dtype=torch.qint8),
}


def _freed() -> torch.Tensor:
    """As FSDP leaves a parameter between two forward passes: it has a shape, but no memory."""
    tensor = torch.randn(1000)
    tensor.untyped_storage().resize_(0)
    return tensor


def _assert_refused(path: Path, make: Callable[[], torch.Tensor], expected: Any) -> None:
    """The save raises, the workers live, nothing of it is left, and the next save works."""
    # Not an argument: pytest would print it, and a tensor without memory cannot be printed.
    state = {"plain": torch.randn(5), "refused.one": make()}
    save_with(MPFsspecWriter(path / "before", num_workers=2), {"a": 1, "b": 2})
    workers = worker_pids()
    error = outcome(lambda: save_with(MPFsspecWriter(path / "refused", num_workers=2), state))
    assert isinstance(error, tuple), f"it was saved; stock says {expected}"
    if error[0] is StagingError:
        assert "'refused.one'" in error[1]
    else:
        assert error[0] is expected[0], error  # DCP's own planning
    assert not (path / "refused" / ".metadata").exists()
    assert not (path / "refused").exists() or shard_names(path / "refused") == []
    assert worker_pids() == workers
    save_with(MPFsspecWriter(path / "after", num_workers=2), {"a": torch.ones(4)})
    assert_loads_everywhere(path / "after", {"a": torch.ones(4)})
    assert worker_pids() == workers


@pytest.mark.parametrize("kind", _REFUSED)
def test_save_raises_with_the_key_when_stock_refuses_a_tensor(kind: str, tmp_path: Path) -> None:
    """E06: a clean exception; no hang and no dead worker."""
    state = {"plain": torch.randn(5), "refused.one": _REFUSED[kind]()}
    expected = outcome(lambda: save_with(StockFsspecWriter(tmp_path / "stock"), state))
    assert isinstance(expected, tuple), "stock takes it: so must we"
    _assert_refused(tmp_path, _REFUSED[kind], expected)


def test_save_raises_with_the_key_when_a_tensor_has_been_freed(tmp_path: Path) -> None:
    """E06: where stock reads freed memory and ends the process."""
    _assert_refused(tmp_path, _freed, None)


class _Resolving(DefaultSavePlanner):
    """Resolves the item `odd` to something of its own."""

    def __init__(self, resolved: Any) -> None:
        super().__init__()
        self._resolved = resolved

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn == "odd":
            return self._resolved
        return super().resolve_data(write_item)


@pytest.mark.parametrize(
    "resolved",
    [
        pytest.param(torch.zeros(6, dtype=torch.int4), id="a dtype that torch.save refuses"),
        pytest.param("text", id="no tensor"),
        pytest.param(None, id="nothing"),
        pytest.param(io.BytesIO(b"bytes"), id="bytes"),
    ],
)
def test_save_raises_with_the_key_when_a_planner_resolves_to_nonsense(
    resolved: Any, checkpoint_dir: Path
) -> None:
    """E06: what no planning has looked at."""
    state = {"odd": torch.randn(6), "plain": torch.randn(5)}
    writer = MPFsspecWriter(checkpoint_dir, num_workers=2)
    error = outcome(lambda: save_with(writer, state, _Resolving(resolved)))
    assert isinstance(error, tuple)
    assert error[0] is StagingError
    assert "'odd'" in error[1]
    assert shard_names(checkpoint_dir) == []
    assert not (checkpoint_dir / ".metadata").exists()
