"""Shared memory: bounded by the copy-ahead and the budget, whatever is saved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import mpwriter
from mpwriter import MPFsspecWriter, _arena
from mpwriter._arena import Arena
from mpwriter._memory import Headroom
from mpwriter.errors import StagingMemoryError
from tests.fakes import FaultPlan
from tests.saves import assert_holds, failure_of, names_in, save, small_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MIB = 1 << 20

# Windows are segments of whole granules; a window is at least so large beside any budget.
_GRANULE_BYTES = 2 * MIB
_LEAST_WINDOW_BYTES = 64 * 1024


def memfd_bytes(pid: int | str = "self") -> int:
    """Size of all memfds of a process, as the kernel tells it."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        if os.path.islink(path) and "/memfd:" in os.readlink(path):
            status = os.stat(path)
            found[status.st_ino] = status.st_size
    return sum(found.values())


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """One that holds nothing yet; the workers know of no segment either."""
    mpwriter.shutdown()
    arena = Arena()
    monkeypatch.setattr(_arena, "_arena", arena)
    before = memfd_bytes()
    yield arena
    assert memfd_bytes() - before == arena.stats().claimed_bytes
    mpwriter.shutdown()
    assert memfd_bytes() == before


def many_tensors(num: int, nbytes: int) -> dict[str, Any]:
    return {f"tensor{n}": torch.full((nbytes // 4,), float(n)) for n in range(num)}


@pytest.mark.parametrize(
    ("nbytes", "copy_ahead"),
    [
        (MIB, MIB),
        (MIB, 4 * MIB),
        pytest.param(25 * 10**6, 64 * MIB, marks=pytest.mark.slow),
    ],
)
def test_save_holds_no_more_than_the_copy_ahead_when_the_storage_is_slow(
    checkpoint_dir: Path, plan: FaultPlan, arena: Arena, nbytes: int, copy_ahead: int
) -> None:
    """D06: 40 tensors into one shard; shared memory never exceeds the documented window."""
    plan.add("write", sleep_s=0.003)
    state = many_tensors(40, nbytes)
    save(
        f"fault://{checkpoint_dir}",
        state,
        num_workers=1,
        per_worker_copy_ahead=copy_ahead,
        sync_files=False,
        **plan.options,
    )
    assert len([name for name in names_in(checkpoint_dir) if name != ".metadata"]) == 1
    assert arena.stats().peak_claimed_bytes <= max(copy_ahead, _GRANULE_BYTES)
    assert arena.stats().leased_bytes == 0
    assert_holds(checkpoint_dir, state)


@pytest.mark.parametrize("budget", [0, 1, 100_000, MIB, 8 * MIB])
def test_save_streams_through_when_the_budget_is_smaller_than_the_window(
    checkpoint_dir: Path, arena: Arena, budget: int
) -> None:
    """A state larger than the budget, and the least window for each worker beside it."""
    state = {**many_tensors(7, 3 * MIB), **small_state(1)}
    save(checkpoint_dir, state, staging_budget_bytes=budget, sync_files=False)
    least = 2 * _LEAST_WINDOW_BYTES
    assert 0 < arena.stats().peak_claimed_bytes <= budget + least
    assert_holds(checkpoint_dir, state)


def test_save_raises_when_the_system_has_no_memory_to_stage_into(
    checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch, arena: Arena
) -> None:
    """D12: a full cgroup is an error with its figures, before anything is written."""
    with monkeypatch.context() as patch, pytest.raises(CheckpointException) as caught:
        patch.setattr(arena, "_look", lambda: Headroom(12_345, "the cgroup /full"))
        save(checkpoint_dir, small_state(1), staging_budget_bytes=7 * MIB)
    error = failure_of(caught.value)
    assert isinstance(error, StagingMemoryError) and isinstance(error, MemoryError)
    assert (error.budget_bytes, error.available_bytes) == (7 * MIB, 12_345)
    assert error.needed_bytes is not None and error.needed_bytes > 12_345
    for word in ("staging_budget_bytes", str(7 * MIB), "12345", "the cgroup /full"):
        assert word in str(error)
    assert names_in(checkpoint_dir) == []
    save(checkpoint_dir, small_state(1))
    assert_holds(checkpoint_dir, small_state(1))


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]


def mixed(nbytes: int, number: int) -> dict[str, Any]:
    """About `nbytes` in ten tensors of changing dtypes."""
    state = {}
    for n in range(10 if nbytes else 0):
        dtype = DTYPES[(n + number) % len(DTYPES)]
        numel = nbytes // 10 // dtype.itemsize
        state[f"tensor{n}"] = (torch.arange(numel) % 101 + number + n).to(dtype)
    return state


@pytest.mark.parametrize(
    "sizes",
    [
        [10**6, 20 * 10**6, 10**5, 0, 20 * 10**6],
        pytest.param([10**7, 2 * 10**8, 10**6, 0, 2 * 10**8], marks=pytest.mark.slow),
    ],
)
def test_saves_hold_right_values_when_sizes_and_dtypes_change(
    tmp_path: Path, arena: Arena, sizes: list[int]
) -> None:
    """D08: one writer, the memory of one save serves the next; it does not grow for ever."""
    writer = MPFsspecWriter(tmp_path, num_workers=2, sync_files=False)
    claimed = []
    for _ in range(2):
        for number, nbytes in enumerate(sizes):
            state = mixed(nbytes, number)
            place = tmp_path / str(number)
            dcp.save(state, checkpoint_id=place, storage_writer=writer)
            assert_holds(place, state)
            claimed.append(arena.stats().claimed_bytes)
            assert arena.stats().leased_bytes == 0
    largest = claimed[1]
    assert claimed[1:] == [largest] * (len(claimed) - 1), "what was claimed once is used again"
    assert largest <= 2 * 64 * MIB
