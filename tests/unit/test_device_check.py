"""The checks of scripts/device_check.py, on a stand-in for the device.

Its copies land late, and its driver refuses to lock pages twice, as CUDA does. Each check holds
with it, and fails where mpwriter is made to do the wrong thing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mpwriter import _fetch_landing, _save, _state_staging, _writer
from mpwriter._compat import HAS_ASYNC_STAGING
from mpwriter._segment import Segment
from mpwriter._state_staging import StateStaging
from mpwriter._streams import CopyStream, StreamFactory
from mpwriter.bench import device_checks
from mpwriter.bench.device_checks import (
    check_all,
    check_copies,
    check_loads,
    check_saves,
    check_streams,
)
from mpwriter.bench.device_locks import PinLog, check_locks
from mpwriter.bench.device_rig import Result, Rig, checked, make_state, map_tensors, results_table
from tests.unit.test_staging import _LateEvent, _LateStream

REPOSITORY = Path(__file__).resolve().parents[2]


def late_streams() -> StreamFactory:
    """A save's own stream, whose copies land when their event is waited for."""
    stream: CopyStream = _LateStream()
    return lambda tensor: stream


class Driver:
    """Locks pages as CUDA does: a second time is error 712."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.refused: list[int] = []

    def register(self, address: int, nbytes: int) -> bool:
        if address in self.locked:
            self.refused.append(712)
            return False
        self.locked[address] = nbytes
        return True

    def unregister(self, address: int) -> None:
        del self.locked[address]


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    assert driver.locked == {}


@pytest.fixture
def rig(tmp_path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """The CPU, treated as a device with streams."""
    for module in (_save, _fetch_landing):
        monkeypatch.setattr(module, "accelerator_stream", late_streams)
    monkeypatch.setattr(
        _writer, "StateStaging", lambda **options: StateStaging(late_streams(), **options)
    )
    return Rig(
        "cpu", tmp_path, 1 << 20, late_streams, driver,
        plain_memory=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8),
    )  # fmt: skip


def failed(results: list[Result]) -> list[str]:
    return [result.check for result in results if not result.held]


@pytest.mark.parametrize(
    "check", [check_copies, check_saves, check_loads, check_streams, check_locks]
)
def test_checks_hold_with_the_stand_in(check: Callable[[Rig], list[Result]], rig: Rig) -> None:
    """D11 and the accelerator paths, as far as they can be held without a GPU."""
    results = check(rig)
    assert results
    assert failed(results) == []


def test_table_shows_all_checks(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("check_copies", "check_saves", "check_loads", "check_streams"):
        monkeypatch.setattr(device_checks, name, lambda rig, name=name: [Result(name, False, "x")])
    monkeypatch.setattr(device_checks, "check_locks", lambda rig: [Result("locks", True)])
    lines = results_table(check_all(rig)).splitlines()
    assert [line.split() for line in lines[2:]] == [
        ["check_copies", "FAILED", "x"],
        ["check_saves", "FAILED", "x"],
        ["check_loads", "FAILED", "x"],
        ["check_streams", "FAILED", "x"],
        ["locks", "held"],
    ]


def test_save_checks_fail_when_nobody_waits_for_the_copies(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_state_staging, "_settle", lambda recorded: None)
    overlapped = ["save with overlapped staging"] if HAS_ASYNC_STAGING else []
    assert failed(check_saves(rig)) == ["save in the background", *overlapped]


def test_load_checks_fail_when_nobody_waits_for_the_copies(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_LateEvent, "synchronize", lambda event: None)
    rig.nbytes = 32 << 20
    assert failed(check_loads(rig)) == ["load of a state of many kinds", "load of large tensors"]


def test_lock_checks_fail_when_pages_are_locked_twice(
    rig: Rig, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pin(segment: Segment, pinner: PinLog) -> bool:
        once(segment, pinner)
        return bool(pinner.register(segment.address, segment.nbytes))

    once: Any = Segment.pin
    monkeypatch.setattr(Segment, "pin", pin)
    assert failed(check_locks(rig)) == ["page-locked once", "no lock refused (error 712)"]
    assert set(driver.refused) == {712}


def test_lock_checks_fail_when_nothing_is_locked(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Segment, "pin", lambda segment, pinner: False)
    assert failed(check_locks(rig)) == ["page-locked once"]


def test_checked_turns_an_error_into_a_result() -> None:
    def fail() -> str:
        raise ValueError("first\nsecond")

    assert checked("it", fail) == Result("it", False, "ValueError: first")
    assert checked("it", lambda: "fine") == Result("it", True, "fine")


def test_states_differ_between_seeds() -> None:
    one, other = make_state("cpu", 0), make_state("cpu", 1)
    assert not torch.equal(one["model"]["float32"], other["model"]["float32"])
    shapes = map_tensors(one, lambda tensor: tensor.shape)
    assert shapes["model"]["empty"] == (0, 256, 1024)
    assert shapes["name"] == "state 0"


def load_script() -> ModuleType:
    path = REPOSITORY / "scripts" / "device_check.py"
    spec = importlib.util.spec_from_file_location("device_check", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_script_says_so_when_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_script().main([]) == 0
    assert "No GPU here" in capsys.readouterr().out
