"""A rank of the soak, as the process that started it sees it; and what it may find wrong."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

__all__ = ["RankProcess", "ViolationError"]

_END_WATCHDOG_S = 60.0


class ViolationError(Exception):
    """Something was lost, hung or was left behind; `kind` is a line of the table."""

    def __init__(self, kind: str, story: str) -> None:
        super().__init__(story)
        self.kind = kind


class RankProcess:
    """A rank, from outside."""

    def __init__(self, rank: int, seed: int, folder: Path) -> None:
        self.log = folder / f"rank{rank}.log"
        self.workers: set[int] = set()
        script = Path(__file__).with_name("soak_rank.py")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(script), str(rank), str(seed), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            )

    def ask(self, number: int) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: told when it does not answer
            self.process.stdin.write(f"{number}\n")

    def answer(self, within_s: float) -> dict[str, Any] | None:
        """What it says; None where it says nothing in time, or never will."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], max(0.0, within_s))[0]:
            return None
        line = self.process.stdout.readline()
        return json.loads(line) if line.endswith("\n") else None

    def end(self) -> None:
        """Let it end.

        Raises:
            ViolationError: it does not, or leaves workers.
        """
        try:
            status = self.process.wait(_END_WATCHDOG_S)
        except subprocess.TimeoutExpired:
            raise ViolationError("hangs", f"a rank does not end\n{self.tail()}") from None
        if status:
            raise ViolationError("unexpected failures", f"a rank ended with {status}{self.tail()}")
        left = [pid for pid in self.workers if psutil.pid_exists(pid)]
        if left:
            raise ViolationError("leaks", f"workers {left} have outlived their rank")

    def close_input(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"--- {self.log.name}", *lines[-60:]])
