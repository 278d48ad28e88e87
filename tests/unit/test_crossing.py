"""A staged state on its way to another process; here that is this one, once more."""

from __future__ import annotations

import copyreg
import multiprocessing.reduction
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch.testing._internal.two_tensor import TwoTensor

from mpwriter import _crossing
from mpwriter._arena import get_arena
from mpwriter._staged_state import StagedState, claim_of_this_thread
from mpwriter.errors import StagingError
from tests.containers import stock_dtypes
from tests.saves import open_fds
from tests.stagings import leased_bytes, stage
from tests.states import assert_same, random_bits

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of what torch calls beta

MIB = 1 << 20
FDS_OF_A_SEGMENT = 2  # one of ours, one of torch's


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_crossing, "_crossed", threading.Event())
    # As all versions of torch but 2.7; see the test of the other way.
    monkeypatch.setattr(_crossing, "SENDS_WHERE_IT_SAVES", True)
    get_arena().trim()
    yield
    claim_of_this_thread()
    _crossing._adopted.take({})  # nothing is in use any more
    get_arena().trim()
    assert get_arena().stats().num_segments == 0


def crossed(state: StagedState) -> StagedState:
    """What the other process gets."""
    sent = pickle.dumps(state, pickle.HIGHEST_PROTOCOL)
    arrived = pickle.loads(sent)
    assert type(arrived) is StagedState
    return arrived


def values(state: StagedState) -> dict[str, Any]:
    return state.__copy__()


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    assert one.data_ptr() != other.data_ptr()
    before = one.view(torch.uint8).flatten()[0].item()
    one.view(torch.uint8).flatten()[0] ^= 1
    same = bool(other.view(torch.uint8).flatten()[0].item() == before ^ 1)
    one.view(torch.uint8).flatten()[0] ^= 1
    return same


def test_state_crosses_without_its_bytes() -> None:
    """The tensors' memory is mapped, not copied; several segments."""
    first = stage({"w": torch.randn(MIB)})
    second = stage({"w": torch.randn(3 * MIB), "small": torch.randn(10), "step": 3})
    sent = pickle.dumps(second)
    assert len(sent) < 2000
    arrived = pickle.loads(sent)
    assert_same(values(arrived), values(second))
    assert _same_memory(arrived["w"], second["w"])
    assert _same_memory(arrived["small"], second["small"])
    # Its workers are sent extents of it, as of memory that was staged there.
    assert get_arena().find(arrived["w"]) is not None
    assert get_arena().find(arrived["w"]) != get_arena().find(second["w"])
    assert arrived["w"].untyped_storage().nbytes() == arrived["w"].nbytes
    del first


def test_state_crosses_with_every_dtype() -> None:
    """E01: 0-d and empty ones, too."""
    shapes = [(), (0,), (7,), (2, 0, 3), (3, 5)]
    state = {
        f"{name} {shape}": random_bits(getattr(torch, name), shape)
        for name in stock_dtypes()
        for shape in shapes
    }
    staged = stage(state)
    arrived = crossed(staged)
    assert_same(values(arrived), state)
    for name, value in values(staged).items():
        assert (arrived[name].dtype, arrived[name].shape) == (value.dtype, value.shape)


def test_state_crosses_with_its_structure() -> None:
    """Nested, tied, wrapped; objects with tensors of their own; a path."""
    shared = torch.randn(6)
    state = {
        "nested": {"list": [torch.ones(3), {"a": 1}], "pair": (torch.zeros(2), "text")},
        "one": shared,
        "other": shared,
        "quantized": torch.quantize_per_tensor(torch.randn(9), 0.1, 0, torch.qint8),
        "wrapper": TwoTensor(torch.randn(3), torch.randn(3)),
        "strided": torch.randn(4, 6).t(),
    }
    staged = stage(state)
    staged.path = "s3://bucket/x"
    arrived = crossed(staged)
    assert arrived.path == "s3://bucket/x"
    assert arrived["one"].data_ptr() == arrived["other"].data_ptr()  # and so written once
    assert_same(arrived["wrapper"].a, state["wrapper"].a)
    assert_same(arrived["wrapper"].b, state["wrapper"].b)
    assert torch.equal(arrived["quantized"].int_repr(), state["quantized"].int_repr())
    for name in ("nested", "one", "strided"):
        assert_same(arrived[name], state[name], name)


