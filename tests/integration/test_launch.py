"""Saving works however the trainer was started, and whatever it has set up before."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.witness import witnessed
from tests.saves import assert_holds, names_in, save, small_state, worker_pids
from tests.trainers import REPOSITORY, WATCHDOG_S, Trainer, TrainerHost

# Four interpreters import torch at the same time.
_LAUNCH_WATCHDOG_S = 150.0

# Not guarded by `if __name__ == "__main__"`.
_PROGRAM = """
import json, multiprocessing, os, sys
import {module}
from tests.saves import save, small_state, worker_pids

trainer_global = 1
url, method = sys.argv[1:3]
with open("runs", "a") as runs:
    runs.write("run\\n")
if method:
    multiprocessing.set_start_method(method)
writer = save(url, small_state(5), folder="witness")
print(json.dumps({{
    "method": multiprocessing.get_start_method(allow_none=True),
    "children": worker_pids(),
    "num_workers": writer.last_report.num_workers,
    "sys_path": [path or os.getcwd() for path in sys.path],
}}))
"""

_BESIDE = """
import fsspec
from tests.fakes.witness import WitnessFileSystem

class ShelfFileSystem(WitnessFileSystem):
    protocol = "shelf"

fsspec.register_implementation("shelf", ShelfFileSystem, clobber=True)
"""

# Whoever imports it is found out: by the line, and because it ends there.
_TRAP = """
import os
os.write(os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND), b"{name}\\n")
os._exit(9)
"""
_TRAPPED = ("json", "pickle", "random", "socket", "select", "signal", "subprocess", "torch")


class Launch:
    """One way to start a trainer, under way."""

    def __init__(self, kind: str, base: Path, method: str, tmpdir: str | None) -> None:
        self.kind, self.method = kind, method
        self.cwd = base / "cwd"
        self.target = base / "checkpoint"
        for folder in (self.cwd / "witness", base / "elsewhere"):
            folder.mkdir(parents=True)
        # The module is importable only by the trainer's own sys.path.
        beside = base / "elsewhere" if kind == "script" else self.cwd
        (beside / "shelf.py").write_text(_BESIDE)
        program = _PROGRAM.format(module="shelf")
        stdin = ""
        if kind == "script":
            (beside / "program.py").write_text(program)
            start = [str(beside / "program.py")]
            self._set_traps()
        elif kind == "module":
            (self.cwd / "package").mkdir()
            (self.cwd / "package" / "__init__.py").touch()
            (self.cwd / "package" / "__main__.py").write_text(program)
            start = ["-m", "package"]
        elif kind == "command":
            start = ["-c", program]
        else:
            start, stdin = ["-"], program
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        environment.pop("TMPDIR", None)
        if tmpdir is not None:
            environment["TMPDIR"] = tmpdir
        self.process = subprocess.Popen(
            [sys.executable, *start, f"shelf://{self.target}", method],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.cwd,
            env=environment,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(stdin)
        self.process.stdin.close()
        self.process.stdin = None

    def _set_traps(self) -> None:
        for name in _TRAPPED:
            trap = _TRAP.format(log=str(self.cwd / "sprung"), name=name)
            (self.cwd / f"{name}.py").write_text(trap)

    @functools.cached_property
    def result(self) -> dict[str, Any]:
        stdout, stderr = self.process.communicate(timeout=_LAUNCH_WATCHDOG_S)
        assert self.process.returncode == 0, stderr
        assert "Traceback" not in stderr, stderr
        found: dict[str, Any] = json.loads(stdout.splitlines()[-1])
        return found


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Launch]]:
    """Started together: most of their time is the import of torch."""
    base = tmp_path_factory.mktemp("launch")
    long = base / ("t" * (119 - len(str(base))) if len(str(base)) < 118 else "t" * 60)
    long.mkdir()
    wanted = [
        ("script", "spawn", str(long)),
        ("stdin", "forkserver", str(base / "missing")),
        ("command", "fork", None),
        ("module", "", str(base / "missing" / "too")),
    ]
    started = {kind: Launch(kind, base / kind, method, tmpdir) for kind, method, tmpdir in wanted}
    yield started
    for launch in started.values():
        launch.process.kill()
        launch.process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["script", "stdin", "command", "module"])
def test_save_uses_workers_when_launched_as(kind: str, launches: dict[str, Launch]) -> None:
    """C05: the program runs once and has two children. C08: its start method stays.

    With a TMPDIR of 120 characters, a missing one and none.
    """
    launch = launches[kind]
    result = launch.result
    assert result["num_workers"] == 2
    assert (launch.cwd / "runs").read_text() == "run\n"
    assert result["method"] == (launch.method or None)
    assert_holds(launch.target, small_state(5))
    seen = witnessed(launch.cwd / "witness")
    assert [facts["pid"] for facts in seen] == result["children"]
    for facts in seen:
        assert facts["parent"] == launch.process.pid
        assert facts["sys_path"] == result["sys_path"]
        assert "trainer_global" not in facts["main"] and "__file__" not in facts["main"]
        assert "torch" not in facts["modules"]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_workers_import_nothing_from_the_cwd_when_the_trainer_is_a_script_elsewhere(
    launches: dict[str, Launch],
) -> None:
    launch = launches["script"]
    assert (launch.cwd / "json.py").exists()
    assert launch.result["num_workers"] == 2
    assert not (launch.cwd / "sprung").exists()


_NOTEBOOK = """
import sys, types
kernel = sys.modules["__main__"]
cells = types.ModuleType("__main__")
sys.modules["__main__"] = cells
assert not hasattr(cells, "__file__")
for source in (
    "from tests.saves import *",
    "state = small_state(6)",
    f"writer = save({sys.argv[1]!r}, state)",
    "assert writer.last_report.num_workers == 2",
):
    exec(compile(source, "<cell>", "exec"), vars(cells))
