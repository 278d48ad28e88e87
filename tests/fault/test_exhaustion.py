"""What the machine has is used up: a save does with less or says so, and nothing dies or hangs."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.saves import assert_holds, names_in
from tests.trainers import Trainer, wait_until

Start = Callable[..., Trainer]

MIB = 1 << 20

# -- /dev/shm -----------------------------------------------------------------------------------

_FULL_SHM = """
import ctypes, json, os, sys, warnings
import torch
from tests.asyncs import async_save
from tests.saves import *

CLONE_NEWNS, CLONE_NEWUSER, MS_REC, MS_PRIVATE = 0x20000, 0x10000000, 0x4000, 0x40000
libc = ctypes.CDLL(None, use_errno=True)
if not (libc.unshare(CLONE_NEWNS) and libc.unshare(CLONE_NEWUSER | CLONE_NEWNS)):
    libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    if not libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1m"):
        try:
            with open("/dev/shm/everything", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        except OSError:
            pass
        assert os.statvfs("/dev/shm").f_bavail == 0
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
state = {f"t{n}": torch.full((1 << 20,), float(n)) for n in range(10)}
save(f"{sys.argv[1]}/sync", state)
async_save(state, f"{sys.argv[1]}/async").result()
mapped = [line for pid in tree_pids() for line in open(f"/proc/{pid}/maps") if "/dev/shm" in line]
print(json.dumps(mapped + [n for n in os.listdir("/dev/shm") if f"_{os.getpid()}_" in n]))
assert len(worker_pids()) == 2
"""


def test_saves_work_when_dev_shm_is_full(start_trainer: Start, tmp_path: Path) -> None:
    """D01: not a byte of it is left. Where this process may not mount one of its own, what is
    checked is that nothing is put there.
    """
    trainer = start_trainer(_FULL_SHM, tmp_path)
    trainer.assert_succeeded()
    assert json.loads(trainer.stdout) == []
    assert trainer.stderr == ""
    for name in ("sync", "async"):
        assert_holds(
            tmp_path / name, {f"t{n}": torch.full((1 << 20,), float(n)) for n in range(10)}
        )
        assert len(names_in(tmp_path / name)) == 3


# -- a cgroup -----------------------------------------------------------------------------------

_IN_CGROUP = """
import functools, json, os, sys
import torch
import mpwriter
from mpwriter._arena import get_arena
from mpwriter._memory import headroom
from mpwriter.errors import StagingMemoryError
from tests.asyncs import async_save
from tests.saves import *

folder, limit, made_up = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def join_group():
    # Whatever memory hierarchy there is; the group is removed by the test.
    for line in open("/proc/self/cgroup"):
        number, controllers, path = line.strip().split(":", 2)
        if number == "0":
            bases, files = ["/sys/fs/cgroup"], ["memory.max"]
        elif "memory" in controllers.split(","):
            bases, files = ["/sys/fs/cgroup/memory"], ["memory.limit_in_bytes"]
        else:
            continue
        for parent in (bases[0] + path, bases[0]):
            group = os.path.join(parent, f"mpwriter-test-{os.getpid()}")
            try:
                os.mkdir(group)
            except OSError:
                continue
            try:
                for name in files:
                    with open(os.path.join(group, name), "w") as file:
                        file.write(str(limit))
                with open(os.path.join(group, "cgroup.procs"), "w") as file:
                    file.write(str(os.getpid()))
                return group
            except OSError:
                os.rmdir(group)
    return None

# Of the size of the limit and a half; it counts for the group that this process was in before.
state = {f"t{n}": torch.full((5 << 20,), float(n)) for n in range(10)}
group = join_group()
print(json.dumps(group))
if group is None:
    get_arena()._look = functools.partial(headroom, made_up)
for budget in (None, 1 << 30):
    try:
        async_save(state, f"{folder}/async", staging_budget_bytes=budget)
    except StagingMemoryError as error:
        figures = [error.needed_bytes, error.budget_bytes, error.available_bytes]
        print(json.dumps([str(error), *figures]))
# A little at a time it fits.
report = save(f"{folder}/sync", state, sync_files=False).last_report
print(json.dumps([report.num_workers, get_arena().stats().peak_claimed_bytes]))
mpwriter.shutdown()
# Ending as others do, it would write to all the memory that it shares with its host process.
os._exit(0)
"""


def make_up_a_group(root: Path, limit: int) -> None:
    """What `_memory` reads, for where no real group can be made."""
    mount = "30 23 0:26 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
    files = {
        "proc/meminfo": "MemAvailable: 8388608 kB\n",
        "proc/self/cgroup": "0::/job\n",
        "proc/self/mountinfo": mount,
        "sys/fs/cgroup/job/memory.max": f"{limit}\n",
        "sys/fs/cgroup/job/memory.current": f"{20 * MIB}\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_save_does_not_exceed_the_limit_of_its_cgroup(start_trainer: Start, tmp_path: Path) -> None:
    """D12: staging 200 MB where a group leaves 150 is an error that names the group, before
    anything is claimed; a save that streams through is done. The OOM killer has no part in it.
    """
    limit = 150 * MIB
    made_up = tmp_path / "made up"
    make_up_a_group(made_up, limit)
    trainer = start_trainer(_IN_CGROUP, tmp_path, limit, made_up)
    try:
        trainer.assert_succeeded()
    finally:
        remove_group(trainer)
    _, by_default, with_budget, last = map(json.loads, trainer.stdout.splitlines())
    for text, needed, budget, available in (by_default, with_budget):
        assert 200 * 10**6 < needed < 220 * MIB and available < limit
        assert str(budget) in text and str(needed) in text
    assert "memory.limit_in_bytes" in with_budget[0] or "memory.max" in with_budget[0]
    assert with_budget[2] == 1 << 30
    num_workers, peak = last
    assert num_workers == 2 and peak < limit
    assert names_in(tmp_path / "async") == []
    assert_holds(tmp_path / "sync", {f"t{n}": torch.full((5 << 20,), float(n)) for n in range(10)})


def remove_group(trainer: Trainer) -> None:
    lines = trainer.stdout.splitlines()
    group = json.loads(lines[0]) if lines else None
    if group is not None:

        def removed() -> bool:
            with contextlib.suppress(OSError):  # the workers are still ending
                os.rmdir(group)
            return not os.path.exists(group)

        wait_until(removed)


# -- mappings -----------------------------------------------------------------------------------

_NO_MAPS = """
import mmap, sys
import torch
import mpwriter
from mpwriter import MPFsspecWriter
from mpwriter._arena import get_arena
from mpwriter.errors import MPWriterError
from tests.saves import *
from torch.distributed.checkpoint.api import CheckpointException

folder = sys.argv[1]
save(f"{folder}/before", small_state(1))
held = []

def use_up():
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    while True:
        # By turns, or the kernel makes one mapping of neighbours.
        prot = mmap.PROT_READ if len(held) % 2 else mmap.PROT_READ | mmap.PROT_WRITE
        try:
            held.append(mmap.mmap(-1, 4096, flags=flags, prot=prot))
        except OSError:
            return

outcomes = set()
state = small_state(2, numel=1_000_000)
for left in range(0, 24, 2):
    # Nothing is warm: workers and memory have to be had anew.
    mpwriter.shutdown()
    use_up()
    del held[len(held) - left :]
    try:
        save(f"{folder}/{left}", state)
        outcomes.add("saved")
    except CheckpointException as exc:
        error = failure_of(exc)
        assert isinstance(error, (MPWriterError, MemoryError)), repr(error)
        outcomes.add("failed")
    # Not the rest of an asynchronous save: Python waits for ever for a thread that cannot begin.
    try:
        staged = MPFsspecWriter(f"{folder}/never").stage(state)
        assert all(torch.equal(staged[key], state[key]) for key in state if key != "step")
        del staged
        outcomes.add("staged")
    except (MPWriterError, MemoryError):
        outcomes.add("not staged")
held.clear()
assert get_arena().stats().num_leases == 0
report = save(f"{folder}/after", small_state(3)).last_report
assert report.num_workers == 2
print(*sorted(outcomes), sep="\\n")
"""


@pytest.mark.timeout(120)
def test_saves_fail_or_work_when_the_process_may_map_no_more(
    start_trainer: Start, tmp_path: Path
) -> None:
    """Issue 4, `vm.max_map_count`: with none to a few mappings left an error or a save that is
    whole, never a signal or a hang; afterwards all is well.
    """
    trainer = start_trainer(_NO_MAPS, tmp_path)
    trainer.assert_succeeded()
    assert {"failed", "not staged"} <= set(trainer.stdout.splitlines()), "there was a limit"
    assert_holds(tmp_path / "before", {"step": 1})
    assert_holds(tmp_path / "after", {"step": 3})
    for folder in map(tmp_path.joinpath, map(str, range(0, 24, 2))):
        if (folder / ".metadata").exists():
            assert_holds(folder, {"step": 2})
        else:
            assert [name for name in names_in(folder) if not name.startswith(".")] == []


# -- processes ----------------------------------------------------------------------------------

_FEW_PROCESSES = """
import ctypes, os, resource, sys
import mpwriter
from tests.saves import *

libc = ctypes.CDLL(None, use_errno=True)
is_root = os.geteuid() == 0
if is_root:
    # Root has no such limit. Of this user there are no other processes; it keeps the right to reach
    # every file, and its workers inherit it.
    PR_SET_KEEPCAPS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_OVERRIDE = 8, 47, 2, 1
    libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setresuid(54321, 54321, 54321)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    mask = 1 << CAP_DAC_OVERRIDE
    assert libc.capset(header, (ctypes.c_uint32 * 6)(mask, mask, mask)) == 0
    assert libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_OVERRIDE, 0, 0) == 0
