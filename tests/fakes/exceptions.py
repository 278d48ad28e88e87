"""Exceptions of a filesystem that are hard to hand on to another process.

    plan.add("write", raises="tests.fakes.exceptions.Unpicklable", text="...")

Importable in a worker, as the filesystems are. Each is made of a text alone.
"""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["HUGE_BYTES", "Huge", "Unpicklable", "Ununpicklable"]

HUGE_BYTES = 50_000_000


class Unpicklable(Exception):
    """Holds what no pickle takes, as exceptions of client libraries hold their connection."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.connection = threading.Lock()


class Ununpicklable(Exception):
    """Is pickled without complaint, and then cannot be made again from what was pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, self.args


class Huge(Exception):
    """Quotes a whole body of 50 MB in its text."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text} {'x' * HUGE_BYTES}")


def _refuse(text: str) -> Ununpicklable:
    raise TypeError(f"nobody can make this exception again: {text}")
