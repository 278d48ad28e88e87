"""Loads of a store through worker processes."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from mpwriter import FsspecReader, MPFsspecWriter, _fetch_crew, _fetch_gather, _fetch_source
from mpwriter._arena import get_arena
from mpwriter._faults import ToldError
from mpwriter._fetch_crew import Crew, CrewFile
from mpwriter._fetch_gather import gather
from mpwriter.errors import CorruptCheckpointError, IncompleteCheckpointError, StorageError
from tests.fakes import FaultPlan
from tests.fakes.planned_ranges import PlannedRanges
from tests.saves import failure_of, worker_pids
from tests.states import assert_same, blank, load_into, save_with, shard_names
from tests.trainers import wait_until

MIB = 1 << 20
_PART_BYTES = MIB // 4


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few MiB are many requests, and worth two workers."""
    for module in (_fetch_source, _fetch_crew, _fetch_gather):
        monkeypatch.setattr(module, "PART_BYTES", _PART_BYTES)
    monkeypatch.setattr(_fetch_source, "BYTES_PER_WORKER", MIB)


@pytest.fixture
def crews(monkeypatch: pytest.MonkeyPatch) -> list[Crew]:
    """Those that loads gathered. Each is at work before the first read."""
    found: list[Crew] = []

    def at_work(fs: Any, num_workers: int) -> Crew | None:
        crew = gather(fs, num_workers)
        if crew is not None:
            wait_until(lambda: crew._num_serving == num_workers)
            found.append(crew)
        return crew

    monkeypatch.setattr(_fetch_source, "gather", at_work)
    return found


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "plan")


@pytest.fixture
def state() -> dict[str, Any]:
    return {
        **{f"layer{n}": torch.randn(MIB // 4 + n) for n in range(6)},
        "half": torch.randn(MIB + 7).to(torch.bfloat16),
        **{f"small{n}": torch.randn(n + 1, 7) for n in range(100)},
        "note": {"step": 3},
    }


@pytest.fixture
def saved(checkpoint_dir: Path, state: dict[str, Any]) -> Path:
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=2, sync_files=False), state)
    return checkpoint_dir


def reader_of(saved: Path, plan: FaultPlan, **options: Any) -> FsspecReader:
    options = {"num_workers": 2, **options, **plan.options}
    return FsspecReader(f"plannedranges://{saved}", **options)


def pids_of(plan: FaultPlan) -> set[int]:
    """Of the processes that have read shards."""
    return {call.pid for call in plan.calls("cat", "*.distcp", phase="begin")}


def failure_in_load(reader: FsspecReader, state: dict[str, Any]) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        load_into(blank(state), reader)
    return failure_of(caught.value)


def assert_next_load_works(saved: Path, state: dict[str, Any]) -> None:
    assert_same(load_into(blank(state), FsspecReader(f"asynclike://{saved}")), state)


@pytest.mark.parametrize("verify", [True, False])
def test_load_reads_through_workers_when_much_is_to_be_read(
    verify: bool, saved: Path, state: dict[str, Any], plan: FaultPlan, crews: list[Crew]
) -> None:
    assert_same(load_into(blank(state), reader_of(saved, plan, verify=verify)), state)
    assert pids_of(plan) == set(worker_pids())
    assert len(pids_of(plan)) == 2
    asked = [call.nbytes for call in plan.calls("cat", "*.distcp")]
    assert max(asked) == _PART_BYTES
    total = sum((saved / name).stat().st_size for name in shard_names(saved))
    assert sum(asked) <= total, "no byte is read twice"


def test_load_stays_in_the_trainer_when_little_is_to_be_read(
    saved: Path, state: dict[str, Any], plan: FaultPlan, crews: list[Crew]
) -> None:
    little = {name: state[name] for name in state if name.startswith("small")}
    assert_same(load_into(blank(little), reader_of(saved, plan)), little)
    assert pids_of(plan) == {os.getpid()}
    assert not crews


