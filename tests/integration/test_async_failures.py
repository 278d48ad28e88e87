"""Asynchronous saves that fail: what is said, what is left, what is given back."""

from __future__ import annotations

import errno
import gc
import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import mpwriter._save as save_module
from mpwriter import MPFsspecWriter
from mpwriter._arena import get_arena
from mpwriter._report import SaveEvent
from mpwriter.errors import StagingMemoryError, StorageError, WorkerDiedError, WorkerTimeoutError
from tests.asyncs import async_save, leased_bytes, settled, wait_for_saves
from tests.fakes import FaultPlan
from tests.saves import assert_holds, failure_of, names_in, open_fds, small_state

STATE_BYTES = 4 * 4000


@pytest.fixture(autouse=True)
def _arena() -> Iterator[None]:
    get_arena().trim()
    yield
    wait_for_saves()


@pytest.fixture
def plan(tmp_path: Path) -> Iterator[FaultPlan]:
    made = FaultPlan(tmp_path / "plan")
    yield made
    made.release()


class _Planner(DefaultSavePlanner):
    """Raises in the step of its name."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step = step

    def _raise_at(self, step: str) -> None:
        if step == self.step:
            raise LookupError(f"no plan in {step}")

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self._raise_at("set_up_planner")
        super().set_up_planner(*args, **kwargs)

    def create_local_plan(self) -> Any:
        self._raise_at("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, *args: Any) -> Any:
        self._raise_at("create_global_plan")
        return super().create_global_plan(*args)

    def finish_plan(self, *args: Any) -> Any:
        self._raise_at("finish_plan")
        return super().finish_plan(*args)

    def resolve_data(self, write_item: WriteItem) -> Any:
        self._raise_at("resolve_data")
        return super().resolve_data(write_item)


class _Handler:
    """Gives up a save at one of its events."""

    def __init__(self, when: str) -> None:
        self.when: str | None = when

    def __call__(self, event: SaveEvent) -> None:
        if event.name == self.when:
            raise LookupError(f"told to stop at {self.when}")


# What goes wrong: rules for the filesystem, options of the writer, options of dcp.async_save.
Fault = Callable[[FaultPlan], tuple[dict[str, Any], dict[str, Any]]]


def _rule(*args: Any, **kwargs: Any) -> Fault:
    def make(plan: FaultPlan) -> tuple[dict[str, Any], dict[str, Any]]:
        plan.add(*args, **kwargs)
        return {"retries": 0}, {}

    return make


def _planner(step: str) -> Fault:
    return lambda plan: ({}, {"planner": _Planner(step)})


def _event(when: str) -> Fault:
    return lambda plan: ({"event_handler": _Handler(when)}, {})


def _stuck(plan: FaultPlan) -> tuple[dict[str, Any], dict[str, Any]]:
    plan.add("write", "*.distcp", block=True)
    return {"timeout_s": 2}, {}


FAULTS: dict[str, tuple[Fault, type[BaseException]]] = {
    "planner, set up": (_planner("set_up_planner"), LookupError),
    "planner, local plan": (_planner("create_local_plan"), LookupError),
    "planner, global plan": (_planner("create_global_plan"), LookupError),
    "planner, finish": (_planner("finish_plan"), LookupError),
    "planner, resolve": (_planner("resolve_data"), ValueError),
    "directory": (_rule("makedirs", errno=errno.EACCES), StorageError),
    "open": (_rule("open", "*.distcp", errno=errno.ENOSPC), StorageError),
    "write": (_rule("write", "__0_1.*", errno=errno.EDQUOT), StorageError),
    "publish": (_rule("mv", "__0_1.*", errno=errno.EIO), StorageError),
    "commit": (_rule("write", ".metadata", errno=errno.ENOSPC), StorageError),
    "worker ends": (_rule("write", "__0_0.*", exit_code=3), WorkerDiedError),
    "worker killed": (_rule("write", "__0_1.*", signal=signal.SIGKILL), WorkerDiedError),
    "worker killed at the commit": (_rule("mv", ".metadata", exit_code=3), WorkerDiedError),
    "worker stuck": (_stuck, WorkerTimeoutError),
    "told to stop at the start": (_event("save_started"), LookupError),
    "told to stop after a file": (_event("file_written"), LookupError),
    "told to stop before the commit": (_event("shards_written"), LookupError),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_memory_comes_back_when_a_save_fails(
    kind: str, tmp_path: Path, plan: FaultPlan, caplog: pytest.LogCaptureFixture
) -> None:
    """A14: whatever the end, and although future and exception are kept, with every frame.

    One error line is logged for those who drop the future; no `.metadata`; the same writer works
    again, in a budget that holds one state only.
    """
    prepare, expected = FAULTS[kind]
    options, dcp_options = prepare(plan)
    state = small_state(1)
    writer = MPFsspecWriter(
        f"fault://{tmp_path}/failed",
        num_workers=2,
        staging_budget_bytes=STATE_BYTES + 4096,
        **{"timeout_s": 20, **options, **plan.options},
    )
    gc.disable()
    try:
        with caplog.at_level(logging.ERROR, "mpwriter"):
            future = async_save(state, writer=writer, dcp_options=dcp_options)
            error = settled(future)
            wait_for_saves()  # the last words are said when the thread has ended
        assert error is not None and error.__traceback__ is not None
        assert isinstance(failure_of(error), expected)
        assert leased_bytes() == 0
    finally:
        gc.enable()
    said = [r.getMessage() for r in caplog.records if r.name.startswith("mpwriter")]
    assert len(said) == 1 and str(tmp_path / "failed") in said[0], said
    assert names_in(tmp_path / "failed") == []

    plan.clear()
    plan.release()
    options.get("event_handler", _Handler("")).when = None
    assert settled(async_save(small_state(2), tmp_path / "next", writer=writer)) is None
    assert_holds(tmp_path / "next", small_state(2))
    assert future.exception() is error


def test_memory_comes_back_when_nobody_keeps_the_future(tmp_path: Path, plan: FaultPlan) -> None:
    """A14: an abandoned save, without the help of the garbage collector."""
    plan.add("open", "*.distcp", errno=errno.ENOSPC)
    gc.disable()
    try:
        for _ in range(3):
            async_save(small_state(), f"fault://{tmp_path}/x", **plan.options)
            wait_for_saves()
            assert leased_bytes() == 0
    finally:
        gc.enable()


def test_memory_comes_back_when_what_was_staged_is_never_saved(tmp_path: Path) -> None:
    """torch's process mode needs a process group, and says so after the staging."""
    assert not dist.is_initialized()
    writer = MPFsspecWriter(
        tmp_path / "x", num_workers=2, staging_budget_bytes=STATE_BYTES + 4096, timeout_s=20
    )
    options = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    with pytest.raises(ValueError, match="process group"):
        async_save(small_state(), writer=writer, dcp_options=options)
    assert leased_bytes() == 0
    assert settled(async_save(small_state(2), writer=writer)) is None
    assert_holds(tmp_path / "x", small_state(2))


