"""What a test left behind: child processes, file descriptors, threads, shared memory.

A resource is a tuple that stays equal as long as the thing itself lives: ("child", pid, started),
("fd", number, target), ("thread", ident, name), ("shm", file name). Source of the kinds: invariant
10 of the design.

Two looks. After each test, what mpwriter keeps warm on purpose is let pass: its live workers, one
socket for each, and the memfds of the arena. After each module mpwriter is shut down first, and
nothing of it may be left.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

Resource = tuple[Any, ...]

# Time for what is already ending: a thread on its last line, a child not reaped yet.
GRACE_S = 3.0
_PATIENCE_S = 0.1  # before garbage is collected, which is slow with torch loaded

_FDS = Path("/proc/self/fd")
_MAPS = Path("/proc/self/maps")
_SHM = Path("/dev/shm")

# Of fsspec: one thread with an event loop for all asynchronous filesystems, once per process.
_EVENT_LOOP_THREAD = "fsspecIO"
_EVENT_LOOP_FDS = 3
# Of that loop's own executor, which looks up host names.
_EXECUTOR_THREADS = "asyncio_"

# Resources of fixtures that outlive a test; tests/conftest.py adds them as they are set up.
long_lived: set[Resource] = set()


def snapshot(*, mappings: bool = False) -> set[Resource]:
    """Everything this process holds now. Takes about 1 ms.

    Args:
        mappings: shared memory that is mapped, too; some 2 ms more.
    """
    found: set[Resource] = set()
    for child in psutil.Process().children():
        found.add(("child", child.pid, child.create_time()))
    for thread in threading.enumerate():
        found.add(("thread", thread.ident, thread.name))
    found |= {("fd", *fd) for fd in _open_fds()}
    if _SHM.is_dir():
        found |= {("shm", name) for name in os.listdir(_SHM)}
    if mappings and _MAPS.exists():
        lines = (line.split(maxsplit=5) for line in _MAPS.read_text().splitlines())
        found |= {("mapping", f[0], f[5]) for f in lines if len(f) == 6 and "/memfd:" in f[5]}
    return found


def _open_fds() -> Iterable[tuple[int, str]]:
    if not _FDS.is_dir():
        return
    for number in os.listdir(_FDS):
        try:
            yield int(number), os.readlink(_FDS / number)
        except FileNotFoundError:
            pass  # the descriptor of the listing itself


def left_behind(
    before: set[Resource], *, strict: bool = False, connections: bool = False
) -> list[str]:
    """What has come since `before` and does not belong there, one line each.

    Args:
        before: an earlier `snapshot()`, with mappings where `strict`.
        strict: mpwriter itself may hold nothing either.
        connections: let pass those that the client of a store keeps open, and their threads.
    """

    def look() -> set[Resource]:
        return {
            resource
            for resource in _suspects(before, strict)
            if not (connections and _is_connection(resource))
        }

    found = look()
    begin_s = time.monotonic()
    while found and time.monotonic() < begin_s + GRACE_S:
        time.sleep(0.01)
        if time.monotonic() > begin_s + _PATIENCE_S:
            gc.collect()  # a caught exception can hold a frame, and with it what is open there
            _drop_cached_filesystems()
        found = look()
    return sorted(_describe(resource) for resource in found)


def _suspects(before: set[Resource], strict: bool) -> set[Resource]:
    new = snapshot(mappings=strict) - before - long_lived
    workers = set() if strict else set(_worker_pids())
    servant_pids, servant_fds = _multiprocessing_servants()
    # What cannot be told apart by its name is let pass by number.
    sockets = sum(resource[0] == "child" and resource[1] in workers for resource in new)
    if any(_is_event_loop(resource) for resource in new):
        sockets += _EVENT_LOOP_FDS
    found = set()
    for resource in sorted(new, key=str):
        kind, *rest = resource
        if kind == "child":
            belongs = rest[0] in workers | servant_pids
        elif kind == "thread":
            belongs = _is_event_loop(resource)
        elif kind == "shm":
            belongs = not _is_ours(rest[0])
        elif kind == "fd":
            number, target = rest
            belongs = number in servant_fds or target.startswith("/dev/nvidia")
            if not strict and target.startswith("/memfd:"):
                belongs = True
            elif not belongs and sockets and target.startswith(("socket:", "anon_inode:")):
                belongs = True
                sockets -= 1
        else:
            belongs = False
        if not belongs:
            found.add(resource)
    return found


def _is_event_loop(resource: Resource) -> bool:
    if resource[0] != "thread":
        return False
    name: str = resource[2]
    return name == _EVENT_LOOP_THREAD or name.startswith(_EXECUTOR_THREADS)


def _is_connection(resource: Resource) -> bool:
    kind, *rest = resource
    if kind == "fd":
        target: str = rest[1]
        return target.startswith(("socket:", "anon_inode:"))
    # Of paramiko, one a connection; of gcsfs, one that closes them.
    return kind == "thread" and str(rest[1]).startswith(("Thread-", "gcsfs-"))


def _worker_pids() -> list[int]:
    pool = getattr(sys.modules.get("mpwriter._pool"), "_pool", None)
    return pool.pids() if pool is not None else []


def shut_down() -> None:
    """End what mpwriter keeps warm, where a test has used it at all."""
    module = sys.modules.get("mpwriter._pool")
    if module is not None:
        gc.collect()  # writers that nobody refers to any more give back what they lease
        module.shutdown()


def _multiprocessing_servants() -> tuple[set[int | None], set[int | None]]:
    """Process ids and descriptors of the standard library's own, one of each per process."""
    tracker = getattr(
        sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None
    )
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    pids = {getattr(tracker, "_pid", None), getattr(server, "_forkserver_pid", None)}
    fds = {getattr(tracker, "_fd", None), getattr(server, "_forkserver_alive_fd", None)}
    return pids, fds


def _drop_cached_filesystems() -> None:
    """Close the connections that fsspec keeps open for instances it may hand out again."""
    spec = sys.modules.get("fsspec.spec")
    if spec is not None:
        pending = [spec.AbstractFileSystem]
        while pending:
            kind = pending.pop()
            kind.clear_instance_cache()
            pending += kind.__subclasses__()


def _is_ours(name: str) -> bool:
    """Whether a file in /dev/shm is of this process; other programs make files there, too."""
    path = str(_SHM / name)
    if f"_{os.getpid()}_" in name:  # as torch names them
        return True
    if any(target == path for _, target in _open_fds()):
        return True
    return path in _MAPS.read_text()


def _describe(resource: Resource) -> str:
    kind, *rest = resource
    if kind == "child":
        try:
            process = psutil.Process(rest[0])
            command = " ".join(process.cmdline()) or process.name()
            return f"child process {rest[0]} ({process.status()}): {command[:200]}"
        except psutil.Error:
            return f"child process {rest[0]}"
    if kind == "fd":
        return f"file descriptor {rest[0]}: {rest[1]}"
    if kind == "thread":
        return f"thread {rest[1]}"
    if kind == "mapping":
        return f"mapping {rest[0]} of {rest[1]}"
    return f"shared memory /dev/shm/{rest[0]}"
