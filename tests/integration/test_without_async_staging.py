"""What a torch without AsyncSaveResponse gets; collected there only (see conftest.py)."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from enum import Enum
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import filesystem, state_dict_saver

import mpwriter
from mpwriter import MPFsspecWriter, SerializationFormat
from mpwriter._arena import get_arena
from mpwriter._compat import HAS_ASYNC_STAGING
from tests.asyncs import async_save, leased_bytes, settled, wait_for_saves
from tests.saves import assert_holds, small_state
from tests.states import save_with
from tests.trainers import Trainer

assert not HAS_ASYNC_STAGING
assert not hasattr(state_dict_saver, "AsyncSaveResponse")


@pytest.fixture(autouse=True)
def _nothing_stays_leased() -> Iterator[None]:
    get_arena().trim()
    yield
    wait_for_saves()


def test_writer_refuses_async_staging_when_torch_has_none(tmp_path: Path) -> None:
    """G10: at construction, and makes nothing."""
    with pytest.raises(NotImplementedError, match="AsyncSaveResponse"):
        MPFsspecWriter(tmp_path / "x", async_staging=True)
    assert not (tmp_path / "x").exists()
    MPFsspecWriter(tmp_path / "x", async_staging=False)


def test_async_save_stages_before_it_returns_when_torch_has_no_other_way(tmp_path: Path) -> None:
    """G05: what changes after the call does not show, save after save of one writer."""
    writer = MPFsspecWriter(tmp_path / "x", num_workers=2, sync_files=False)
    for number in range(3):
        state = small_state(number)
        future = async_save(state, tmp_path / str(number), writer=writer)
        assert isinstance(future, Future)
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.fill_(-1)
        assert settled(future) is None
        assert_holds(tmp_path / str(number), small_state(number))
    assert get_arena().stats().peak_claimed_bytes > 0
    assert leased_bytes() == 0


_PROCESS = """
import sys, warnings
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
import tests.fakes
from tests.asyncs import async_save, settled
from tests.fakes import FaultPlan
from tests.saves import assert_holds, small_state

warnings.simplefilter("ignore")
folder = sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
options = {"dcp_options": {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}}
assert settled(async_save(small_state(9), f"{folder}/9", **options)) is None
plan = FaultPlan(f"{folder}/plan")
plan.add("open", "*.distcp", block=True)
futures = [
    async_save(small_state(n), f"fault://{folder}/{n}", **plan.options, **options) for n in range(4)
]
plan.release()
for future in futures:
    assert future.exception(50) is None
settled(futures.pop())  # nothing stays leased
for number in range(4):
    assert_holds(f"{folder}/{number}", small_state(number))
"""


def test_process_mode_keeps_each_state_until_it_is_written(
    start_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    """G05: four in flight; torch 2.7 pickles them on a thread that outlives the saves."""
    start_trainer(_PROCESS, tmp_path).assert_succeeded()


def test_formats_are_those_of_later_versions_of_torch(tmp_path: Path) -> None:
    """G13: by value, by name, and in a writer that crosses to another process."""
    assert mpwriter.SerializationFormat is SerializationFormat
    assert issubclass(SerializationFormat, Enum)
    assert {member.name: member.value for member in SerializationFormat} == {
        "TORCH_SAVE": "torch_save",
        "SAFETENSORS": "safetensors",
    }
    if hasattr(filesystem, "SerializationFormat"):
        assert SerializationFormat is filesystem.SerializationFormat
    safe = SerializationFormat.SAFETENSORS
    assert pickle.loads(pickle.dumps(safe)) is safe
    writer = MPFsspecWriter(tmp_path / "x", num_workers=1, serialization_format=safe)
    save_with(pickle.loads(pickle.dumps(writer)), {"w": torch.arange(5.0)})
    assert [p.suffix for p in (tmp_path / "x").iterdir() if p.name[0] != "."] == [".safetensors"]
    assert_holds(tmp_path / "x", {"w": torch.arange(5.0)})
