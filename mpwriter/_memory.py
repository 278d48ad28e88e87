"""How much memory this process may still claim, and how many cores it may use.

Runs in: both. Torch-free; reads /proc, the cgroup files and the process's limits, writes nothing.

Filling shared memory beyond a memory cgroup's limit ends in SIGKILL, beyond what the machine has in
SIGBUS or the OOM killer: there is no error to catch. So whoever claims memory looks here first. The
look covers

    machine     MemAvailable of /proc/meminfo (free, plus what the kernel can reclaim)
    cgroup v2   memory.max and memory.high less memory.current, at every visible level
    cgroup v1   memory.limit_in_bytes less memory.usage_in_bytes, at every visible level
    process     RLIMIT_AS less the address space in use; RLIMIT_FSIZE for one segment

and the smallest wins. Inactive page cache counts as free in a cgroup, as the kernel drops it before
it kills. Levels above a container's own cgroup namespace are not visible from inside. A look is not
a reservation: another process may take the memory between the look and the claim.

Cores are those of the affinity mask, or fewer where a cgroup has a CPU quota.
"""

from __future__ import annotations

import functools
import os
import re
import resource
from collections.abc import Iterator, Mapping
from typing import NamedTuple

__all__ = [
    "Headroom",
    "available_bytes",
    "default_budget_bytes",
    "file_size_limit",
    "headroom",
    "local_world_size",
    "usable_cores",
]

# Source: cgroup v1 has no word for "no limit", it shows LONG_MAX rounded down to a page. No machine
# has 2**60 bytes.
_UNLIMITED_BYTES = 1 << 60

# The smallest default budget: with less than this a window could not even hold a write's worth.
_MIN_BUDGET_BYTES = 16 << 20


class Headroom(NamedTuple):
    """Bytes that can still be claimed, and the limit that says so (for error messages)."""

    nbytes: int
    limited_by: str


def available_bytes(root: str = "/") -> int:
    """Bytes of memory that this process can still claim; never negative. See `headroom`."""
    return headroom(root).nbytes


def headroom(root: str = "/") -> Headroom:
    """Look at every limit that is visible and return the tightest one.

    Args:
        root: where /proc and the cgroup mounts are looked for; another one is for tests.

    Returns:
        The bytes left (0 when a limit is already exceeded) and the name of that limit. What cannot
        be read does not limit.

    Thread safety: any thread, also several at a time. Takes about 0.1 ms.
    """
    limits = [*_machine_limits(root), *_cgroup_limits(root), *_address_space_limits(root)]
    tightest = min(limits, default=Headroom(_UNLIMITED_BYTES, "no known limit"))
    return Headroom(max(0, tightest.nbytes), tightest.limited_by)


