"""Filesystems that lack something, and what is written in the trainer for that."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import fsspec
import pytest

from mpwriter import _filesystems, _save
from tests.fakes import FaultFileSystem, FaultPlan
from tests.fakes.owned import OwnedFileSystem
from tests.saves import assert_holds, save, small_state
from tests.trainers import Trainer


@pytest.fixture
def trainer_warnings(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[str]]:
    """Warnings of this package, as if nothing had been warned of before."""
    monkeypatch.setattr(_save, "_warned", set())
    monkeypatch.setattr(_filesystems, "_warned", set())
    caplog.set_level(logging.WARNING, logger="mpwriter")
    return lambda: [
        record.getMessage() for record in caplog.records if record.name.startswith("mpwriter")
    ]


@pytest.fixture
def memory() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "plan")


@pytest.mark.parametrize(
    "options",
    [
        {"bytes_only": True},
        {"returns_none": True},
        {"fileno": False},
        {"bytes_only": True, "fileno": False},
    ],
)
def test_save_writes_to_files_that_take_less(
    checkpoint_dir: Path, plan: FaultPlan, options: dict[str, bool]
) -> None:
    """Files that refuse a memoryview, that say nothing of how much they took, without a number."""
    state = small_state(3, num_tensors=6, numel=100_000)
    writer = save(f"fault://{checkpoint_dir}", state, **options, **plan.options)
    assert writer.last_report is not None and writer.last_report.num_workers == 2
    assert_holds(checkpoint_dir, state)


def test_save_warns_once_when_a_filesystem_cannot_rename(
    checkpoint_dir: Path, trainer_warnings: Callable[[], list[str]]
) -> None:
    """Files are copied to their names; a crash in between can lose `.metadata`."""
    for number in range(3):
        save(f"objectlike://{checkpoint_dir}/{number % 2}", small_state(number))
    assert_holds(checkpoint_dir / "0", small_state(2))
    (warning,) = trainer_warnings()
    assert "objectlike://" in warning and "atomic" in warning


@pytest.mark.parametrize("protocol", ["file", "fault", "commitlike", "closelike"])
def test_save_does_not_warn_when_files_appear_at_once(
    checkpoint_dir: Path, trainer_warnings: Callable[[], list[str]], protocol: str
) -> None:
    """A local disk, and stores that show nothing before it is complete."""
    save(f"{protocol}://{checkpoint_dir}", small_state(1))
    assert trainer_warnings() == []


def test_save_writes_to_memory_in_the_trainer_with_one_warning(
    memory: Any, trainer_warnings: Callable[[], list[str]]
) -> None:
    """Invariant 9: another process would have a memory of its own."""
    for number in range(3):
        writer = save(f"memory://place/{number % 2}", small_state(number))
        assert writer.last_report is not None and writer.last_report.num_workers == 0
    assert_holds("memory://place/0", small_state(2))
    assert_holds("memory://place/1", small_state(1))
    (warning,) = trainer_warnings()
    assert "memory://" in warning
    names = [name.rsplit("/", 1)[1] for name in memory.ls("/place/0", detail=False)]
    assert len(names) == 3, "the shards of the first save are gone, no temporary file is left"


def test_save_writes_in_the_trainer_when_a_filesystem_cannot_be_pickled(
    checkpoint_dir: Path, trainer_warnings: Callable[[], list[str]]
) -> None:
    """Invariant 9: an option of it is a lock."""
    for number in range(2):
        writer = save(f"fault://{checkpoint_dir}", small_state(number), guard=threading.Lock())
        assert writer.last_report is not None and writer.last_report.num_workers == 0
    assert_holds(checkpoint_dir, small_state(1))
    (warning,) = trainer_warnings()
    assert "pickle" in warning and "fault" in warning


def test_save_writes_in_the_trainer_when_a_worker_cannot_import_the_filesystem(
    checkpoint_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trainer_warnings: Callable[[], list[str]],
) -> None:
    """Invariant 9: its module is found by the trainer alone."""
    module = ModuleType("only_in_this_process")
    kind = type("HomeMadeFileSystem", (FaultFileSystem,), {"protocol": "homemade"})
    kind.__module__ = module.__name__
    module.HomeMadeFileSystem = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    fsspec.register_implementation("homemade", kind, clobber=True)
    for number in range(2):
        writer = save(f"homemade://{checkpoint_dir}", small_state(number))
        assert writer.last_report is not None and writer.last_report.num_workers == 0
    assert_holds(checkpoint_dir, small_state(1))
    (warning,) = trainer_warnings()
    assert "only_in_this_process" in warning


_FROM_MAIN = """
import os, sys, fsspec
from fsspec.implementations.local import LocalFileSystem
from tests.saves import *

class MainFileSystem(LocalFileSystem):
    protocol = "inmain"
    opened = set()
    def _open(self, path, mode="rb", **kwargs):
        if "w" in mode:
            self.opened.add(os.getpid())
        return super()._open(path, mode, **kwargs)

fsspec.register_implementation("inmain", MainFileSystem)
for number in range(3):
    writer = save(f"inmain://{sys.argv[1]}", small_state(number))
    assert writer.last_report.num_workers == 0
assert MainFileSystem.opened == {os.getpid()}
assert worker_pids() == []
"""


def test_save_writes_in_the_trainer_when_the_filesystem_is_in_main(
    start_trainer: Callable[..., Trainer], checkpoint_dir: Path
) -> None:
    """Invariant 9: workers never import the user's `__main__`; one warning says so."""
    trainer = start_trainer(_FROM_MAIN, checkpoint_dir)
    trainer.assert_succeeded()
    assert_holds(checkpoint_dir, small_state(2))
    assert trainer.stderr.count("__main__") == 1
    assert trainer.stderr.count("written in the trainer") == 1


def test_an_instance_of_a_filesystem_belongs_to_one_thread(tmp_path: Path) -> None:
    """F07: an SFTP client freezes when several threads use it."""
    log = tmp_path / "owners"
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            for attempt in range(2):
                state = small_state(number + attempt)
                place = f"owned://{tmp_path}/{number}"
                writer = save(place, state, num_workers=2, log=str(log))
                assert writer.last_report is not None and writer.last_report.num_workers
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(10 * number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for number in range(2):
        assert_holds(tmp_path / str(10 * number), small_state(10 * number + 1))
    owners = log.read_text().split()
    assert str(os.getpid()) in owners and len(set(owners)) >= 2
    OwnedFileSystem.clear_instance_cache()