class _Holder:
    def __init__(self) -> None:
        self.tensors = [torch.arange(5), torch.nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_state_crosses_without_sockets_and_files(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariants 7 and 13: no temporary directory, nothing in /dev/shm, whatever the strategy."""
    before = torch.multiprocessing.get_sharing_strategy()
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent/" + 120 * "x")
    monkeypatch.setattr(multiprocessing.reduction, "DupFd", None)
    names = set(os.listdir("/dev/shm"))
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        state = {"w": torch.randn(1000), "empty": torch.empty(0, 3), "holder": _Holder()}
        staged = stage(state)
        address = staged["w"].data_ptr()
        arrived = crossed(staged)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    assert set(os.listdir("/dev/shm")) == names
    assert staged["w"].data_ptr() == address
    assert _same_memory(arrived["w"], staged["w"])
    assert_same(arrived["empty"], state["empty"])
    for one, other in zip(arrived["holder"].tensors, state["holder"].tensors, strict=True):
        assert torch.equal(one, other) and type(one) is type(other)


def test_objects_cross_with_tensors_of_any_dtype_and_their_ties() -> None:
    """As bytes, each storage once."""
    holder = _Holder()
    base = torch.arange(10_000)
    holder.tensors = [base[3:], base[:100], random_bits(torch.uint16, (5,)), torch.empty(0, 2)]
    holder.tensors += [random_bits(torch.float8_e5m2, (2, 3)), torch.tensor(2.5)]
    staged = stage({"holder": holder})
    sent = pickle.dumps(staged)
    assert len(sent) < 100_000
    arrived = pickle.loads(sent)["holder"].tensors
    assert_same(arrived, holder.tensors)
    arrived[0].fill_(7)
    assert arrived[1].tolist() == [0, 1, 2] + 97 * [7]


def test_state_of_many_tensors_crosses_with_few_descriptors() -> None:
    """D03: one a segment, not one a tensor."""
    state = {f"w{n}": torch.full((n % 5,), float(n)) for n in range(5000)}
    staged = stage(state)
    before = open_fds()
    arrived = crossed(staged)
    assert open_fds() - before == FDS_OF_A_SEGMENT
    assert_same(values(arrived), state)


def test_sending_claims_the_state_for_the_thread_that_waits() -> None:
    """The trainer's lease holds until the other process has answered; for one save only."""
    staged = stage({"w": torch.ones(MIB)})
    pickle.dumps(staged)
    assert _crossing.has_crossed()
    claim = claim_of_this_thread()
    assert claim is not None and leased_bytes() >= 4 * MIB
    claim.end()
    assert leased_bytes() == 0
    with pytest.raises(RuntimeError, match="saved before"):
        pickle.dumps(staged)


def test_sending_waits_until_the_save_before_is_over() -> None:
    """G05: torch shares one pipe among the threads of all saves in flight."""
    order: list[str] = []
    sent, answered = threading.Event(), threading.Event()

    def save(name: str) -> None:
        pickle.dumps(states[name])
        order.append(f"{name} is sent")
        sent.set()
        assert answered.wait(30)
        order.append(f"{name} is over")

    states = {name: stage({"w": torch.ones(MIB)}) for name in ("first", "second", "third")}
    threads = [threading.Thread(target=save, args=("first",))]
    threads[0].start()
    assert sent.wait(30)
    for name in ("second", "third"):
        threads.append(threading.Thread(target=save, args=(name,)))
        threads[-1].start()
    threads[1].join(0.3)
    assert order == ["first is sent"]
    answered.set()
    for thread in threads:
        thread.join(30)
    assert [line.split()[0] for line in order[::2]] == [line.split()[0] for line in order[1::2]]
    assert len(order) == 6 and leased_bytes() == 0


def test_sending_goes_on_where_no_save_follows() -> None:
    """By hand, in the trainer's own thread, and again in another one."""
    pickle.dumps(stage({"w": torch.ones(3)}))
    pickle.dumps(stage({"w": torch.ones(3)}))
    claim = claim_of_this_thread()
    assert claim is not None
    claim.end()
    thread = threading.Thread(target=pickle.dumps, args=(stage({"w": torch.ones(3)}),))
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_sending_claims_nothing_when_a_queue_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.7: its thread outlives the saves, so the lease ends with the state itself."""
    monkeypatch.setattr(_crossing, "SENDS_WHERE_IT_SAVES", False)
    states = [stage({"w": torch.ones(MIB)}) for _ in range(2)]
    for state in states:
        pickle.dumps(state)
    assert claim_of_this_thread() is None
    assert leased_bytes() >= 8 * MIB
    del state, states
    assert leased_bytes() == 0


def test_arrived_state_has_a_lease_of_its_own() -> None:
    """It ends with the save there, and gives nothing of the trainer's back."""
    staged = stage({"w": torch.ones(MIB)})
    held = leased_bytes()
    arrived = crossed(staged)
    claim_of_this_thread()
    staged = stage({"w": torch.ones(MIB)})
    arrived = crossed(staged)
    sending = claim_of_this_thread()
    assert dict(arrived.items())
    claim = claim_of_this_thread()
    assert claim is not None and claim is not sending
    claim.end()
    with pytest.raises(RuntimeError, match="saved before"):
        arrived.items()
    assert staged.lease is not None and not staged.lease.released
    assert leased_bytes() >= held


def test_segments_stay_mapped_while_states_bring_them() -> None:
    """Warm for the next save, unmapped when the next save does not bring them again."""
    before = open_fds()
    addresses = set()
    for number in range(3):
        state = {"w": torch.full((MIB,), float(number))}
        arrived = crossed(stage(state))
        claim_of_this_thread()
        assert_same(values(arrived), state)
        addresses.add(arrived["w"].data_ptr())
        del arrived
    assert len(addresses) == 1
    assert open_fds() == before + 2 * FDS_OF_A_SEGMENT  # here and there
    get_arena().trim()
    larger = crossed(stage({"w": torch.ones(8 * MIB)}))
    claim_of_this_thread()
    assert open_fds() == before + 2 * FDS_OF_A_SEGMENT
    assert larger["w"].eq(1).all()


def test_segment_stays_mapped_while_a_state_uses_it() -> None:
    """Also if states that come later do not bring it."""
    first = crossed(stage({"w": torch.full((MIB,), 3.0)}))
    claim = claim_of_this_thread()
    second = crossed(stage({"w": torch.full((2 * MIB,), 4.0)}))
    assert get_arena().find(first["w"]) is not None
    assert first["w"].eq(3).all() and second["w"].eq(4).all()
    del claim


def test_rebuild_raises_when_the_process_is_gone() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    origin = _crossing._Origin(ended.pid, 5, 4096)
    with pytest.raises(StagingError, match=f"staged memory of process {ended.pid}"):
        _crossing.rebuild(pickle.dumps({}), {1: origin}, None)


def test_rebuild_lets_go_when_the_state_cannot_be_put_together() -> None:
    """An object whose class is not to be had in the other process."""
    pickled, origins, path = _crossing.take_apart(stage({"w": torch.ones(MIB)}))
    with pytest.raises(pickle.UnpicklingError):
        _crossing.rebuild(pickled[: len(pickled) // 2], origins, path)
    assert not any(_crossing._adopted._users.values())


def test_states_are_pickled_by_this_module() -> None:
    """By a table, so that what stages need not import what sends."""
    assert StagedState in copyreg.dispatch_table