def default_budget_bytes(
    held_bytes: int = 0, root: str = "/", environ: Mapping[str, str] | None = None
) -> int:
    """The budget where the user sets none: half of this rank's share of the available memory.

        max(16 MiB, (available_bytes() + held_bytes) // (2 * LOCAL_WORLD_SIZE))

    Args:
        held_bytes: bytes that the arena holds already; they are not available, but they are ours.
        root: see `headroom`.
        environ: where LOCAL_WORLD_SIZE is read from; `os.environ` by default.
    """
    ranks = local_world_size(environ)
    return max(_MIN_BUDGET_BYTES, (available_bytes(root) + held_bytes) // (2 * ranks))


def file_size_limit() -> int | None:
    """RLIMIT_FSIZE in bytes, None where there is none. It holds for a memfd as for any file."""
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def usable_cores(root: str = "/") -> int:
    """Cores that this process may use, at least 1: its affinity mask, and every visible CPU quota.

    A quota of 2.5 cores counts as 2: threads that share the rest are stopped for part of the time.
    """
    cores = float(len(os.sched_getaffinity(0)))
    membership = _read(root, "/proc/self/cgroup")
    for version, directory in _cgroup_directories(root, membership, "cpu"):
        if version == 2:
            quota, _, period = _read(root, f"{directory}/cpu.max").strip().partition(" ")
        else:
            quota = _read(root, f"{directory}/cpu.cfs_quota_us").strip()
            period = _read(root, f"{directory}/cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period):  # "max" and -1: no quota
            cores = min(cores, int(quota) / int(period))
    return max(1, int(cores))


def local_world_size(environ: Mapping[str, str] | None = None) -> int:
    """Ranks on this machine, by LOCAL_WORLD_SIZE of `environ` (`os.environ` by default); or 1."""
    environ = os.environ if environ is None else environ
    try:
        return max(1, int(environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 1


def _read(root: str, path: str) -> str:
    """The text of a file under `root`, "" where it cannot be read."""
    try:
        with open(os.path.join(root, path.lstrip("/")), encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _read_number(root: str, path: str) -> int | None:
    """The number that a cgroup file holds; None for "max", for unlimited and for no file."""
    text = _read(root, path).strip()
    if not text.isdigit() or int(text) >= _UNLIMITED_BYTES:
        return None
    return int(text)


def _machine_limits(root: str) -> Iterator[Headroom]:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read(root, "/proc/meminfo"), re.MULTILINE)
    if match:
        yield Headroom(int(match[1]) * 1024, "MemAvailable of /proc/meminfo")


def _address_space_limits(root: str) -> Iterator[Headroom]:
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    pages = _read(root, "/proc/self/statm").split(" ", 1)[0]
    if soft != resource.RLIM_INFINITY and pages.isdigit():
        used_bytes = int(pages) * resource.getpagesize()
        yield Headroom(soft - used_bytes, "the address space limit (ulimit -v)")


def _cgroup_limits(root: str) -> Iterator[Headroom]:
    membership = _read(root, "/proc/self/cgroup")
    for version, directory in _cgroup_directories(root, membership, "memory"):
        limit_names = ["memory.max", "memory.high"] if version == 2 else ["memory.limit_in_bytes"]
        usage_name = "memory.current" if version == 2 else "memory.usage_in_bytes"
        reclaimable = "inactive_file" if version == 2 else "total_inactive_file"
        limits = [(_read_number(root, f"{directory}/{name}"), name) for name in limit_names]
        known = [(limit, name) for limit, name in limits if limit is not None]
        usage = _read_number(root, f"{directory}/{usage_name}") if known else None
        if usage is None:
            continue
        limit, name = min(known)
        usage -= min(usage, _statistic(root, f"{directory}/memory.stat", reclaimable))
        yield Headroom(limit - usage, f"{directory}/{name}")


def _statistic(root: str, path: str, name: str) -> int:
    match = re.search(rf"^{name} (\d+)$", _read(root, path), re.MULTILINE)
    return int(match[1]) if match else 0


@functools.lru_cache(maxsize=8)
def _cgroup_directories(root: str, membership: str, controller: str) -> tuple[tuple[int, str], ...]:
    """(cgroup version, directory) of every level above this process, the innermost first.

    For cgroup v2, and for v1's hierarchy of `controller`.

    Cached by the text of /proc/self/cgroup: a process that is moved is seen, and the mount table,
    which has thousands of lines on some nodes, is read once.
    """
    own = _memberships(membership, controller)
    found: dict[tuple[int, str], None] = {}
    for line in _read(root, "/proc/self/mountinfo").splitlines():
        mount = _cgroup_mount(line, controller)
        if mount is None or mount.version not in own:
            continue
        relative = _below(own[mount.version], mount.root)
        parts = [part for part in relative.split("/") if part]
        for depth in range(len(parts), -1, -1):
            found[(mount.version, "/".join([mount.point.rstrip("/"), *parts[:depth]]))] = None
    return tuple(found)


class _Mount(NamedTuple):
    version: int
    root: str  # the cgroup that is mounted
    point: str  # where


def _memberships(membership: str, controller: str) -> dict[int, str]:
    """This process's cgroup in the v2 hierarchy and in v1's of `controller`."""
    own: dict[int, str] = {}
    for line in membership.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            own[2] = path
        elif controller in controllers.split(","):
            own[1] = path
    return own


def _cgroup_mount(line: str, controller: str) -> _Mount | None:
    """One line of mountinfo, where it is a mount that can hold limits of `controller`."""
    left, separator, right = line.partition(" - ")
    fields, kind = left.split(" "), right.split(" ")
    if not separator or len(fields) < 5 or len(kind) < 3:
        return None
    version = {"cgroup2": 2, "cgroup": 1}.get(kind[0])
    if version is None or (version == 1 and controller not in kind[2].split(",")):
        return None
    return _Mount(version, _unescape(fields[3]), _unescape(fields[4]))


def _unescape(field: str) -> str:
    """Source: proc(5): blanks and backslashes in mountinfo are written as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _below(path: str, mount_root: str) -> str:
    """`path` relative to the mounted cgroup, "" where it lies outside (other namespaces)."""
    if "/.." in path:
        return ""
    prefix = mount_root.rstrip("/")
    if path == prefix or path.startswith(prefix + "/"):
        return path[len(prefix) :]
    return ""
