"""Small limits of the process and of its container."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.saves import assert_holds, names_in
from tests.trainers import Trainer

_IN_SMALL_SHM = """
import ctypes, glob, json, os, sys, threading
import torch
from tests.saves import *

CLONE_NEWNS, CLONE_NEWUSER, MS_REC, MS_PRIVATE = 0x20000, 0x10000000, 0x4000, 0x40000
libc = ctypes.CDLL(None, use_errno=True)

def mount_small_shm():
    if libc.unshare(CLONE_NEWNS) and libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
        return False
    libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    return not libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=16m")

def uses_of_shm():
    # Of this process and of every worker: files there, and mappings of such files.
    found = [name for name in os.listdir("/dev/shm") if f"_{os.getpid()}_" in name]
    for pid in tree_pids():
        with open(f"/proc/{pid}/maps") as maps:
            found += [line for line in maps if "/dev/shm" in line]
    return found

small = mount_small_shm()
size = os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize
seen = []
def watch(event):
    seen.extend(uses_of_shm())
state = {f"t{n}": torch.full((5 << 20,), float(n)) for n in range(10)}
for number in range(2):
    save(sys.argv[1], state, sync_files=False, event_handler=watch)
    assert_holds(sys.argv[1], state)
print(json.dumps({"small": small, "size": size, "seen": seen, "workers": len(worker_pids())}))
"""


def test_save_needs_no_dev_shm_when_it_is_small(
    start_trainer: Callable[..., Trainer], checkpoint_dir: Path
) -> None:
    """D01: 200 MB with a /dev/shm of 16 MB, as in a container.

    Where this process may not mount one, what counts is checked all the same: nothing at all is
    put there or mapped from there, by the trainer or a worker.
    """
    trainer = start_trainer(_IN_SMALL_SHM, checkpoint_dir)
    trainer.assert_succeeded()
    found = json.loads(trainer.stdout)
    assert found["seen"] == []
    assert found["workers"] == 2
    if found["small"]:
        assert found["size"] == 16 << 20
    assert "bus error" not in trainer.stderr.lower()


_MANY_TENSORS = """
import gc, json, resource, sys
import torch
from tests.saves import *

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float16]
counts = []
for number in range(10):
    state = {
        f"t{n}": torch.full((n % 7 + 1,), (n + number) % 50, dtype=dtypes[n % 5])
        for n in range(5000)
    }
    save(sys.argv[1], state, sync_files=False)
    gc.collect()
    counts.append([open_fds(), *(open_fds(pid) for pid in worker_pids())])
assert_holds(sys.argv[1], state)
print(json.dumps(counts))
"""


@pytest.mark.slow
def test_saves_need_few_descriptors_when_there_are_many_tensors(
    start_trainer: Callable[..., Trainer], checkpoint_dir: Path
) -> None:
    """D03: `ulimit -n 128`, 5,000 tensors of mixed dtypes, 10 saves: as many at the end."""
    trainer = start_trainer(_MANY_TENSORS, checkpoint_dir)
    trainer.assert_succeeded()
    counts = json.loads(trainer.stdout)
    assert counts[1:] == [counts[1]] * 9
    assert len(counts[0]) == 3, "the trainer and two workers"
    assert max(counts[-1]) < 60


_SMALL_FILES = """
import resource, sys
import torch
from torch.distributed.checkpoint.api import CheckpointException
from mpwriter.errors import StagingMemoryError
from tests.saves import *

resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 10, 32 << 10))
try:
    save(sys.argv[1], {"x": torch.ones(100)}, staging_budget_bytes=1 << 30)
except CheckpointException as exc:
    error = failure_of(exc)
    assert isinstance(error, StagingMemoryError), repr(error)
    assert error.budget_bytes == 1 << 30 and error.available_bytes == 32 << 10
    print(error)
"""


def test_save_raises_when_no_shared_memory_is_to_be_had(
    start_trainer: Callable[..., Trainer], checkpoint_dir: Path
) -> None:
    """Invariant 11: `ulimit -f` holds for shared memory too; an error with figures, no SIGXFSZ."""
    trainer = start_trainer(_SMALL_FILES, checkpoint_dir)
    trainer.assert_succeeded()
    for words in ("staging_budget_bytes", str(1 << 30), str(32 << 10), "ulimit -f"):
        assert words in trainer.stdout
    assert names_in(checkpoint_dir) == []


_FEW_FILES_LEFT = """
import os, resource, sys
import mpwriter
from tests.saves import *
from mpwriter.errors import MPWriterError
from torch.distributed.checkpoint.api import CheckpointException

limit = 64
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
held = []
failures = 0
for left in range(13):
    # From plenty of free descriptors to one, and no worker yet.
    mpwriter.shutdown()
    while open_fds() < limit - 13 + left:
        held.append(os.open("/dev/null", os.O_RDONLY))
    try:
        save(f"{sys.argv[1]}/{left}", small_state(left), num_workers=2)
    except CheckpointException as exc:
        assert isinstance(failure_of(exc), MPWriterError), repr(failure_of(exc))
        failures += 1
        failed = True
    else:
        failed = False
    for fd in held:
        os.close(fd)
    held.clear()
    if failed:
        assert ".metadata" not in names_in(f"{sys.argv[1]}/{left}"), left
    else:
        assert_holds(f"{sys.argv[1]}/{left}", small_state(left))
save(f"{sys.argv[1]}/last", small_state(99))
print("failures", failures)
"""


def test_save_recovers_when_descriptors_run_out(
    start_trainer: Callable[..., Trainer], checkpoint_dir: Path
) -> None:
    """D03: with hardly a descriptor left a save works or says so, and the next one works."""
    trainer = start_trainer(_FEW_FILES_LEFT, checkpoint_dir)
    trainer.assert_succeeded()
    assert_holds(checkpoint_dir / "last", {"step": 99})
    warnings = [line for line in trainer.stderr.splitlines() if "written in the trainer" in line]
    reasons = [re.sub(r"\d+", "", line) for line in warnings]
    assert reasons and len(set(reasons)) == len(reasons), "one warning for each reason"
