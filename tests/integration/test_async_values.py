"""Asynchronous saves: every checkpoint holds the values of its own call, whatever comes later."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import StorageMeta

from mpwriter import FsspecReader, MPFsspecWriter
from mpwriter._arena import get_arena
from mpwriter.errors import IncompleteCheckpointError, StagingMemoryError
from tests.asyncs import async_save, leased_bytes, settled, wait_for_saves
from tests.fakes import FaultPlan
from tests.saves import names_in, open_fds, worker_pids
from tests.states import assert_same, blank, load_into, outcome, random_bits
from tests.trainers import wait_until

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_stays_leased() -> Iterator[None]:
    get_arena().trim()
    yield
    wait_for_saves()
    assert leased_bytes() == 0


@pytest.fixture
def make_plan(tmp_path: Path) -> Iterator[Callable[[], FaultPlan]]:
    made: list[FaultPlan] = []

    def make() -> FaultPlan:
        made.append(FaultPlan(tmp_path / f"plan{len(made)}"))
        return made[-1]

    yield make
    for plan in made:
        plan.release()


def filled(value: float, numel: int = MIB) -> dict[str, Any]:
    state = {f"w{n}": torch.full((numel // 4,), value + n / 8) for n in range(4)}
    return {**state, "step": value}


def change(state: dict[str, Any], value: float) -> None:
    """What an optimizer does."""
    for tensor in state.values():
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(value)


def assert_loads(path: Path, state: dict[str, Any]) -> None:
    assert_same(load_into(blank(state), FsspecReader(path)), state)


def test_save_holds_the_values_of_the_call_when_they_change_at_once(
    tmp_path: Path, make_plan: Callable[[], FaultPlan]
) -> None:
    """A01: no worker has opened a file yet when they change; 20 times."""
    for number in range(20):
        plan, state = make_plan(), filled(number)
        plan.add("open", "*.distcp", block=True)
        path = tmp_path / str(number)
        future = async_save(state, f"fault://{path}", **plan.options)
        change(state, -1)
        assert not future.done()
        plan.release()
        future.result(30)
        assert_loads(path, filled(number))


def test_save_holds_the_values_of_the_call_when_a_file_takes_a_second(
    tmp_path: Path, make_plan: Callable[[], FaultPlan]
) -> None:
    """A01, A04: several in flight; values that change between and during the saves."""
    plan, state = make_plan(), filled(1)
    plan.add("open", "*.distcp", sleep_s=1.0)
    writer = MPFsspecWriter(f"fault://{tmp_path}/unused", num_workers=2, **plan.options)
    futures = []
    for number in range(3):
        change(state, 0)
        for name, value in filled(number).items():
            state[name] = value
        futures.append(async_save(state, f"fault://{tmp_path}/{number}", writer=writer))
        assert sum(not future.done() for future in futures) == number + 1
        change(state, -number)
    for number, future in enumerate(futures):
        future.result(30)
        assert_loads(tmp_path / str(number), filled(number))


def test_save_waits_for_memory_when_the_budget_holds_two(
    tmp_path: Path, make_plan: Callable[[], FaultPlan]
) -> None:
    """A04: memory is not handed on before the file that is made of it is complete."""
    plan = make_plan()
    plan.add("write", "*.distcp", nth=2, sleep_s=0.3)
    futures = []
    for number in range(5):
        state = filled(number)
        path = f"fault://{tmp_path}/{number}"
        options = {"staging_budget_bytes": 10 * MIB, "timeout_s": 30, **plan.options}
        futures.append(async_save(state, path, **options))
        assert get_arena().stats().claimed_bytes < 14 * MIB
        change(state, -1)
    for number, future in enumerate(futures):
        future.result(30)
        assert_loads(tmp_path / str(number), filled(number))


def test_save_raises_when_no_memory_comes_free_in_time(
    tmp_path: Path, make_plan: Callable[[], FaultPlan]
) -> None:
    """Within `timeout_s`; the save before goes on, and the next one works."""
    plan = make_plan()
    plan.add("open", "*.distcp", block=True)
    options = {"staging_budget_bytes": 6 * MIB, **plan.options}
    first = async_save(filled(1), f"fault://{tmp_path}/1", **options)
    with pytest.raises(StagingMemoryError, match="staging_budget_bytes is 6291456"):
        async_save(filled(2), f"fault://{tmp_path}/2", timeout_s=0.2, **options)
    assert not (tmp_path / "2").exists()
    plan.release()
    first.result(30)
    async_save(filled(3), f"fault://{tmp_path}/3", timeout_s=30, **options).result(30)
    for number in (1, 3):
        assert_loads(tmp_path / str(number), filled(number))


def test_save_raises_at_once_when_the_budget_can_never_hold_it(tmp_path: Path) -> None:
    with pytest.raises(StagingMemoryError, match=r"needs \d+ bytes.*staging_budget_bytes is 2097"):
        async_save(filled(1), tmp_path / "1", staging_budget_bytes=2 * MIB)
    assert names_in(tmp_path) == []


def _random_state(step: int) -> dict[str, Any]:
    """Other shapes, dtypes, values, keys and objects at each step; about 2 MiB."""
    chooser = random.Random(step)
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]
    state: dict[str, Any] = {"step": step, "note": {"text": "x" * chooser.randrange(5000)}}
    for number in range(chooser.randrange(3, 30)):
        shape = tuple(chooser.randrange(0, 40) for _ in range(chooser.randrange(0, 4)))
        state[f"w{number}"] = random_bits(chooser.choice(dtypes), shape, step)
    for number in range(5):
        numel = chooser.randrange(60_000, 100_000)
        state[f"large{number}"] = torch.full((numel,), float(step * 10 + number))[:: number + 1]
    state["tied"] = state["large0"]
    return state


@pytest.mark.slow
def test_every_save_holds_its_own_step_when_the_state_keeps_changing(tmp_path: Path) -> None:
    """50 in a row, up to two in flight; memory, descriptors and threads flat after the third."""
    futures: list[tuple[Path, dict[str, Any], Future[Any]]] = []
    writer = MPFsspecWriter(
        tmp_path / "unused", num_workers=2, sync_files=False, per_worker_copy_ahead=1 << 18
    )
    figures = []

    def finish() -> None:
        path, expected, future = futures.pop(0)
        future.result(30)
        assert_loads(path, expected)

    for step in range(50):
        state = _random_state(step)
        path, expected = tmp_path / str(step), copy.deepcopy(state)
        futures.append((path, expected, async_save(state, path, writer=writer)))
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.fill_(step % 2)
        if len(futures) == 2:
            finish()
        stats = get_arena().stats()
        figures.append((stats.claimed_bytes, open_fds(), threading.active_count(), worker_pids()))
    finish()
    wait_for_saves()
    claimed, fds, threads, workers = zip(*figures, strict=True)
    # How many windows and further workers there are at a time is a matter of luck.
    assert max(claimed[3:]) <= max(claimed[:3]) + 8 * MIB, claimed
    assert max(fds[3:]) <= max(fds[:3]) + 16, fds
    assert max(threads[3:]) <= max(threads[:3]) + 2, threads
    assert max(map(len, workers)) <= 4


def test_one_writer_serves_saves_of_several_threads(tmp_path: Path) -> None:
    """Invariant 14: each with an id of its own, all in flight at the same time."""
    writer = MPFsspecWriter(tmp_path / "unused", num_workers=2, sync_files=False)
    barrier = threading.Barrier(4)
    errors: list[BaseException] = []

    def train(rank: int) -> None:
        try:
            for number in range(3):
                barrier.wait(30)
                state = filled(10 * rank + number)
                path = tmp_path / f"{rank}.{number}"
                future = async_save(state, path, writer=writer)
                change(state, -1)
                future.result(30)
        except BaseException as exc:
            errors.append(exc)
            barrier.abort()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert not errors, errors
    for rank in range(4):
        for number in range(3):
            assert_loads(tmp_path / f"{rank}.{number}", filled(10 * rank + number))
    assert not (tmp_path / "unused").exists()


class _Slow(MPFsspecWriter):
    """The thread of its first save is late."""

    go_on = threading.Event()
    late = True

    def storage_meta(self) -> StorageMeta:
        late, self.late = self.late, False
        if late:
            self.go_on.wait(30)
        return super().storage_meta()


def test_save_goes_where_the_writer_pointed_when_it_is_moved_meanwhile(tmp_path: Path) -> None:
    """Invariant 14: also a save without an id of its own, whose thread has not begun yet."""
    writer = _Slow(tmp_path / "first", num_workers=1, sync_files=False)
    first = async_save(filled(1), writer=writer)
    async_save(filled(2), tmp_path / "second", writer=writer).result(30)
    assert not first.done()
    writer.go_on.set()
    first.result(30)
    assert_loads(tmp_path / "first", filled(1))
    assert_loads(tmp_path / "second", filled(2))


def test_load_says_that_there_is_no_checkpoint_when_a_save_is_in_flight(
    tmp_path: Path, make_plan: Callable[[], FaultPlan]
) -> None:
    """B17: no partial values; and of an overwritten checkpoint the old ones."""
    plan = make_plan()
    plan.add("mv", "__0_1.*", block=True)
    path = tmp_path / "checkpoint"
    future = async_save(filled(1), f"fault://{path}", **plan.options)
    target = blank(filled(1))
    wait_until(lambda: plan.calls("mv", "__0_0.*") and plan.calls("mv", "__0_1.*", phase="begin"))
    error = outcome(lambda: load_into(target, FsspecReader(path)))
    assert error[0] is IncompleteCheckpointError and "no complete checkpoint" in error[1]
    assert_same(target, blank(filled(1)))
    plan.release()
    future.result(30)
    assert_loads(path, filled(1))

    second = make_plan()
    second.add("mv", "__0_1.*", block=True)
    future = async_save(filled(2), f"fault://{path}", **second.options)
    assert_loads(path, filled(1))
    second.release()
    assert settled(future) is None
    assert_loads(path, filled(2))