def test_saves_that_fail_leave_nothing_when_there_are_many(tmp_path: Path, plan: FaultPlan) -> None:
    """Invariant 10: descriptors and memory flat over failures of all kinds."""
    counts = []
    errors = []
    kinds = ["planner, local plan", "write", "worker killed", "commit"]
    for number in range(12):
        plan.clear()
        options, dcp_options = FAULTS[kinds[number % len(kinds)]][0](plan)
        where = f"fault://{tmp_path}/x"
        future = async_save(
            small_state(), where, dcp_options=dcp_options, **options, **plan.options
        )
        errors.append(settled(future))
        assert leased_bytes() == 0
        counts.append((open_fds(), get_arena().stats().claimed_bytes))
    assert all(errors)
    assert max(counts[4:]) <= max(counts[:4])


def test_stage_waits_for_nothing_that_is_over_on_its_thread(tmp_path: Path) -> None:
    """A staged state saved in the trainer's own thread, whose planning has failed."""
    writer = MPFsspecWriter(
        tmp_path / "x", num_workers=1, staging_budget_bytes=STATE_BYTES + 4096, timeout_s=0.2
    )
    staged = writer.stage(small_state(1))
    with pytest.raises(BaseException, match="no plan") as caught:
        _save_staged(staged, writer, _Planner("create_local_plan"))
    assert isinstance(failure_of(caught.value), LookupError)
    second = writer.stage(small_state(2))
    _save_staged(second, writer, None)
    assert_holds(tmp_path / "x", small_state(2))
    with pytest.raises(RuntimeError, match="stage again"):
        _save_staged(second, writer, None)


def _save_staged(staged: Any, writer: MPFsspecWriter, planner: Any) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(staged, storage_writer=writer, planner=planner, no_dist=True)


def test_failed_save_is_told_when_there_is_no_arena(
    tmp_path: Path,
    plan: FaultPlan,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A14, invariant 9: staged into ordinary memory, written in the trainer."""
    import mpwriter._state_staging as state_staging

    for module in (state_staging, save_module):
        monkeypatch.setattr(module, "arena_unavailable_reason", lambda: "it is forbidden")
    plan.add("open", "*.distcp", errno=errno.ENOSPC, times=1)
    where = f"fault://{tmp_path}/x"
    error = settled(async_save(small_state(), where, retries=0, **plan.options))
    assert isinstance(failure_of(error), StorageError)  # type: ignore[arg-type]
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert [text for text in said if text.startswith(f"The save of {tmp_path}/x failed")]
    state = {"w": torch.ones(1000)}
    future = async_save(state, where, **plan.options)
    state["w"].zero_()
    assert settled(future) is None
    assert_holds(tmp_path / "x", {"w": torch.ones(1000)})


def test_memory_error_is_raised_in_the_call(tmp_path: Path) -> None:
    """Not in the future, where it would be seen too late."""
    with pytest.raises(StagingMemoryError):
        async_save(small_state(), tmp_path / "x", staging_budget_bytes=4096)
    assert names_in(tmp_path) == []
