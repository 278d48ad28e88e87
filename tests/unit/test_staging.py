"""The stream loader: items to bytes in slots."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from mpwriter._staging import Batch, ItemStream
from mpwriter._staging_parts import MIN_SLOT_BYTES, Slot
from mpwriter._staging_ties import TieTable
from mpwriter._streams import CopyStream, StreamFactory, accelerator_stream
from mpwriter.errors import StagingError


def make_slot(nbytes: int, segment: int = 0, offset: int = 0) -> Slot:
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    return Slot(segment, offset, nbytes, memory, memoryview(memory.numpy()), memory.data_ptr())


def plan_of(state: dict[str, Any]) -> tuple[SavePlanner, list[WriteItem]]:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    return planner, planner.create_local_plan().items


def stream_of(
    state: dict[str, Any],
    ties: TieTable | None = None,
    stream_for: StreamFactory | None = None,
) -> tuple[ItemStream, list[WriteItem]]:
    planner, items = plan_of(state)
    positions = list(range(len(items)))
    stream_for = stream_for or accelerator_stream()
    return ItemStream(items, positions, planner, ties, stream_for), items


def drain(
    stream: ItemStream, slot_bytes: int, wait: Callable[[Batch], None] = Batch.wait
) -> list[bytes]:
    """The bytes of every item, in file order."""
    items: list[bytearray] = []
    while True:
        batch = stream.fill(make_slot(slot_bytes))
        if batch is None:
            return [bytes(item) for item in items]
        wait(batch)
        assert batch.slot is not None
        for spec, offset, nbytes in zip(batch.specs, batch.offsets, batch.sizes, strict=True):
            if spec is not None:
                items.append(bytearray())
            items[-1] += batch.slot.buffer[offset : offset + nbytes]


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


BASE = torch.randn(64, 50)
STATES = {
    "contiguous": torch.randn(1000, 7),
    "zero_dim": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.empty(0, 5),
    "view_of_larger": torch.arange(100_000)[500:1500],
    "transposed": BASE.t(),
    "strided": BASE[::3, ::2],
    "expanded": torch.randn(1, 30).expand(40, 30),
    "channels_last": torch.randn(2, 3, 8, 9).to(memory_format=torch.channels_last),
    "long_row_strided": torch.randn(3, 20_000)[:, ::2],
    "bfloat16": torch.randn(33, 5).bfloat16()[:, 1:4],
    "float8": torch.randn(64, 9).to(torch.float8_e4m3fn)[:, ::2],
    "conj": torch.randn(50, dtype=torch.complex64).conj(),
    "neg": torch.randn(50, dtype=torch.complex64).conj().imag,
    "bool": torch.rand(77) > 0.5,
}


@pytest.mark.parametrize("slot_bytes", [MIN_SLOT_BYTES, 4096 + 64, 1 << 20])
@pytest.mark.parametrize("name", STATES)
def test_fill_gives_the_selected_bytes_in_row_major_order(name: str, slot_bytes: int) -> None:
    stream, _ = stream_of({name: STATES[name]})
    assert drain(stream, slot_bytes) == [raw(STATES[name])]


def test_fill_puts_items_of_odd_sizes_side_by_side() -> None:
    state = {f"t{n}": torch.arange(n, dtype=torch.uint8) for n in range(200)}
    stream, items = stream_of(state)
    assert drain(stream, MIN_SLOT_BYTES) == [raw(state[item.index.fqn]) for item in items]
    assert stream.written == list(range(len(items)))


def test_fill_streams_bytes_items_in_pieces_when_they_exceed_a_slot() -> None:
    stream, _ = stream_of({"text": "x" * 10_000, "tensor": torch.ones(3)})
    first, second = drain(stream, MIN_SLOT_BYTES)
    payload = first if len(first) > len(second) else second
    assert torch.load(io.BytesIO(payload)) == "x" * 10_000


def test_fill_serializes_a_tensor_here_when_it_is_not_plain() -> None:
    """E06: what is no plain strided tensor goes into the file as torch.save writes it."""
    quantized = torch.quantize_per_tensor(torch.randn(9), 0.1, 0, torch.qint8)
    stream, _ = stream_of({"quantized": quantized})
    (payload,) = drain(stream, 1 << 16)
    assert torch.equal(torch.load(io.BytesIO(payload)).int_repr(), quantized.int_repr())


def _freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(tensor.itemsize)
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.empty(3, device="meta"), id="meta"),
        pytest.param(torch._efficientzerotensor((3,)), id="zero tensor"),
        pytest.param(torch.eye(4).to_sparse(), id="sparse"),
        pytest.param(_freed(torch.randn(8)), id="freed"),
        pytest.param(_freed(torch.randn(8)[4:]), id="view of freed"),
        pytest.param(_freed(torch.randn(8, 8).t()[::2]), id="strided view of freed"),
    ],
)
def test_fill_raises_with_the_key_when_a_tensor_has_no_values(tensor: torch.Tensor) -> None:
    """E06: a tensor without memory of its own is refused by name, not read."""
    stream, _ = stream_of({"layer.weight": tensor})
    with pytest.raises(StagingError, match=r"layer\.weight") as caught:
        drain(stream, 1 << 16)
    assert caught.value.key == "layer.weight"


def test_fill_begins_again_after_restart() -> None:
    state = {"a": torch.randn(3000), "b": torch.randn(10)}
    stream, _ = stream_of(state, ties=TieTable())
    stream.fill(make_slot(MIN_SLOT_BYTES))
    stream.restart()
    assert sorted(drain(stream, MIN_SLOT_BYTES)) == sorted(map(raw, state.values()))


# -- tied tensors ------------------------------------------------------------------------


def test_fill_writes_tied_tensors_once() -> None:
    """E09: the same view of the same storage is staged once."""
    shared = torch.randn(100, 8)
    ties = TieTable()
    stream, _ = stream_of({"a": shared, "b": shared.view(100, 8)}, ties)
    assert drain(stream, 1 << 16) == [raw(shared)]
    assert ties.owner_of == {1: 0}


@pytest.mark.parametrize(
    "other",
    [
        lambda t: t[:50],
        lambda t: t.t(),
        lambda t: t.view(torch.int32),
        lambda t: t.view(8, 100),
        lambda t: t.clone(),
    ],
)
def test_fill_writes_both_when_views_differ(other: Callable[[torch.Tensor], torch.Tensor]) -> None:
    shared = torch.randn(100, 8)
    ties = TieTable()
    stream, _ = stream_of({"a": shared, "b": other(shared)}, ties)
    assert drain(stream, 1 << 16) == [raw(shared), raw(other(shared))]
    assert ties.owner_of == {}


def test_fill_tells_conjugated_twins_apart() -> None:
    values = torch.randn(20, dtype=torch.complex64)
    stream, _ = stream_of({"a": values, "b": values.conj()}, TieTable())
    assert drain(stream, 1 << 16) == [raw(values), raw(values.conj())]


class _FreshTensors(DefaultSavePlanner):
    """Resolves every item to a tensor that is gone as soon as it is staged."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        return super().resolve_data(write_item).clone()


