"""Loads to an accelerator, on a stand-in whose copies land when their event is waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import ReadItem

from mpwriter import FsspecReader, MPFsspecWriter, _fetch_landing, _fetch_source
from mpwriter._arena import Arena, get_arena
from mpwriter._fetch_ahead import Ahead, _Wanted
from mpwriter._fetch_source import _LocalSource
from mpwriter.errors import CorruptCheckpointError, StorageError
from tests.asyncs import leased_bytes
from tests.saves import failure_of
from tests.states import assert_same, blank, load_into, save_with
from tests.unit.test_fetch import flip
from tests.unit.test_staging import _LateEvent, _LateStream

MIB = 1 << 20


@pytest.fixture
def state() -> dict[str, Any]:
    return {
        **{f"large{n}": torch.randn(MIB // 2 + n) for n in range(6)},
        "half": torch.randn(MIB, 2).to(torch.bfloat16),
        "complex": torch.complex(torch.randn(MIB // 4), torch.ones(MIB // 4)),
        **{f"small{n}": torch.randn(n + 1, 7) for n in range(50)},
        "note": {"step": 3},
    }


@pytest.fixture
def saved(checkpoint_dir: Path, state: dict[str, Any]) -> Path:
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=2, sync_files=False), state)
    return checkpoint_dir


class _Streams:
    """All that loads have made; large targets are on the accelerator, small ones too."""

    def __init__(self) -> None:
        self.made: list[_LateStream] = []

    def __call__(self) -> Any:
        self.made.append(_LateStream())
        return lambda tensor: self.made[-1]

    @property
    def num_landed(self) -> int:
        return sum(stream.landed for stream in self.made)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> _Streams:
    """The CPU, treated as a device with streams."""
    found = _Streams()
    monkeypatch.setattr(_fetch_landing, "accelerator_stream", found)
    return found


@pytest.mark.parametrize("verify", [True, False])
def test_load_lands_large_payloads_on_a_stream_when_targets_are_on_an_accelerator(
    verify: bool, saved: Path, state: dict[str, Any], streams: _Streams
) -> None:
    assert_same(load_into(blank(state), FsspecReader(saved, verify=verify)), state)
    assert streams.num_landed == 8
    assert leased_bytes() == 0


def test_load_lands_what_a_store_has_sent_in_parts(
    saved: Path, state: dict[str, Any], streams: _Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_fetch_source, "PART_BYTES", MIB // 4)
    reader = FsspecReader(f"asynclike://{saved}", num_workers=1)
    assert_same(load_into(blank(state), reader), state)
    assert streams.num_landed == 8
    assert leased_bytes() == 0


def test_load_shows_a_missing_wait_as_wrong_values(
    saved: Path, state: dict[str, Any], streams: _Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in is worth its name."""
    monkeypatch.setattr(_LateEvent, "synchronize", lambda event: None)
    loaded = load_into(blank(state), FsspecReader(saved))
    assert not torch.equal(loaded["large0"], state["large0"])


class _Witness(DefaultLoadPlanner):
    """Keeps what was in a target when it was committed."""

    def __init__(self) -> None:
        super().__init__()
        self.committed: dict[str, torch.Tensor] = {}

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed[read_item.dest_index.fqn] = tensor.detach().clone()


def test_planner_is_told_of_a_tensor_when_its_values_are_there(
    saved: Path, state: dict[str, Any], streams: _Streams
) -> None:
    planner = _Witness()
    load_into(blank(state), FsspecReader(saved), planner=planner)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    assert_same(planner.committed, tensors)


def test_load_leaves_the_target_as_it_was_when_its_payload_is_damaged(
    saved: Path, state: dict[str, Any], streams: _Streams
) -> None:
    """A08: what is wrong with it is known before it is copied."""
    metadata = FsspecReader(saved).read_metadata()
    (info,) = [i for index, i in metadata.storage_data.items() if index.fqn == "half"]
    flip(saved / info.relative_path, info.offset + info.length // 2)
    target = torch.zeros_like(state["half"])
    with pytest.raises(CheckpointException) as caught:
        load_into({"half": target}, FsspecReader(saved))
    error = failure_of(caught.value)
    assert isinstance(error, CorruptCheckpointError) and error.key == "half"
    assert not target.any()
    assert leased_bytes() == 0


def test_load_gives_its_memory_back_when_a_read_fails(
    saved: Path, state: dict[str, Any], streams: _Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    def fail_later(source: _LocalSource, offset: int, view: memoryview) -> int:
        reads.append(offset)
        if len(reads) > 3:
            raise OSError(5, "the disk is broken")
        return real(source, offset, view)

    real = _LocalSource.read_into
    monkeypatch.setattr(_LocalSource, "read_into", fail_later)
    with pytest.raises(CheckpointException) as caught:
        load_into(blank(state), FsspecReader(saved, retries=0))
    assert isinstance(failure_of(caught.value), StorageError)
    assert leased_bytes() == 0


def test_load_goes_another_way_when_there_is_no_memory_to_land_on(
    saved: Path, state: dict[str, Any], streams: _Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Arena(budget_bytes=64 << 10)
    monkeypatch.setattr(_fetch_landing, "get_arena", lambda: small)
    assert_same(load_into(blank(state), FsspecReader(saved)), state)
    assert streams.num_landed == 0


def test_load_names_the_key_when_a_copy_fails(
    saved: Path, state: dict[str, Any], streams: _Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(_LateStream, "copy", fail)
    with pytest.raises(CheckpointException) as caught:
        load_into({"half": torch.zeros_like(state["half"])}, FsspecReader(saved))
    error = failure_of(caught.value)
    assert "device-side assert" in str(error)
    assert any("'half'" in note for note in getattr(error, "__notes__", ["'half'"]))
    assert leased_bytes() == 0


def test_load_touches_no_accelerator_when_every_target_is_on_the_cpu(
    saved: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("an accelerator's runtime was asked for")

    monkeypatch.setattr(torch, "get_device_module", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", refuse)
    before = get_arena().stats().claimed_bytes
    assert_same(load_into(blank(state), FsspecReader(saved)), state)
    assert get_arena().stats().claimed_bytes == before


@pytest.mark.parametrize(("on_device", "at_once"), [(False, True), (True, False)])
def test_load_bounds_what_is_read_ahead_beside_the_targets_only(
    on_device: bool,
    at_once: bool,
    saved: Path,
    state: dict[str, Any],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large payloads for CPU targets need no memory, and are read side by side whatever their size;
    those for an accelerator do."""
    if on_device:
        request.getfixturevalue("streams")
    monkeypatch.setattr("mpwriter._fetch_ahead._MAX_AHEAD_BYTES", MIB)
    most = [0]
    real = Ahead._begin

    def begin(ahead: Ahead, wanted: _Wanted) -> None:
        real(ahead, wanted)
        most[0] = max(most[0], len(ahead._readings))

    monkeypatch.setattr(Ahead, "_begin", begin)
    large = {name: value for name, value in state.items() if name.startswith("large")}
    assert_same(load_into(blank(large), FsspecReader(saved, num_workers=2)), large)
    assert (most[0] > 1) == at_once
