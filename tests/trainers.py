"""Trainers that a test may kill, interrupt or limit: each a process of its own.

Importing torch takes seconds, so one host process does it once, and every trainer is a fork of it
that has used neither mpwriter nor a thread yet. A trainer runs Python source as its `__main__`
program, then ends as every interpreter ends: exit handlers, finalization, exit code.

    host = TrainerHost()                 (the session's: fixture `trainer_host`)
    trainer = host.start(SOURCE, "argument", env={...})
    trainer.wait_for("saved")            a line that it has printed
    trainer.ended()                      exit code; negative: a signal
    trainer.close()                      kills what is left of its tree

Trainers lead a process group of their own. Their output goes to files.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

__all__ = ["REPOSITORY", "Trainer", "TrainerHost", "all_gone", "wait_until"]

REPOSITORY = Path(__file__).parents[1]

# A hang is a failure; nothing here waits longer.
WATCHDOG_S = 50.0

_HOST = "from tests.trainers import _run, _serve; _run(_serve())"


class Trainer:
    """A running or ended trainer."""

    def __init__(self, host: TrainerHost, pid: int, folder: Path) -> None:
        self.pid = pid
        self._host = host
        self._folder = folder
        self._pidfd = os.pidfd_open(pid)
        self._exit_code: int | None = None

    @property
    def stdout(self) -> str:
        return (self._folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self._folder / "stderr").read_text()

    def wait_for(self, line: str) -> None:
        """Wait until the trainer has printed a line."""

        def said() -> bool:
            if line in self.stdout.splitlines():
                return True
            assert self._is_running() or line in self.stdout.splitlines(), self._story()
            return False

        wait_until(said, self._story)

    def workers(self) -> list[int]:
        """Process ids of its children."""
        return [child.pid for child in psutil.Process(self.pid).children()]

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def interrupt_group(self) -> None:
        """Ctrl-C at its terminal: the trainer and its workers get SIGINT."""
        os.killpg(self.pid, signal.SIGINT)

    def ended(self) -> int:
        """Wait for the end of the trainer; its exit code as subprocess gives it."""
        if self._exit_code is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            assert poll.poll(WATCHDOG_S * 1000), f"the trainer hangs\n{self._story()}"
            self._exit_code = self._host.reap(self.pid)
        return self._exit_code

    def assert_succeeded(self) -> None:
        assert self.ended() == 0, self._story()

    def close(self) -> None:
        if self._exit_code is None:
            # Its workers have to go with it: that is what other tests are about.
            left = tree(self.pid)
            self.kill()
            self.ended()
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        os.close(self._pidfd)

    def _is_running(self) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def _story(self) -> str:
        return f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


class TrainerHost:
    """The process with torch in it; starts trainers and reaps them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HOST],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=REPOSITORY,
        )
        self._num_started = 0

    def start(
        self,
        source: str,
        *args: Any,
        folder: Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Trainer:
        """Start a trainer.

        Args:
            source: its program; `sys.argv[1:]` are `args` as text.
            folder: for its output.
            env: on top of the environment of the tests.
        """
        folder = folder / f"trainer{self._num_started}"
        self._num_started += 1
        folder.mkdir(parents=True)
        for name in ("stdout", "stderr"):
            (folder / name).touch()
        request = {
            "source": textwrap.dedent(source),
            "args": [str(arg) for arg in args],
            "folder": str(folder),
            "cwd": str(cwd or folder),
            "env": dict(env or {}),
        }
        return Trainer(self, self._ask(request), folder)

    def reap(self, pid: int) -> int:
        return self._ask({"reap": pid})

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(WATCHDOG_S)

    def _ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def tree(pid: int) -> list[psutil.Process]:
    """A process and all below it, none where it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def all_gone(pids: list[int], *, within_s: float) -> bool:
    """Whether every process has ended in time (one that only waits to be reaped has)."""

    def running(pid: int) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
        return False

    end_s = time.monotonic() + within_s
    while any(running(pid) for pid in pids):
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


def wait_until(condition: Any, story: Any = lambda: "") -> None:
    """Wait for something that another process does; give up at the watchdog."""
    end_s = time.monotonic() + WATCHDOG_S
    while not condition():
        assert time.monotonic() < end_s, f"waited in vain\n{story()}"
        time.sleep(0.005)


# -- in the host --------------------------------------------------------------------------------


def _serve() -> dict[str, Any]:
    """Answer requests; returns, in the fork, what it is to run."""
    import torch.distributed.checkpoint  # noqa: F401

    import tests.fakes
    import tests.saves  # noqa: F401

    for request in _requests():
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            _answer(os.waitstatus_to_exitcode(status))
            continue
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            return request
        with contextlib.suppress(OSError):  # the fork was faster
            os.setpgid(pid, pid)
        _answer(pid)
    os._exit(0)


def _requests() -> Iterator[dict[str, Any]]:
    # Unbuffered: a fork must not inherit half a request.
    line = b""
    while chunk := os.read(0, 1):
        if chunk != b"\n":
            line += chunk
            continue
        yield json.loads(line)
        line = b""


def _answer(number: int) -> None:
    os.write(1, f"{number}\n".encode())


def _run(request: dict[str, Any]) -> None:
    """Become a trainer."""
    folder = Path(request["folder"])
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    for number, name in ((1, "stdout"), (2, "stderr")):
        fd = os.open(folder / name, os.O_WRONLY | os.O_APPEND)
        os.dup2(fd, number)
        os.close(fd)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.path[:] = [path or str(REPOSITORY) for path in sys.path]
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    sys.argv = ["trainer", *request["args"]]
    namespace = vars(sys.modules["__main__"])
    try:
        exec(compile(request["source"], "<trainer>", "exec"), namespace)
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
