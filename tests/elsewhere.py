"""Another process that saves to the same stores as this one, for many tests.

    elsewhere = OtherProcess()
    elsewhere.run(save_small, url, options, 1)      a function of a module, and what JSON can hold

Importing torch takes seconds, so one process serves all tests. It keeps its workers and
filesystems, with all that these remember.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

from tests.trainers import REPOSITORY, WATCHDOG_S

__all__ = ["OtherProcess"]

_SERVE = "from tests.elsewhere import _serve; _serve()"


class OtherProcess:
    """The process; starts at once, for one thread at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=REPOSITORY,
        )

    def run(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function there.

        Raises:
            AssertionError: it raised, or the process has died.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        call = {
            "module": function.__module__,
            "name": function.__name__,
            "args": args,
            # A server of the tests may have said there how clients are to talk to it.
            "environment": dict(os.environ),
        }
        self._process.stdin.write(json.dumps(call) + "\n")
        answer = self._process.stdout.readline()
        assert answer, "the other process has died"
        story = json.loads(answer)
        assert not story, story

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(WATCHDOG_S)
        finally:
            self._process.kill()
            self._process.wait()


def _serve() -> None:
    import mpwriter

    answers = os.dup(1)
    os.dup2(2, 1)  # what is printed is no answer
    for line in sys.stdin:
        call = json.loads(line)
        if dict(os.environ) != call["environment"]:
            mpwriter.shutdown()  # workers have the environment of the time of their start
            os.environ.clear()
            os.environ.update(call["environment"])
        story = ""
        try:
            getattr(importlib.import_module(call["module"]), call["name"])(*call["args"])
        except BaseException:
            story = traceback.format_exc()
        os.write(answers, (json.dumps(story) + "\n").encode())
    mpwriter.shutdown()
