"""Values of more than 2 GiB, and what they cost in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import trainers
from tests.memory import PeakMemory
from tests.trainers import Trainer

pytestmark = pytest.mark.slow

NUM_BYTES = int(2.2 * (1 << 30))

# The default of per_worker_copy_ahead.
WINDOW_BYTES = 64 << 20

# `Resolver` writes nothing: what DCP itself needs to turn the state into bytes.
_VALUE = """
import sys, warnings
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from mpwriter import FsspecReader, MPFsspecWriter

kind, path, num_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
warnings.simplefilter("ignore")

class Resolver(StorageWriter):
    def reset(self, checkpoint_id=None): pass
    def storage_meta(self): return StorageMeta()
    def set_up_storage_writer(self, is_coordinator, *args, **kwargs): pass
    def prepare_local_plan(self, plan): return plan
    def prepare_global_plan(self, plans): return plans
    def finish(self, metadata, results): pass
    def validate_checkpoint_id(cls, checkpoint_id): return True
    def write_data(self, plan, planner):
        results = []
        for item in plan.items:
            planner.resolve_data(item)
            results.append(WriteResult(item.index, 0, None))
        future = Future()
        future.set_result(results)
        return future

def value():
    if kind == "bytes":
        return b"0123456789abcdef" * (num_bytes // 16)
    return torch.arange(256, dtype=torch.uint8).repeat(num_bytes // 256)
"""

_SAVE = f"""{_VALUE}
state = {{"value": value()}}
writer = Resolver() if path == "nowhere" else MPFsspecWriter(path, num_workers=2, sync_files=False)
dcp.save(state, storage_writer=writer)
"""

_LOAD = f"""{_VALUE}
expected = value()
state = {{"value": b"" if kind == "bytes" else torch.zeros(len(expected), dtype=torch.uint8)}}
dcp.load(state, storage_reader=FsspecReader(path))
if kind == "bytes":
    assert state["value"] == expected
else:
    assert torch.equal(state["value"], expected)
"""


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    # Pickling 2 GiB alone takes 10 s on an idle machine.
    monkeypatch.setattr(trainers, "WATCHDOG_S", 180.0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["bytes", "tensor"])
def test_save_keeps_a_value_of_more_than_two_gib(
    start_trainer: Callable[..., Trainer], checkpoint_dir: Path, kind: str
) -> None:
    """C16: through pipes it would break. At its peak the tree of processes holds what DCP itself
    needs (five times the value where it is pickled), and at most a quarter of the value on top.
    """
    peaks = []
    for place in ("nowhere", checkpoint_dir):
        trainer = start_trainer(_SAVE, kind, place, NUM_BYTES)
        with PeakMemory(trainer.pid) as peak:
            trainer.assert_succeeded()
        peaks.append(peak.pss_bytes)
    assert peaks[0] >= NUM_BYTES
    assert peaks[1] <= peaks[0] + NUM_BYTES // 4
    start_trainer(_LOAD, kind, checkpoint_dir, NUM_BYTES).assert_succeeded()


_ONE_TENSOR = """
import json, sys
import torch
from tests.saves import *

state = {"weight": torch.full((1 << 28,), 3.0)}
save(sys.argv[1], state, num_workers=1, sync_files=False)
peaks = []
for pid in worker_pids():
    with open(f"/proc/{pid}/status") as status:
        peaks += [int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:")]
print(json.dumps(peaks))
assert_holds(sys.argv[1], state)
"""


@pytest.mark.timeout(200)
def test_worker_holds_no_whole_tensor(
    start_trainer: Callable[..., Trainer], checkpoint_dir: Path
) -> None:
    """D07: 1 GiB in one tensor; the worker's peak RSS is the copy-ahead window and itself."""
    trainer = start_trainer(_ONE_TENSOR, checkpoint_dir)
    trainer.assert_succeeded()
    (peak,) = json.loads(trainer.stdout)
    assert peak < WINDOW_BYTES + (64 << 20)
