"""torch's process mode: a checkpoint process between the trainer and the workers.

Starting one takes seconds: a trainer of these tests goes through several cases.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mpwriter._compat import SENDS_WHERE_IT_SAVES
from tests.saves import assert_holds, small_state
from tests.trainers import Trainer

_BEGIN = """
import gc, json, os, resource, signal, sys, tempfile, threading, time, warnings
import psutil
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _async_process_executor as executor
from mpwriter._compat import HAS_ASYNC_STAGING
if HAS_ASYNC_STAGING:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
import tests.fakes
from tests.asyncs import *
from tests.fakes import FaultPlan
from tests.saves import *
from tests.states import assert_same, blank, load_into, mixed_items
from mpwriter import FsspecReader, MPFsspecWriter

warnings.simplefilter("ignore")
folder = sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
PROCESS = AsyncCheckpointerType.PROCESS

def process_save(state, path, stager=None, **options):
    dcp_options = {"async_checkpointer_type": PROCESS, **dict.fromkeys(ALONE, False)}
    if stager is not None:
        dcp_options["async_stager"] = stager
    return async_save(state, path, dcp_options=dcp_options, **options)

def checkpointer():
    return executor._CHECKPOINT_PROCESS._save_process.pid

def own_workers(pid):
    return [c for c in psutil.Process(pid).children() if "mpwriter" in " ".join(c.cmdline())]

def assert_loads(path, state):
    assert_same(load_into(blank(state), FsspecReader(path)), state)

def many(num_tensors):
    state = {f"w{n}": torch.full((n % 9,), float(n)) for n in range(num_tensors)}
    return {**state, "pair": (torch.ones(2), num_tensors)}

