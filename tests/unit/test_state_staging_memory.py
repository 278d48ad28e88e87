"""Staging of whole state dicts: room for them, and copies that land later."""

from __future__ import annotations

import resource
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mpwriter
import mpwriter._pool
import mpwriter._state_staging as state_staging
from mpwriter._arena import Arena, get_arena
from mpwriter._staged_state import StagedState
from mpwriter._state_staging import StateStaging
from mpwriter._streams import CopyStream, StreamFactory
from mpwriter._types import PAGE_BYTES
from mpwriter.errors import StagingError, StagingMemoryError
from tests.stagings import leased_bytes, stage
from tests.states import assert_same

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_stays_leased() -> Iterator[None]:
    get_arena().trim()
    yield
    assert leased_bytes() == 0
    get_arena().trim()


# -- budget -------------------------------------------------------------------------------------


def test_prepare_raises_before_anything_is_copied_when_the_budget_is_too_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both figures and the option's name; at once, without a segment."""
    monkeypatch.setattr(state_staging, "copy_each", lambda targets, sources: pytest.fail("copied"))
    before = get_arena().stats()
    state = {"a": torch.ones(3 * MIB), "b": torch.ones(MIB), "c": torch.ones(1)}
    with pytest.raises(StagingMemoryError) as caught:
        stage(state, budget_bytes=9 * MIB + 5, timeout_s=3600)
    needed = 16 * MIB + PAGE_BYTES
    assert f"{needed} bytes" in str(caught.value)
    assert f"staging_budget_bytes is {9 * MIB + 5}" in str(caught.value)
    assert (caught.value.needed_bytes, caught.value.budget_bytes) == (needed, 9 * MIB + 5)
    assert get_arena().stats() == before


def test_prepare_waits_until_an_earlier_staging_ends() -> None:
    """In a thread of its own, within `timeout_s`; then it has the memory of the other."""
    first = stage({"a": torch.full((4 * MIB,), 1.0)}, budget_bytes=20 * MIB)
    num_opened = get_arena().stats().num_opened
    found: list[StagedState] = []

    def second() -> None:
        state = {"a": torch.full((4 * MIB,), 2.0)}
        found.append(stage(state, budget_bytes=20 * MIB, timeout_s=30))

    thread = threading.Thread(target=second)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and not found
    assert first["a"].eq(1).all()
    assert first.lease is not None
    first.lease.release()
    thread.join(30)
    assert found and found[0]["a"].eq(2).all()
    assert get_arena().stats().num_opened == num_opened


def test_prepare_raises_when_no_earlier_staging_ends_in_time() -> None:
    first = stage({"a": torch.ones(4 * MIB)}, budget_bytes=20 * MIB)
    with pytest.raises(StagingMemoryError, match=r"not released within 0\.1 s.*staging_budget"):
        stage({"a": torch.ones(4 * MIB)}, budget_bytes=20 * MIB, timeout_s=0.1)
    assert first["a"].eq(1).all()
    assert get_arena().stats().num_leases == 1


def test_stage_finds_warm_memory_the_second_time() -> None:
    """The same places: no segment is opened, no page of the state is touched for the first time."""
    state = {f"w{n}": torch.randn(2 * MIB) for n in range(8)}
    state |= {f"small{n}": torch.randn(100) for n in range(500)}
    num_opened = get_arena().stats().num_opened
    addresses, faults = [], []
    for number in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        staged = stage(state)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        addresses.append([value.data_ptr() for value in staged.values()])
        if number:
            assert addresses[number] == addresses[0]
        assert_same(dict(staged.__copy__()), state)
        del staged
    assert get_arena().stats().num_opened == num_opened + 1
    # 64 MiB are 16,384 pages. The kernel may have mapped many at a time.
    assert max(faults[1:]) < 1000, faults


