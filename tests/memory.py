"""What a process and all below it hold of memory, watched from outside."""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType

import psutil

__all__ = ["PeakMemory"]

# A look at 10 GB takes 50 ms, in which the process cannot map anything.
_PERIOD_S = 0.2


class PeakMemory:
    """Watches a process tree in a thread of its own.

        with PeakMemory(pid) as peak:
            ...
        peak.pss_bytes

    Pages that several processes share count once altogether (PSS).
    """

    def __init__(self, pid: int) -> None:
        self.pss_bytes = 0
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.is_set():
            self.pss_bytes = max(self.pss_bytes, _tree_pss_bytes(self._pid))
            self._over.wait(_PERIOD_S)


def _tree_pss_bytes(pid: int) -> int:
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in [process, *process.children(recursive=True)]:
            with contextlib.suppress(OSError):  # it has just ended
                total += _pss_bytes(member.pid)
    return total


def _pss_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        for line in rollup:
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0
