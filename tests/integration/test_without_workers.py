"""Where workers cannot serve, the trainer writes, and says so once."""

from __future__ import annotations

import errno
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

import mpwriter
from mpwriter import _save
from mpwriter.errors import StorageError
from tests.fakes import FaultPlan
from tests.saves import assert_holds, failure_in_save, names_in, save, small_state, worker_pids
from tests.trainers import Trainer


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No workers and no warnings of earlier tests; none of the failed starts for later ones."""
    mpwriter.shutdown()
    monkeypatch.setattr(_save, "_warned", set())
    yield
    monkeypatch.undo()


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, logger="mpwriter")
    return lambda: [
        record.getMessage() for record in caplog.records if record.name.startswith("mpwriter")
    ]


def assert_written_here(target: Path) -> None:
    """Two saves work, without workers."""
    for number in range(2):
        report = save(target, small_state(number)).last_report
        assert report is not None
        assert report.num_workers == 0 and report.files == 2
        assert [worker.worker for worker in report.workers] == [None]
        assert_holds(target, small_state(number))
    assert len(names_in(target)) == 3
    assert worker_pids() == []


@pytest.mark.parametrize(
    ("executable", "text"),
    [("", "sys.executable"), ("/no/such/python", "No such file")],
)
def test_trainer_writes_when_there_is_no_interpreter(
    executable: str,
    text: str,
    checkpoint_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    warnings_of: Callable[[], list[str]],
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    assert_written_here(checkpoint_dir)
    (warning,) = warnings_of()
    assert "written in the trainer" in warning and text in warning


@pytest.mark.parametrize("program", ["exit 3", "exec sleep 0"])
def test_trainer_writes_when_workers_end_before_they_are_at_work(
    program: str,
    tmp_path: Path,
    checkpoint_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    warnings_of: Callable[[], list[str]],
) -> None:
    """An interpreter that is none; its exit code is named."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert_written_here(checkpoint_dir)
    (warning,) = warnings_of()
    assert f"exit code {3 if '3' in program else 0}" in warning


def test_workers_serve_again_when_they_can_start_again(
    checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "")
        save(checkpoint_dir, small_state(1))
    report = save(checkpoint_dir, small_state(2)).last_report
    assert report is not None and report.num_workers == 2
    assert_holds(checkpoint_dir, small_state(2))


def test_trainer_writes_when_memfd_is_forbidden(
    checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch, warnings_of: Callable[[], list[str]]
) -> None:
    """As a container's seccomp profile does."""

    def forbidden(*args: Any) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    assert_written_here(checkpoint_dir)
    (warning,) = warnings_of()
    assert "memfd" in warning and "not permitted" in warning


def test_trainer_writes_when_there_is_no_memfd(
    checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch, warnings_of: Callable[[], list[str]]
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert_written_here(checkpoint_dir)
    (warning,) = warnings_of()
    assert "memfd" in warning


_IS_LIMITED = """
import ctypes, os, resource, sys
from tests.saves import *
libc = ctypes.CDLL(None, use_errno=True)
if os.geteuid() == 0:
    # Root has no such limit. The other user keeps the right to reach every file.
    PR_SET_KEEPCAPS, CAP_DAC_OVERRIDE = 8, 1 << 1
    libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setresuid(65534, 65534, 65534)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    assert libc.capset(header, (ctypes.c_uint32 * 6)(CAP_DAC_OVERRIDE, CAP_DAC_OVERRIDE)) == 0
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
for number in range(2):
    report = save(sys.argv[1], small_state(number)).last_report
    assert report.num_workers == 0 and report.files == 2
"""


def test_trainer_writes_when_it_may_start_no_more_processes(
    start_trainer: Callable[..., Trainer], checkpoint_dir: Path
) -> None:
    trainer = start_trainer(_IS_LIMITED, checkpoint_dir)
    trainer.assert_succeeded()
    (warning,) = trainer.stderr.splitlines()
    assert "written in the trainer" in warning and "temporarily unavailable" in warning
    assert_holds(checkpoint_dir, small_state(1))


class HomelessFileSystem(LocalFileSystem):
    """Its module exists in this process only."""

    protocol = "homeless"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        path = path.removeprefix("homeless://") if isinstance(path, str) else path
        return super()._strip_protocol(path)


def test_trainer_writes_when_a_worker_cannot_import_the_filesystem(
    checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch, warnings_of: Callable[[], list[str]]
) -> None:
    """Known only when a worker has tried."""
    nowhere = types.ModuleType("made_up_on_the_way")
    nowhere.HomelessFileSystem = HomelessFileSystem  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, nowhere.__name__, nowhere)
    monkeypatch.setattr(HomelessFileSystem, "__module__", nowhere.__name__)
    fsspec.register_implementation("homeless", HomelessFileSystem, clobber=True)
    for number in range(2):
        report = save(f"homeless://{checkpoint_dir}", small_state(number)).last_report
        assert report is not None and report.num_workers == 0 and report.files == 2
        assert_holds(checkpoint_dir, small_state(number))
    (warning,) = warnings_of()
    assert "made_up_on_the_way" in warning
    assert len(names_in(checkpoint_dir)) == 3
    # The workers are none the worse for it.
    assert len(worker_pids()) == 2
    report = save(checkpoint_dir, small_state(3)).last_report
    assert report is not None and report.num_workers == 2