def test_stage_follows_a_state_that_changes() -> None:
    """Shapes and dtypes at the places of others: every value is the new one."""
    dtypes = [torch.float32, torch.int64, torch.bfloat16, torch.uint8, torch.complex64]
    for number in range(8):
        shape = (number + 1, 64)
        state = {
            f"w{n}": torch.full(shape, number + n).to(dtypes[(n + number // 2) % 5])
            for n in range(40 - number)
        }
        staged = stage(state)
        assert_same(dict(staged.__copy__()), state)
        del staged
    assert get_arena().stats().num_segments == 1


def test_trim_unmaps_what_stagings_remember() -> None:
    """The tensors of earlier stagings are kept for the next, not the memory under them."""
    staged = stage({"w": torch.ones(MIB)})
    assert staged["w"].eq(1).all()
    del staged
    assert _is_mapped()
    get_arena().trim()
    assert not _is_mapped()


def test_shutdown_frees_the_memory_when_no_worker_was_ever_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mpwriter._pool, "_pool", None)
    stage({"w": torch.ones(MIB)})
    assert get_arena().stats().claimed_bytes
    mpwriter.shutdown()
    assert not get_arena().stats().claimed_bytes


def _is_mapped() -> bool:
    with open("/proc/self/maps") as maps:
        return any("/memfd:mpwriter" in line for line in maps)


# -- accelerators -------------------------------------------------------------------------------


class _LateEvent:
    def __init__(self, stream: _LateStream, upto: int) -> None:
        self._stream, self._upto = stream, upto

    def query(self) -> bool:
        return self._stream.landed >= self._upto

    def synchronize(self) -> None:
        self._stream.land(self._upto)


class _LateStream:
    """Copies land only when an event recorded after them is waited for."""

    def __init__(self, fails_at: int = -1) -> None:
        self.issued: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self.count = self.landed = 0
        self._fails_at = fails_at

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if self.count == self._fails_at:
            raise RuntimeError("the device has fallen off the bus")
        self.issued.append((destination, source))
        self.count += 1

    def record(self) -> _LateEvent:
        return _LateEvent(self, self.count)

    def land(self, upto: int) -> None:
        while self.landed < upto:
            destination, source = self.issued.popleft()
            destination.copy_(source)
            self.landed += 1


def _even_ones_on(stream: CopyStream) -> StreamFactory:
    """Takes tensors of an even number of rows for those of a device."""
    return lambda tensor: stream if tensor.shape[0] % 2 == 0 else None


def _device_state() -> dict[str, Any]:
    complex_ones = torch.randn(8, dtype=torch.complex64)
    return {
        **{f"w{n}": torch.randn(n, 5) for n in range(1, 9)},
        "strided": torch.randn(8, 6)[::2, 1:4],
        "conj": complex_ones.conj(),
        "float8": torch.randn(4, 4).to(torch.float8_e4m3fn).t(),
        "nested": {"list": [torch.randn(4), torch.randn(3)]},
    }


def test_copy_waits_for_the_copies_of_every_stream() -> None:
    """The order copy, record, wait: nothing shows that changes after `copy`."""
    late = _LateStream()
    state = _device_state()
    expected = {name: value.clone() for name, value in state.items() if name != "nested"}
    staged = stage(state, stream_for=_even_ones_on(late))
    assert late.count == late.landed > 6
    for name, value in expected.items():
        state[name].zero_()
        assert_same(staged[name], value.resolve_conj(), name)


def test_copy_shows_a_missing_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the stand-in of the test above is one: without the wait the values are others."""
    monkeypatch.setattr(state_staging, "_settle", lambda recorded: None)
    get_arena().reserve(4 * MIB)
    late = _LateStream()
    staged = stage({"w": torch.randn(8, 5)}, stream_for=_even_ones_on(late))
    assert staged["w"].eq(0).all()


def test_copy_settles_before_it_gives_memory_back_when_a_copy_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is under way would land in memory that another staging has been given."""
    late = _LateStream(fails_at=3)
    under_way: list[int] = []
    release = Arena.release_many

    def release_many(arena: Arena, extents: Any) -> None:
        under_way.append(late.count - late.landed)
        release(arena, extents)

    monkeypatch.setattr(Arena, "release_many", release_many)
    with pytest.raises(StagingError, match="fallen off the bus") as caught:
        stage(_device_state(), stream_for=_even_ones_on(late))
    assert caught.value.original_type == "RuntimeError"
    assert under_way == [0] and late.landed == 3
    assert leased_bytes() == 0


def test_prepare_opens_streams_in_the_callers_thread() -> None:
    """A stream waits for the work that this thread has queued so far."""
    seen: list[int] = []
    late = _LateStream()

    def stream_for(tensor: torch.Tensor) -> CopyStream:
        seen.append(threading.get_ident())
        return late

    staging = StateStaging(stream_for)
    staging.prepare({"a": torch.ones(2), "b": torch.ones(3)}, budget_bytes=None, timeout_s=0)
    num_seen = len(seen)
    thread = threading.Thread(target=staging.copy)
    thread.start()
    thread.join()
    assert num_seen == len(seen) and set(seen) == {threading.get_ident()}
    assert late.landed == 2


class _CountingPinner:
    def __init__(self) -> None:
        self.locked: list[int] = []
        self.unlocked: list[int] = []

    def register(self, address: int, nbytes: int) -> bool | None:
        self.locked.append(address)
        return True

    def unregister(self, address: int) -> None:
        self.unlocked.append(address)


@pytest.mark.parametrize("on_device", [True, False])
def test_prepare_pins_each_segment_once_when_there_is_a_device(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D11: never twice, and not at all for tensors of the CPU."""
    pinner = _CountingPinner()
    monkeypatch.setattr(get_arena(), "_pinner", pinner)
    late = _LateStream()
    for _ in range(3):
        stage({"w": torch.ones(MIB)}, stream_for=_even_ones_on(late) if on_device else None)
    assert len(pinner.locked) == (1 if on_device else 0)
    get_arena().trim()
    assert pinner.unlocked == pinner.locked


def test_stage_touches_no_accelerator_when_every_tensor_is_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("an accelerator's runtime was asked for")

    names = ["is_available", "current_stream", "cudart", "is_initialized"]
    monkeypatch.setattr(torch, "get_device_module", refuse)
    for name in names:
        monkeypatch.setattr(torch.cuda, name, refuse)
    stage({"a": torch.ones(10), "b": [torch.randn(3, 4).t()]})


def test_abandon_gives_the_memory_back_when_nothing_was_copied() -> None:
    staging = StateStaging()
    staging.prepare({"a": torch.ones(MIB)}, budget_bytes=None, timeout_s=0)
    assert leased_bytes() == 4 * MIB
    staging.abandon()
    assert leased_bytes() == 0


@pytest.mark.parametrize("step", [lambda: KeyboardInterrupt(), lambda: ValueError("odd")])
def test_prepare_gives_the_memory_back_when_it_is_interrupted(
    step: Callable[[], BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the exception is kept."""

    def stream_for(tensor: torch.Tensor) -> None:
        raise step()

    with pytest.raises((KeyboardInterrupt, ValueError)) as caught:
        stage({"a": torch.ones(MIB)}, stream_for=stream_for)
    assert caught.value.__traceback__ is not None
    assert leased_bytes() == 0
