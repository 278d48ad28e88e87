"""Ways to stage for an asynchronous save: torch's stagers, and beside the training."""

from __future__ import annotations

import importlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import (
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
)

from mpwriter import MPFsspecWriter
from mpwriter._arena import get_arena
from mpwriter._compat import HAS_ASYNC_STAGING
from mpwriter._state_staging import StateStaging
from mpwriter.errors import StagingError
from tests.asyncs import async_save, leased_bytes, settled, wait_for_saves
from tests.fakes import FaultPlan
from tests.saves import assert_holds, small_state
from tests.states import assert_loads_everywhere

assert HAS_ASYNC_STAGING, "these tests are for torch 2.9 up"


@pytest.fixture(autouse=True)
def _nothing_stays_leased() -> Iterator[None]:
    get_arena().trim()
    yield
    wait_for_saves()


@pytest.fixture
def plan(tmp_path: Path) -> Iterator[FaultPlan]:
    made = FaultPlan(tmp_path / "plan")
    yield made
    made.release()


def change(state: dict[str, Any]) -> None:
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.fill_(-1)


# -- stagers ------------------------------------------------------------------------------------

# On a CPU: a non-blocking copy needs an accelerator.
_OPTIONS = [
    StagingOptions(pinned, shared, in_background, False)
    for pinned in (False, True)
    for shared in (False, True)
    for in_background in (False, True)
]

_STAGERS: dict[str, Callable[[], Any]] = {
    "writer": lambda: None,
    "blocking": BlockingAsyncStager,
    "blocking, cached": lambda: _Unpinned(cache_staged_state_dict=True),
}
_STAGERS |= {str(n): lambda o=o: DefaultStager(o) for n, o in enumerate(_OPTIONS)}  # type: ignore[misc]


class _Unpinned(BlockingAsyncStager):
    """The cache of torch's older API without page-locked memory, which needs an accelerator."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self.state_dict_cache is None:
            self.state_dict_cache = {key: torch.empty_like(t) for key, t in state_dict.items()}
        return super().stage(state_dict)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("kind", _STAGERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_save_holds_its_values_with_any_stager(kind: str, cached: bool, tmp_path: Path) -> None:
    """G05: three saves each; the writer's own, torch's in every mix of options, and its cache."""
    stager = _STAGERS[kind]()
    writer = MPFsspecWriter(
        tmp_path / "x", num_workers=2, sync_files=False, cache_staged_state_dict=cached
    )
    state = {key: value for key, value in small_state().items() if key != "step"}
    for number in range(3):
        for key, value in small_state(number).items():
            if key != "step":
                state[key].copy_(value)
        expected = {key: value.clone() for key, value in state.items()}
        options = {} if stager is None else {"async_stager": stager}
        response = async_save(state, tmp_path / str(number), writer=writer, dcp_options=options)
        if isinstance(response, Future):
            future = response
        else:
            response.staging_completion.result(30)
            future = response.upload_completion
        change(state)
        assert settled(future) is None
        assert_holds(tmp_path / str(number), expected)
    if stager is not None:
        stager.close()


def test_save_stages_once_when_the_writer_stages(tmp_path: Path) -> None:
    """G05: what is staged is what the workers map; no window beside it."""
    state = {f"w{n}": torch.randn(1 << 20) for n in range(4)}
    settled(async_save(state, tmp_path / "x"))
    stats = get_arena().stats()
    assert stats.peak_claimed_bytes >= 16 << 20
    assert stats.claimed_bytes <= 18 << 20, "the state, and a window for the metadata"


# -- staging beside the training ----------------------------------------------------------------


class _Gate:
    """Holds up the copies of stagings in threads of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        copy = StateStaging.copy

        def late(staging: StateStaging) -> Any:
            assert threading.current_thread() is not threading.main_thread()
            assert self.open.wait(30)
            return copy(staging)

        monkeypatch.setattr(StateStaging, "copy", late)