_NOTEBOOK = """
import sys
import fsspec
from fsspec.implementations.local import LocalFileSystem
from tests.saves import *

class CellFileSystem(LocalFileSystem):
    protocol = "cell"

    @classmethod
    def _strip_protocol(cls, path):
        path = path.removeprefix("cell://") if isinstance(path, str) else path
        return super()._strip_protocol(path)

fsspec.register_implementation("cell", CellFileSystem)
for number in range(2):
    report = save("cell://" + sys.argv[1], small_state(number)).last_report
    assert report.num_workers == 0 and worker_pids() == []
"""


def test_trainer_writes_when_the_filesystem_is_defined_in_a_notebook(
    start_trainer: Callable[..., Trainer], checkpoint_dir: Path
) -> None:
    """A worker never imports __main__."""
    trainer = start_trainer(_NOTEBOOK, checkpoint_dir)
    trainer.assert_succeeded()
    (warning,) = trainer.stderr.splitlines()
    assert "CellFileSystem" in warning and "__main__" in warning
    assert_holds(checkpoint_dir, small_state(1))


@pytest.mark.parametrize("op", ["open", "write", "mv"])
@pytest.mark.parametrize("error", ["AttributeError", "ImportError", "MemoryError"])
def test_save_raises_when_the_filesystem_has_a_fault_of_its_own(
    error: str, op: str, tmp_path: Path, checkpoint_dir: Path
) -> None:
    """Not taken for a filesystem that cannot be had: it would fail in the trainer for ever."""
    plan = FaultPlan(tmp_path / "plan")
    plan.add(op, "__0_*", raises=error)
    failure = failure_in_save(f"fault://{checkpoint_dir}", small_state(1), **plan.options)
    assert isinstance(failure, StorageError)
    assert failure.original_type is not None and error in failure.original_type
    assert failure.worker is not None
    assert names_in(checkpoint_dir) == []


def test_save_raises_when_the_filesystem_has_a_fault_in_the_trainer(
    tmp_path: Path, checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "")
    plan = FaultPlan(tmp_path / "plan")
    plan.add("open", "__0_1.*", raises="AttributeError")
    failure = failure_in_save(f"fault://{checkpoint_dir}", small_state(1), **plan.options)
    assert isinstance(failure, StorageError) and failure.worker is None
    assert names_in(checkpoint_dir) == []


def test_save_goes_on_with_fewer_workers_when_no_more_can_start(
    checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch, warnings_of: Callable[[], list[str]]
) -> None:
    mpwriter.warm_up(1)
    monkeypatch.setattr(sys, "executable", "")
    report = save(checkpoint_dir, small_state(1)).last_report
    assert report is not None and report.num_workers == 1 and report.files == 2
    assert warnings_of() == []
    assert_holds(checkpoint_dir, small_state(1))