def test_fill_ties_nothing_when_an_address_recurs() -> None:
    """Invariant 1: an address counts only while its storage lives."""
    state = {f"t{n}": torch.full((1000,), float(n)) for n in range(20)}
    planner = _FreshTensors()
    planner.set_up_planner(state, is_coordinator=True)
    items = planner.create_local_plan().items
    ties = TieTable()
    stream = ItemStream(items, range(20), planner, ties, accelerator_stream())
    assert drain(stream, 1 << 16) == [raw(state[item.index.fqn]) for item in items]
    assert ties.owner_of == {}


# -- accelerators ------------------------------------------------------------------------


class _LateEvent:
    def __init__(self, stream: _LateStream, upto: int) -> None:
        self._stream, self._upto = stream, upto

    def query(self) -> bool:
        return self._stream.landed >= self._upto

    def synchronize(self) -> None:
        self._stream.land(self._upto)


class _LateStream:
    """Copies land only when an event recorded after them is waited for."""

    def __init__(self) -> None:
        self.issued: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self.count = self.landed = 0

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.issued.append((destination, source))
        self.count += 1

    def record(self) -> _LateEvent:
        return _LateEvent(self, self.count)

    def land(self, upto: int) -> None:
        while self.landed < upto:
            destination, source = self.issued.popleft()
            destination.copy_(source)
            self.landed += 1


def test_batch_holds_the_bytes_only_after_its_event_was_waited_for() -> None:
    state = {name: t for name, t in STATES.items() if name not in ("conj", "neg")}
    late: CopyStream = _LateStream()
    stream, items = stream_of(state, stream_for=lambda tensor: late)
    expected = [raw(state[item.index.fqn]) for item in items]
    assert drain(stream, MIN_SLOT_BYTES) == expected

    stream.restart()
    missed = drain(stream, MIN_SLOT_BYTES, wait=lambda batch: None)
    assert missed != expected, "the stand-in must show a missing wait"


def test_batch_is_not_ready_before_its_copies_have_landed() -> None:
    late = _LateStream()
    stream, _ = stream_of({"a": torch.ones(10)}, stream_for=lambda tensor: late)
    batch = stream.fill(make_slot(MIN_SLOT_BYTES))
    assert batch is not None
    assert not batch.ready()
    assert batch.held
    batch.wait()
    assert batch.ready()
    assert not batch.held


def test_staging_touches_no_accelerator_when_every_tensor_is_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("an accelerator's runtime was asked for")

    monkeypatch.setattr(torch, "get_device_module", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", refuse)
    monkeypatch.setattr(torch.cuda, "current_stream", refuse)
    stream, _ = stream_of({"a": torch.ones(10), "b": BASE.t()})
    assert len(drain(stream, MIN_SLOT_BYTES)) == 2