def assert_has_many(path, num_tensors):
    # Not all of them: torch takes seconds to plan that.
    expected = many(num_tensors)
    chosen = ["pair", *(f"w{n}" for n in range(0, num_tensors, num_tensors // 50))]
    assert_loads(path, {name: expected[name] for name in chosen})
"""

_MANY = (
    _BEGIN
    + """
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
counts = []
for number, num_tensors in enumerate((100, 20_000)):
    future = process_save(many(num_tensors), f"{folder}/{number}")
    assert settled(future) is None, future.exception()
    assert leased_bytes() == 0
    assert_has_many(f"{folder}/{number}", num_tensors)
    counts.append((open_fds(), open_fds(checkpointer()), len(os.listdir("/dev/shm"))))
workers = own_workers(checkpointer())
print(json.dumps({
    "counts": counts,
    "workers": len(workers),
    "nice": [os.getpriority(os.PRIO_PROCESS, worker.pid) for worker in workers],
}))

# The values of the call, whatever comes later, from one checkpoint process; then the program ends.
plan = FaultPlan(f"{folder}/plan")
plan.add("open", "*.distcp", sleep_s=0.3)
for number in range(2, 5):
    state = small_state(number)
    future = process_save(state, f"fault://{folder}/{number}", **plan.options)
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
"""
)


@pytest.mark.slow
def test_process_mode_takes_many_tensors_with_few_descriptors(
    start_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    """D03, G05, B08: 20,000 tensors and 128 descriptors, in the trainer and in the other process.

    The workers are those of the checkpoint process, and quiet; the trainer's memory is released
    after each save; what is in flight at the end of the program is completed.
    """
    trainer = start_trainer(_MANY, tmp_path)
    trainer.assert_succeeded()
    found = json.loads(trainer.stdout)
    first, second = found["counts"]
    assert second == first, "descriptors here and there, files in /dev/shm"
    assert found["workers"] == 2 and found["nice"] == [10, 10]
    for number in range(2, 5):
        assert_holds(tmp_path / str(number), small_state(number))
    assert "cannot schedule" not in trainer.stderr


_MANY_IN_THREAD = (
    _BEGIN
    + """
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
state = many(20_000)
future = async_save(state, f"{folder}/thread")
for value in state.values():
    if isinstance(value, torch.Tensor):
        value.fill_(-1)
assert settled(future) is None, future.exception()
assert_has_many(f"{folder}/thread", 20_000)
"""
)


@pytest.mark.slow
def test_thread_mode_takes_many_tensors_with_few_descriptors(
    start_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    """D03: 20,000 tensors and 128 descriptors."""
    start_trainer(_MANY_IN_THREAD, tmp_path).assert_succeeded()


_FAILING = (
    _BEGIN
    + """
from tests.trainers import all_gone, wait_until

plan = FaultPlan(f"{folder}/plan")

def failure(where, **options):
    future = process_save(small_state(1), f"fault://{folder}/{where}", **options, **plan.options)
    error = settled(future)  # and with it every frame
    assert error is not None
    assert leased_bytes() == 0
    assert names_in(f"{folder}/{where}") == [], names_in(f"{folder}/{where}")
    plan.clear()
    return f"{type(error).__name__}: {error}"

def success(where, number, **options):
    error = settled(process_save(small_state(number), f"{folder}/{where}", **options))
    assert error is None, error
    assert leased_bytes() == 0
    assert_holds(f"{folder}/{where}", small_state(number))

said = {}
plan.add("write", "__0_1.*", signal=signal.SIGKILL)
said["killed"] = failure("killed")
success("after killed", 2)
plan.add("write", "__0_0.*", errno=28)
said["full"] = failure("full", retries=0)
success("after full", 3, staging_budget_bytes=40_000, timeout_s=20)

# torch's own stager: no staging of ours, the same writer and workers. And ours beside the training.
if HAS_ASYNC_STAGING:
    stager = DefaultStager(StagingOptions(False, False, False, False))
    success("stager", 4, stager=stager)
    success("stager again", 5, stager=stager)
    stager.close()
    stager = DefaultStager(StagingOptions(True, True, True, False))
    response = process_save(small_state(6), f"{folder}/in background", stager=stager)
    response.staging_completion.result(30)
    assert settled(response.upload_completion) is None
    assert_holds(f"{folder}/in background", small_state(6))
    stager.close()
    writer = MPFsspecWriter(f"{folder}/beside", num_workers=1, async_staging=True)
    for number in range(2):
        state = small_state(7 + number)
        response = process_save(state, None, writer=writer)
        response.staging_completion.result(30)
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
        assert settled(response.upload_completion) is None
        assert_holds(f"{folder}/beside", small_state(7 + number))
    writer.close()

# Without a checkpoint process there is an error, at once, and no leak.
plan.add("open", "*.distcp", block=True)
future = process_save(small_state(1), f"fault://{folder}/gone", **plan.options)
wait_until(lambda: plan.calls("open", phase="begin"))
pids = tree_pids(checkpointer())[1:]
os.kill(checkpointer(), signal.SIGKILL)
said["gone"] = f"{settled(future)}"
assert leased_bytes() == 0
assert not os.path.exists(f"{folder}/gone/.metadata")
plan.release()
plan.clear()
assert all_gone(pids, within_s=10)
said["still gone"] = f"{settled(process_save(small_state(1), f'{folder}/gone'))}"
assert leased_bytes() == 0

# The trainer's own workers still serve.
assert settled(async_save(small_state(9), f"{folder}/thread")) is None
assert_holds(f"{folder}/thread", small_state(9))
print(json.dumps(said))
"""
)


@pytest.mark.skipif(
    not SENDS_WHERE_IT_SAVES,
    reason="torch 2.7 waits for ever for its checkpoint process, which a failed save has ended",
)
def test_process_mode_gives_memory_back_when_something_fails(
    start_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    """G05: a dead worker, a full disk, torch's stagers, a dead checkpoint process."""
    trainer = start_trainer(_FAILING, tmp_path)
    trainer.assert_succeeded()
    said = json.loads(trainer.stdout)
    assert "WorkerDiedError" in said["killed"] and "SIGKILL" in said["killed"]
    assert "No space left" in said["full"]
    assert "dead" in said["gone"] and said["still gone"] != "None"


_ODD = (
    _BEGIN
    + """
if sys.argv[2] != "default":
    torch.multiprocessing.set_sharing_strategy(sys.argv[2])
before = set(os.listdir("/dev/shm"))
state = {
    **{f"w{n}": torch.randn(1000) + n for n in range(50)},
    "empty": torch.empty(0, 3),
    "pair": (torch.ones(3), "text"),
    "object": [{1, 2}, "text"],
}
for number in range(3):
    for n in range(50):
        state[f"w{n}"].fill_(number + n)
    future = process_save(state, f"{folder}/{number}")
    state["w0"].zero_()
    assert settled(future) is None, future.exception()
    state["w0"].fill_(number)
    assert_loads(f"{folder}/{number}", state)
    assert leased_bytes() == 0
assert not [name for name in set(os.listdir("/dev/shm")) - before if "torch_" in name]
"""
)


def test_process_mode_needs_no_temporary_directory(
    start_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    """Invariants 7 and 13: 120 characters of TMPDIR, or none; either sharing strategy."""
    long = tmp_path / (120 * "x")
    long.mkdir()
    cases = [
        (long, "default"),
        (tmp_path / "missing", "file_system"),
    ]
    trainers = []
    for number, (place, strategy) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        trainers.append(start_trainer(_ODD, folder, strategy, env={"TMPDIR": str(place)}))
    for trainer in trainers:
        trainer.assert_succeeded()
    # torch 2.7 makes a folder of its own when it is imported, for torch.distributed.nn.jit.
    left = [name for name in os.listdir(long) if not list((long / name).glob("_remote_module*"))]
    assert left == [] and not (tmp_path / "missing").exists()