"""


def test_save_uses_workers_when_run_in_a_notebook(
    start_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    trainer = start_trainer(_NOTEBOOK, tmp_path / "checkpoint")
    trainer.assert_succeeded()
    assert_holds(tmp_path / "checkpoint", small_state(6))


_IN_CHILD = """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
from tests.saves import assert_holds, save_and_count, small_state
if __name__ == "__main__":
    path, method, daemonic, pool = sys.argv[1:]
    multiprocessing.set_start_method(method)
    if daemonic == "yes":
        process = multiprocessing.Process(
            target=save_and_count, args=(path + "/daemonic", 1, path + "/count"), daemon=True
        )
        process.start()
        process.join()
        assert process.exitcode == 0, process.exitcode
        assert open(path + "/count").read() == "2"
    if pool == "yes":
        with ProcessPoolExecutor(1) as executor:
            assert executor.submit(save_and_count, path + "/pool", 2).result() == 2
    assert save_and_count(path + "/own", 3) == 2
    assert multiprocessing.get_start_method() == method
"""


# Each but a fork imports torch, which takes seconds.
_KINDS_OF_CHILDREN = {
    "fork": ("daemonic", "pool"),
    "spawn": ("pool",),
    "forkserver": ("daemonic",),
}


@pytest.fixture(scope="module")
def in_children(
    trainer_host: TrainerHost, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, dict[str, Trainer]]]:
    base = tmp_path_factory.mktemp("children")
    started = {}
    for method, kinds in _KINDS_OF_CHILDREN.items():
        (base / method).mkdir()
        asked = ["yes" if kind in kinds else "no" for kind in ("daemonic", "pool")]
        started[method] = trainer_host.start(
            _IN_CHILD, base / method, method, *asked, folder=base / "output"
        )
    yield base, started
    for trainer in started.values():
        trainer.close()


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("method", list(_KINDS_OF_CHILDREN))
def test_save_uses_workers_when_run_in_a_child_process(
    method: str, in_children: tuple[Path, dict[str, Trainer]]
) -> None:
    """C08: a daemonic process, a pool's worker and the trainer itself, by each start method."""
    base, started = in_children
    started[method].assert_succeeded()
    for number, name in enumerate(("daemonic", "pool", "own"), start=1):
        if name in (*_KINDS_OF_CHILDREN[method], "own"):
            assert_holds(base / method / name, small_state(number))


def test_save_uses_workers_when_run_in_a_thread(tmp_path: Path) -> None:
    used: list[int] = []

    def run() -> None:
        report = save(tmp_path / "checkpoint", small_state(7)).last_report
        assert report is not None
        used.append(report.num_workers)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(WATCHDOG_S)
    assert used == [2]
    # They outlive the thread that started them.
    kept = worker_pids()
    assert len(kept) == 2
    save(tmp_path / "next", small_state(8))
    assert worker_pids() == kept
    assert_holds(tmp_path / "checkpoint", small_state(7))


def test_save_uses_workers_when_run_by_asyncio(tmp_path: Path) -> None:
    async def train() -> list[int]:
        inside = save(tmp_path / "inside", small_state(1))
        aside = await asyncio.to_thread(save, tmp_path / "aside", small_state(2))
        both = await asyncio.gather(
            asyncio.to_thread(save, tmp_path / "third", small_state(3)),
            asyncio.to_thread(save, tmp_path / "fourth", small_state(4)),
        )
        reports = [writer.last_report for writer in (inside, aside, *both)]
        return [report.num_workers for report in reports if report is not None]

    used = asyncio.run(train())
    assert used[:2] == [2, 2]
    assert len(used) == 4 and all(used)
    for number, name in enumerate(("inside", "aside", "third", "fourth"), start=1):
        assert_holds(tmp_path / name, small_state(number))
        assert len(names_in(tmp_path / name)) == 3
