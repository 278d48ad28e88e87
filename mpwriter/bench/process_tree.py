"""CPU time and memory of a process with all its descendants, from /proc.

Runs in: both; and as a script beside the process that it samples. Imports the standard library
only, so that the script starts in some milliseconds and takes no memory worth mentioning.

As a script: `python process_tree.py PID`. Every line on standard input is a command:

    begin   take the baseline and sample from now on
    end     answer with one line of JSON: baseline, peaks, number of samples; then end

Linux only; `available()` says whether this machine has what it needs.
"""

from __future__ import annotations

import json
import os
import select
import sys
from typing import NamedTuple

__all__ = ["Footprint", "available", "descendants", "descendants_cpu_s", "footprint"]

SAMPLE_S = 0.05  # 20 Hz: a walk over the maps of a large process takes some milliseconds


class Footprint(NamedTuple):
    """Memory of a process tree.

    Attributes:
        pss_bytes: resident pages, each divided among the processes that map it.
        shared_memory_bytes: pages that its anonymous shared-memory files (memfd) hold, mapped
            by somebody or not: PSS misses pages that were claimed but never touched.
    """

    pss_bytes: int
    shared_memory_bytes: int


def available() -> bool:
    return os.path.exists("/proc/self/smaps_rollup")


def descendants(pid: int) -> list[int]:
    """Process ids of all living descendants of `pid`, without itself."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _stat_fields(int(name))
            if fields:
                children.setdefault(int(fields[1]), []).append(int(name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def descendants_cpu_s(pid: int) -> float:
    """CPU seconds that the living descendants of `pid` have used so far, in steps of 10 ms."""
    ticks = 0
    for child in descendants(pid):
        fields = _stat_fields(child)
        if fields:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / float(os.sysconf("SC_CLK_TCK"))


def footprint(pid: int) -> Footprint:
    """Memory of `pid` and its descendants now; a process that ends meanwhile counts as 0."""
    pids = [pid, *descendants(pid)]
    files: dict[int, int] = {}
    for each in pids:
        files.update(_shared_memory_files(each))
    return Footprint(sum(_pss_bytes(each) for each in pids), sum(files.values()))


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; the name before it may hold anything."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _pss_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # it ended, or is about to
    return 0


def _shared_memory_files(pid: int) -> dict[int, int]:
    """Bytes that each memfd of `pid` holds, by inode: several processes hold the same one."""
    folder, held = f"/proc/{pid}/fd", {}
    try:
        for name in os.listdir(folder):
            if os.readlink(f"{folder}/{name}").startswith("/memfd:"):
                status = os.stat(f"{folder}/{name}")
                held[status.st_ino] = status.st_blocks * 512
    except OSError:
        pass  # it ended, or closed that file between the two calls
    return held


def _sample_until_told(pid: int) -> dict[str, int]:
    baseline = peak = footprint(pid)
    print("ready", flush=True)
    num_samples, told = 0, False
    while not told:
        told = bool(select.select([sys.stdin], [], [], SAMPLE_S)[0])
        now = footprint(pid)
        peak = Footprint(*(max(pair) for pair in zip(peak, now)))
        num_samples += 1
    return {
        "baseline_pss_bytes": baseline.pss_bytes,
        "extra_pss_bytes": peak.pss_bytes - baseline.pss_bytes,
        "shared_memory_bytes": peak.shared_memory_bytes,
        "num_samples": num_samples,
    }


def main() -> None:
    sys.stdin.readline()
    print(json.dumps(_sample_until_told(int(sys.argv[1]))), flush=True)


if __name__ == "__main__":
    main()