@pytest.mark.parametrize("wait", ["response", "writer"])
def test_staging_is_done_when_it_says_so(
    wait: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G10: the call returns before the copy; what changes after the signal does not show."""
    gate = _Gate(monkeypatch)
    writer = MPFsspecWriter(tmp_path / "x", num_workers=2, async_staging=True)
    state = small_state(1)
    response = async_save(state, writer=writer)
    assert isinstance(response, dcp.state_dict_saver.AsyncSaveResponse)
    assert not response.staging_completion.done() and not response.upload_completion.done()
    # Still the trainer's to change: this is what the optimizer must not do before the signal.
    for key, value in small_state(2).items():
        if key != "step":
            state[key].copy_(value)
    gate.open.set()
    if wait == "response":
        response.staging_completion.result(30)
    else:
        writer.synchronize_staging()
        writer.synchronize_staging()
    change(state)
    assert settled(response.upload_completion) is None
    assert_holds(tmp_path / "x", {**small_state(2), "step": 1})
    writer.close()
    writer.close()


def test_staging_in_a_thread_holds_what_is_no_tensor_as_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G10: structure and objects are copied before the call returns; only values are late."""
    gate = _Gate(monkeypatch)
    writer = MPFsspecWriter(tmp_path / "x", num_workers=1, async_staging=True)
    state = {"w": torch.ones(5), "names": ["a"], "nested": {"step": [1, 2]}}
    response = async_save(state, writer=writer)
    state["names"].append("b")  # type: ignore[union-attr]
    state["nested"]["step"] = 7  # type: ignore[index]
    state["w"] = torch.zeros(5)
    gate.open.set()
    assert settled(response.upload_completion) is None
    expected = {"w": torch.ones(5), "names": ["a"], "nested": {"step": [1, 2]}}
    assert_loads_everywhere(tmp_path / "x", expected)
    writer.close()


def test_staging_raises_from_every_signal_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G10: and gives its memory back."""

    def fail(staging: StateStaging, recorded: Any) -> None:
        time.sleep(0.05)  # as torch takes a future that is done for one that went well
        raise RuntimeError("the device has fallen off the bus")

    monkeypatch.setattr(StateStaging, "_issue", fail)
    writer = MPFsspecWriter(tmp_path / "x", num_workers=1, async_staging=True)
    response = async_save(small_state(), writer=writer)
    for signal in (response.staging_completion, response.upload_completion):
        with pytest.raises(StagingError, match="off the bus"):
            signal.result(30)
    with pytest.raises(StagingError, match="off the bus"):
        writer.synchronize_staging()
    writer.synchronize_staging()
    wait_for_saves()
    assert leased_bytes() == 0
    writer.close()


def test_writer_is_pickled_without_its_threads_when_it_has_staged(tmp_path: Path) -> None:
    """G05: torch's process mode pickles it."""
    writer = MPFsspecWriter(tmp_path / "x", num_workers=1, async_staging=True)
    response = async_save(small_state(1), writer=writer)
    copied = pickle.loads(pickle.dumps(writer))
    assert settled(response.upload_completion) is None
    writer.close()
    response = async_save(small_state(2), writer=copied)
    assert settled(response.upload_completion) is None
    assert_holds(tmp_path / "x", small_state(2))
    copied.close()


def test_memory_comes_back_when_a_future_of_a_staging_is_never_used(tmp_path: Path) -> None:
    """The writer itself keeps no staged state alive."""
    writer = MPFsspecWriter(tmp_path / "x", num_workers=1, async_staging=True)
    staging = writer.stage(small_state())
    staging.result(30)  # type: ignore[union-attr]
    assert leased_bytes() > 0
    del staging
    # The thread that has copied lets go of it in its own time.
    wait_for_saves()
    writer.synchronize_staging()
    writer.close()


def test_writer_brings_its_filesystem_along_when_it_is_pickled(
    tmp_path: Path, plan: FaultPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a process that does not know what the user's program has registered."""
    pickled = pickle.dumps(MPFsspecWriter(f"fault://{tmp_path}/x", num_workers=1, **plan.options))
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "fault")
    with pytest.raises(ValueError, match="fault"):
        fsspec.filesystem("fault")
    writer = pickle.loads(pickled)
    assert settled(async_save(small_state(), writer=writer)) is None
    assert plan.calls("open", "*.distcp")
    assert_holds(tmp_path / "x", small_state())
