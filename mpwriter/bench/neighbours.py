"""CPU that other programs use on this machine while something is measured.

Runs in: trainer. A meter belongs to one thread.
"""

from __future__ import annotations

import os
import resource
import time

from mpwriter.bench import process_tree

__all__ = ["Neighbours"]

_STAT = "/proc/stat"
# Columns of its first line: user, nice, system, irq, softirq, steal; not idle and iowait.
_BUSY_COLUMNS = (1, 2, 3, 6, 7, 8)


class Neighbours:
    """Tells how many cores others kept busy since it was made: 0.5 is half of one core.

    Others are all processes but this one and its living descendants, the kernel's own threads, and
    whoever else has the processor of a virtual machine. Counted in ticks of 10 ms.

    Args:
        launcher: a process whose descendants, this process among them, are not others either.
    """

    def __init__(self, launcher: int | None = None) -> None:
        self._launcher = launcher
        self._began, self._busy_s, self._own_s = time.perf_counter(), _busy_s(), _own_s(launcher)

    def num_cores(self) -> float:
        """0 where this machine does not tell."""
        busy_s = _busy_s()
        if busy_s is None or self._busy_s is None:
            return 0.0
        others_s = (busy_s - self._busy_s) - (_own_s(self._launcher) - self._own_s)
        return max(others_s / (time.perf_counter() - self._began), 0.0)


def _busy_s() -> float | None:
    try:
        with open(_STAT, encoding="ascii") as file:
            columns = file.readline().split()
    except OSError:
        return None
    return sum(int(columns[n]) for n in _BUSY_COLUMNS) / float(os.sysconf("SC_CLK_TCK"))


def _own_s(launcher: int | None) -> float:
    if launcher is not None and process_tree.available():
        return process_tree.descendants_cpu_s(launcher)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    children_s = process_tree.descendants_cpu_s(os.getpid()) if process_tree.available() else 0.0
    return usage.ru_utime + usage.ru_stime + children_s
