"""Headroom and cores, read from made-up /proc and cgroup trees."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from mpwriter import _memory
from mpwriter._memory import available_bytes, default_budget_bytes, headroom, usable_cores

MIB = 1 << 20
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_MEMORY = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V1_CPU = "36 31 0:33 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct"


class Tree:
    """A root directory with what `_memory` reads."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.write("proc/meminfo", "MemTotal:  99 kB\nMemAvailable:   8388608 kB\n")  # 8 GiB

    def write(self, path: str, text: str) -> None:
        file = Path(self.root, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def mount(self, membership: str, *mounts: str) -> None:
        self.write("proc/self/cgroup", membership)
        self.write("proc/self/mountinfo", "\n".join(mounts) + "\n")

    def v2(self, path: str, limit: str, usage: int, inactive: int = 0, high: str = "max") -> None:
        self.write(f"{path}/memory.max", f"{limit}\n")
        self.write(f"{path}/memory.high", f"{high}\n")
        self.write(f"{path}/memory.current", f"{usage}\n")
        self.write(f"{path}/memory.stat", f"anon 5\ninactive_file {inactive}\nactive_file 7\n")

    def v1(self, path: str, limit: int, usage: int, inactive: int = 0) -> None:
        self.write(f"{path}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{path}/memory.usage_in_bytes", f"{usage}\n")
        self.write(f"{path}/memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive}\n")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    _memory._cgroup_directories.cache_clear()
    return Tree(tmp_path)


def test_headroom_is_what_the_machine_has_when_nothing_limits_it(tree: Tree) -> None:
    assert headroom(tree.root) == (8 << 30, "MemAvailable of /proc/meminfo")


def test_headroom_is_unlimited_when_nothing_can_be_read(tmp_path: Path) -> None:
    assert available_bytes(str(tmp_path)) >= 1 << 60


def test_headroom_is_that_of_the_v2_group_when_it_has_a_limit(tree: Tree) -> None:
    """D12."""
    tree.mount("0::/job/rank0\n", V2_MOUNT)
    tree.v2("sys/fs/cgroup/job/rank0", str(300 * MIB), 120 * MIB, inactive=20 * MIB)
    found = headroom(tree.root)
    assert found.nbytes == 200 * MIB
    assert found.limited_by == "/sys/fs/cgroup/job/rank0/memory.max"


def test_headroom_is_that_of_an_ancestor_when_it_is_tighter(tree: Tree) -> None:
    tree.mount("0::/a/b/c\n", V2_MOUNT)
    tree.v2("sys/fs/cgroup/a/b/c", "max", 10 * MIB)
    tree.v2("sys/fs/cgroup/a/b", str(900 * MIB), 100 * MIB)
    tree.v2("sys/fs/cgroup/a", str(500 * MIB), 450 * MIB)
    assert headroom(tree.root) == (50 * MIB, "/sys/fs/cgroup/a/memory.max")


def test_headroom_is_that_of_the_mount_point_when_the_namespace_hides_the_rest(tree: Tree) -> None:
    tree.mount("0::/\n", V2_MOUNT)
    tree.v2("sys/fs/cgroup", str(64 * MIB), 60 * MIB)
    assert available_bytes(tree.root) == 4 * MIB


def test_headroom_respects_memory_high_when_it_is_below_max(tree: Tree) -> None:
    tree.mount("0::/a\n", V2_MOUNT)
    tree.v2("sys/fs/cgroup/a", str(900 * MIB), 100 * MIB, high=str(300 * MIB))
    assert headroom(tree.root) == (200 * MIB, "/sys/fs/cgroup/a/memory.high")


def test_headroom_is_zero_when_the_limit_is_exceeded(tree: Tree) -> None:
    tree.mount("0::/a\n", V2_MOUNT)
    tree.v2("sys/fs/cgroup/a", str(100 * MIB), 130 * MIB)
    assert available_bytes(tree.root) == 0


def test_headroom_walks_the_v1_hierarchy_when_there_is_one(tree: Tree) -> None:
    tree.mount("5:cpu,cpuacct:/x\n4:memory:/a/b\n0::/\n", V1_MEMORY, V1_CPU)
    tree.v1("sys/fs/cgroup/memory/a/b", 0x7FFFFFFFFFFFF000, 10 * MIB)
    tree.v1("sys/fs/cgroup/memory/a", 400 * MIB, 350 * MIB, inactive=30 * MIB)
    found = headroom(tree.root)
    assert found == (80 * MIB, "/sys/fs/cgroup/memory/a/memory.limit_in_bytes")


def test_headroom_finds_the_container_when_the_mount_shows_only_its_group(tree: Tree) -> None:
    """Docker with cgroup v1: the path is the host's, the mount begins at the container's group."""
    mount = "35 31 0:32 /docker/0a1b /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory"
    tree.mount("4:memory:/docker/0a1b/sub\n", mount)
    tree.v1("sys/fs/cgroup/memory", 70 * MIB, 10 * MIB)
    tree.v1("sys/fs/cgroup/memory/sub", 50 * MIB, 10 * MIB)
    assert available_bytes(tree.root) == 40 * MIB


@pytest.mark.parametrize("path", ["/elsewhere", "/../../other", "/docker/0a1bc"])
def test_headroom_takes_the_mount_point_when_the_group_is_outside_of_it(
    tree: Tree, path: str
) -> None:
    mount = "35 31 0:32 /docker/0a1b /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory"
    tree.mount(f"4:memory:{path}\n", mount)
    tree.v1("sys/fs/cgroup/memory", 70 * MIB, 10 * MIB)
    assert available_bytes(tree.root) == 60 * MIB


def test_headroom_reads_escaped_mount_points_when_they_have_blanks(tree: Tree) -> None:
    tree.mount("0::/a\n", V2_MOUNT.replace("/sys/fs/cgroup", "/my\\040groups"))
    tree.v2("my groups/a", str(70 * MIB), 10 * MIB)
    assert available_bytes(tree.root) == 60 * MIB


def test_headroom_sees_the_new_group_when_the_process_was_moved(tree: Tree) -> None:
    tree.mount("0::/a\n", V2_MOUNT)
    tree.v2("sys/fs/cgroup/a", str(70 * MIB), 10 * MIB)
    tree.v2("sys/fs/cgroup/b", str(30 * MIB), 10 * MIB)
    assert available_bytes(tree.root) == 60 * MIB
    tree.write("proc/self/cgroup", "0::/b\n")
    assert available_bytes(tree.root) == 20 * MIB


def test_headroom_survives_when_the_files_hold_nonsense(tree: Tree) -> None:
    tree.mount("rubbish\n0::/a\n\n", "x", "1 2 3 - cgroup2", V2_MOUNT)
    tree.v2("sys/fs/cgroup/a", "lots", 10)
    tree.write("sys/fs/cgroup/a/memory.current", "")
    tree.write("sys/fs/cgroup/a/memory.high", "5")
    assert available_bytes(tree.root) == 8 << 30


def test_headroom_counts_the_address_space_when_it_is_limited(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.write("proc/self/statm", "1000 10 10 1 0 10 0\n")
    limit = 1000 * resource.getpagesize() + 7 * MIB
    monkeypatch.setattr(_memory.resource, "getrlimit", lambda which: (limit, limit))
    assert headroom(tree.root) == (7 * MIB, "the address space limit (ulimit -v)")


def test_available_bytes_is_plausible_when_asked_of_this_machine() -> None:
    assert 0 < available_bytes() < 1 << 60


@pytest.mark.parametrize(
    ("ranks", "held", "budget"),
    [
        (None, 0, 4 << 30),
        ("1", 2 << 30, 5 << 30),
        ("8", 0, 512 * MIB),
        ("0", 0, 4 << 30),
        ("many", 0, 4 << 30),
        ("100000", 0, 16 * MIB),
    ],
)
def test_default_budget_is_half_of_a_ranks_share_when_nothing_is_set(
    tree: Tree, ranks: str | None, held: int, budget: int
) -> None:
    environ = {} if ranks is None else {"LOCAL_WORLD_SIZE": ranks}
    assert default_budget_bytes(held, tree.root, environ) == budget


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 64), ("250000 100000", 2), ("1000 100000", 1), ("", 64)]
)
def test_usable_cores_follow_the_v2_quota_when_there_is_one(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr(_memory.os, "sched_getaffinity", lambda pid: set(range(64)))
    tree.mount("0::/a/b\n", V2_MOUNT)
    tree.write("sys/fs/cgroup/a/cpu.max", quota)
    assert usable_cores(tree.root) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 64), ("400000", 4)])
def test_usable_cores_follow_the_v1_quota_when_there_is_one(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr(_memory.os, "sched_getaffinity", lambda pid: set(range(64)))
    tree.mount("5:cpu,cpuacct:/x\n4:memory:/a/b\n", V1_MEMORY, V1_CPU)
    tree.write("sys/fs/cgroup/cpu/x/cpu.cfs_quota_us", quota)
    tree.write("sys/fs/cgroup/cpu/x/cpu.cfs_period_us", "100000\n")
    assert usable_cores(tree.root) == cores