counts = []
most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
for limit in range(1, 9):
    mpwriter.shutdown()
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, most))
    report = save(f"{sys.argv[1]}/{limit}", small_state(limit)).last_report
    assert report.files == 2
    counts.append(report.num_workers)
    assert len(worker_pids()) <= 2
print(is_root, *counts)
"""


def test_saves_work_when_there_may_be_few_processes(start_trainer: Start, tmp_path: Path) -> None:
    """Issue 4, RLIMIT_NPROC: from none at all over a process without its thread to enough."""
    trainer = start_trainer(_FEW_PROCESSES, tmp_path)
    trainer.assert_succeeded()
    for limit in range(1, 9):
        assert_holds(tmp_path / str(limit), {"step": limit})
        assert len(names_in(tmp_path / str(limit))) == 3
    is_root, *counts = trainer.stdout.split()
    assert counts[0] == "0"
    if is_root == "True":
        assert counts[-1] == "2"


# -- descriptors --------------------------------------------------------------------------------

_MANY_STAGED = """
import json, resource, sys
import torch
from tests.asyncs import async_save, wait_for_saves
from tests.saves import *

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
counts = []
for number in range(3):
    state = {f"t{n}": torch.full((n % 7 + 1,), float(n + number)) for n in range(3000)}
    futures = [async_save(state, f"{sys.argv[1]}/{place}") for place in range(2)]
    for future in futures:
        future.result()
    wait_for_saves()
    counts.append([open_fds(), *(open_fds(pid) for pid in worker_pids())])
print(json.dumps(counts))
"""


@pytest.mark.slow
def test_asynchronous_saves_need_few_descriptors(start_trainer: Start, tmp_path: Path) -> None:
    """D03: `ulimit -n 128`, two saves of 3,000 staged tensors at a time."""
    trainer = start_trainer(_MANY_STAGED, tmp_path)
    trainer.assert_succeeded()
    counts = json.loads(trainer.stdout)
    assert max(max(row) for row in counts) < 64
    assert counts[1][0] == counts[2][0]
    for place in range(2):
        expected = {f"t{n}": torch.full((n % 7 + 1,), float(n + 2)) for n in range(3000)}
        assert_holds(tmp_path / str(place), expected)