def test_load_reads_in_the_trainer_while_workers_start(
    saved: Path, state: dict[str, Any], plan: FaultPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Crew, "_take", lambda *_: None)  # their words never arrive
    assert_same(load_into(blank(state), reader_of(saved, plan)), state)
    assert pids_of(plan) == {os.getpid()}


def test_saves_and_loads_share_workers_and_memory(
    saved: Path, state: dict[str, Any], plan: FaultPlan, crews: list[Crew]
) -> None:
    """A segment that workers read files into serves saves again, and the other way round."""
    for number in range(3):
        state = {**state, "layer0": torch.full((MIB // 4,), float(number))}
        save_with(MPFsspecWriter(saved, num_workers=2, sync_files=False), state)
        assert_same(load_into(blank(state), reader_of(saved, plan)), state)
    assert len(crews) == 3
    assert len(worker_pids()) == 2
    assert get_arena().stats().leased_bytes == 0


def test_loads_at_the_same_time_read_their_own(
    saved: Path, state: dict[str, Any], plan: FaultPlan, tmp_path: Path
) -> None:
    states = [{**state, "layer0": torch.full((MIB // 4,), float(n))} for n in range(3)]
    for n, each in enumerate(states):
        save_with(MPFsspecWriter(tmp_path / f"step{n}", num_workers=2, sync_files=False), each)
    found: dict[int, Any] = {}

    def load(n: int) -> None:
        found[n] = load_into(blank(states[n]), reader_of(tmp_path / f"step{n}", plan))

    threads = [threading.Thread(target=load, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same([found[n] for n in range(3)], states)
    assert get_arena().stats().leased_bytes == 0


@pytest.mark.parametrize("victims", [1, 2])
def test_load_ends_well_when_workers_are_killed(
    victims: int, saved: Path, state: dict[str, Any], plan: FaultPlan, crews: list[Crew]
) -> None:
    """What they were asked for is read by others, in the end by the trainer."""
    plan.add("cat", "*.distcp", signal=signal.SIGKILL, times=victims)
    assert_same(load_into(blank(state), reader_of(saved, plan)), state)
    assert plan.num_acts() == victims
    assert (os.getpid() in pids_of(plan)) == (victims == 2)
    assert_next_load_works(saved, state)


def test_load_tries_again_when_an_error_may_pass(
    saved: Path, state: dict[str, Any], plan: FaultPlan, crews: list[Crew]
) -> None:
    plan.add("cat", "*.distcp", errno=errno.ECONNRESET, times=3, where="worker")
    assert_same(load_into(blank(state), reader_of(saved, plan)), state)
    assert plan.num_acts() == 3


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_load_raises_what_the_worker_was_told(
    number: int, saved: Path, state: dict[str, Any], plan: FaultPlan, crews: list[Crew]
) -> None:
    plan.add("cat", "__0_1*", errno=number, text="not for you", where="worker")
    error = failure_in_load(reader_of(saved, plan), state)
    assert isinstance(error, StorageError)
    assert error.errno == number
    assert "not for you" in str(error)
    assert "__0_1" in str(error)
    assert get_arena().stats().leased_bytes == 0
    assert_next_load_works(saved, state)


def test_load_raises_when_a_file_is_missing(
    saved: Path, state: dict[str, Any], plan: FaultPlan, crews: list[Crew]
) -> None:
    os.remove(saved / shard_names(saved)[0])
    error = failure_in_load(reader_of(saved, plan), state)
    assert isinstance(error, IncompleteCheckpointError)
    assert shard_names(saved)[0] not in str(error)
    assert get_arena().stats().leased_bytes == 0


@pytest.mark.parametrize("kept", [1000, 2 * MIB])
def test_load_raises_when_a_file_is_cut_off(
    kept: int, saved: Path, state: dict[str, Any], plan: FaultPlan, crews: list[Crew]
) -> None:
    os.truncate(saved / shard_names(saved)[0], kept)
    error = failure_in_load(reader_of(saved, plan), state)
    assert isinstance(error, CorruptCheckpointError)
    assert shard_names(saved)[0] in str(error)
    assert crews


def test_load_raises_when_a_payload_is_damaged(
    saved: Path, state: dict[str, Any], plan: FaultPlan, crews: list[Crew]
) -> None:
    found = FsspecReader(saved).read_metadata().storage_data
    place = next(info for index, info in found.items() if index.fqn == "layer2")
    with open(saved / place.relative_path, "r+b") as file:
        file.seek(place.offset + place.length // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 4]))
    error = failure_in_load(reader_of(saved, plan), state)
    assert isinstance(error, CorruptCheckpointError)
    assert error.key == "layer2"
    assert crews


def test_load_raises_in_time_when_a_worker_is_stuck(
    saved: Path, state: dict[str, Any], plan: FaultPlan, crews: list[Crew]
) -> None:
    """Its memory is given back after it has been killed."""
    plan.add("cat", "*.distcp", block=True, where="worker")
    error = failure_in_load(reader_of(saved, plan, timeout_s=0.5), state)
    assert isinstance(error, StorageError)
    assert error.errno == errno.ETIMEDOUT
    assert get_arena().stats().leased_bytes == 0
    assert not pids_of(plan) & set(worker_pids())
    plan.release()
    assert_next_load_works(saved, state)


class Local(PlannedRanges):
    """One that cannot be pickled."""

    protocol = "localranges"

    def __reduce__(self) -> Any:
        raise TypeError("this filesystem holds a socket")


def test_load_reads_in_the_trainer_when_no_worker_can_have_the_filesystem(
    saved: Path, state: dict[str, Any], plan: FaultPlan, crews: list[Crew]
) -> None:
    fsspec.register_implementation("localranges", Local, clobber=True)
    reader = FsspecReader(f"localranges://{saved}", num_workers=2, **plan.options)
    assert_same(load_into(blank(state), reader), state)
    assert pids_of(plan) == {os.getpid()}
    assert not crews


@pytest.fixture
def crew(plan: FaultPlan) -> Iterator[Crew]:
    found = gather(PlannedRanges(**plan.options), 2)
    assert found is not None
    wait_until(lambda: found._num_serving == 2)
    yield found
    found.close()


def test_crew_reads_into_several_views(crew: Crew, tmp_path: Path, plan: FaultPlan) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))
    file = CrewFile(PlannedRanges(**plan.options), str(tmp_path / "file"), crew)
    first, second = bytearray(3), bytearray(4)
    assert file.scatter(10, [memoryview(first), memoryview(second)]) == 7
    assert first + second == bytes(range(10, 17))
    assert file.scatter(95, [memoryview(first), memoryview(second)]) == 5
    assert first + second[:2] == bytes(range(95, 100))
    assert file.read_into(5, memoryview(b"")) == 0
    assert os.getpid() not in {call.pid for call in plan.calls("cat")}


def test_crew_tells_that_a_file_is_missing(crew: Crew, tmp_path: Path) -> None:
    with pytest.raises(ToldError) as caught:
        crew.scatter(str(tmp_path / "none"), 0, [memoryview(bytearray(3))])
    assert caught.value.record.absent


def test_crew_refuses_requests_after_its_end(plan: FaultPlan, tmp_path: Path) -> None:
    crew = gather(PlannedRanges(**plan.options), 2)
    assert crew is not None
    crew.close()
    with pytest.raises(_fetch_crew._ClosedError):
        crew.scatter(str(tmp_path), 0, [memoryview(bytearray(3))])
    assert get_arena().stats().leased_bytes == 0


def test_gather_finds_nobody_when_there_is_no_memory(
    plan: FaultPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_fetch_gather, "arena_unavailable_reason", lambda: "there is no memfd")
    assert gather(PlannedRanges(**plan.options), 2) is None
