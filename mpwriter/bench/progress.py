"""A one-line progress bar.

Runs in: trainer. Not thread-safe: one thread owns a bar.
"""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType
from typing import TextIO

__all__ = ["ProgressBar"]

_BAR_CELLS = 24


class ProgressBar:
    """Counts `num_steps` steps on one line; silent where `stream` is not a terminal.

    Args:
        num_steps: how often `step` will be called.
        stream: where the line goes; standard error by default, so that a table in standard
            output can be piped.
        silent: whatever the stream is.
    """

    def __init__(
        self, num_steps: int, stream: TextIO | None = None, *, silent: bool = False
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._visible = not silent and self._stream.isatty()
        self._num_steps = max(num_steps, 1)
        self._num_done = 0
        self._began = time.monotonic()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()

    def show(self, what: str) -> None:
        """Say what runs now. Drawn only between measurements, never during one."""
        if not self._visible:
            return
        filled = _BAR_CELLS * self._num_done // self._num_steps
        bar = "#" * filled + "." * (_BAR_CELLS - filled)
        line = f"[{bar}] {self._num_done}/{self._num_steps}{self._time_left()} {what}"
        width = shutil.get_terminal_size().columns - 1
        self._stream.write("\r" + line[:width].ljust(width))
        self._stream.flush()

    def step(self) -> None:
        self._num_done = min(self._num_done + 1, self._num_steps)

    def clear(self) -> None:
        """Wipe the line, so that other output begins at the left."""
        if self._visible:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write("\r" + " " * width + "\r")
            self._stream.flush()

    def _time_left(self) -> str:
        if not self._num_done:
            return ""
        per_step_s = (time.monotonic() - self._began) / self._num_done
        left_s = round(per_step_s * (self._num_steps - self._num_done))
        return f" {left_s // 60}:{left_s % 60:02d} left"
