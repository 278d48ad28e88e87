"""The order of the last steps: shards complete and durable, then `.metadata`; nothing host-wide."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes import FaultPlan
from tests.saves import assert_holds, names_in, save, small_state
from tests.trainers import Trainer


@pytest.mark.parametrize("sync_files", [True, False])
@pytest.mark.parametrize(
    ("protocol", "options", "last_step"),
    [
        ("fault", {}, "mv"),
        ("fault", {"fileno": False}, "mv"),
        ("objectlike", {}, "cp"),
        ("closelike", {}, "close"),
        ("commitlike", {}, "commit"),
    ],
)
def test_save_closes_every_shard_before_it_opens_the_metadata(
    checkpoint_dir: Path,
    plan: FaultPlan,
    protocol: str,
    options: dict[str, bool],
    last_step: str,
    sync_files: bool,
) -> None:
    """A06: also for files without a number that appear when they are closed."""
    plan.add("close", "__0_*", sleep_s=0.02)  # what comes too early, comes into the log before
    place = f"{protocol}://{checkpoint_dir}"
    save(place, small_state(1), sync_files=sync_files, **options, **plan.options)
    opened = min(call.at_s for call in plan.calls("open", ".metadata", phase="begin"))
    closed = [call for call in plan.calls("close", "__0_*") if call.result == "ok"]
    published = plan.calls(last_step, "__0_*")
    assert len({call.name for call in closed}) == len({call.name for call in published}) == 2
    assert max(call.at_s for call in [*closed, *published]) < opened
    assert [call.name for call in plan.calls(last_step, ".metadata")] == [".metadata"]
    assert names_in(checkpoint_dir)[0] == ".metadata"
    assert_holds(checkpoint_dir, small_state(1))


# Every process of the tree writes down its calls; imported in workers as the interpreter starts.
_SPY = """
import os, sys

def _spy(name):
    real = getattr(os, name)
    def called(*args):
        where = args[0] if args else None
        target = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else str(where)
        fd = os.open(os.environ["SPY_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, f"{os.getpid()} {name} {target}\\n".encode())
        os.close(fd)
        return real(*args)
    setattr(os, name, called)

for _name in ("sync", "fsync", "fdatasync"):
    _spy(_name)
"""

_TRAINER = """
import json, os, sys
import sitecustomize_of_this_test
from tests.saves import *
out = {}
for sync_files in (True, False):
    for fileno in (True, False):
        log = os.environ["SPY_LOG"]
        open(log, "w").close()
        place = f"fault://{sys.argv[1]}/{sync_files}-{fileno}"
        save(place, small_state(1), sync_files=sync_files, fileno=fileno)
        assert_holds(place.removeprefix("fault://"), small_state(1))
        out[f"{sync_files}-{fileno}"] = open(log).read().splitlines()
print(json.dumps({"pid": os.getpid(), "workers": worker_pids(), "calls": out}))
"""


def test_save_syncs_its_own_files_and_never_the_host(
    start_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    """A06: no os.sync in the trainer or the workers; fsync of files and directory when asked."""
    spies = tmp_path / "spies"
    spies.mkdir()
    for name in ("sitecustomize.py", "sitecustomize_of_this_test.py"):
        (spies / name).write_text(_SPY)
    trainer = start_trainer(
        f"import sys; sys.path.insert(0, {str(spies)!r})\n{_TRAINER}",
        tmp_path,
        env={"PYTHONPATH": str(spies), "SPY_LOG": str(tmp_path / "log")},
    )
    trainer.assert_succeeded()
    found = json.loads(trainer.stdout)
    for kind, lines in found["calls"].items():
        calls = [line.split(" ", 2) for line in lines]
        assert not [call for call in calls if call[1] == "sync"], kind
        files = [target for _, _, target in calls if target.endswith(".tmp")]
        if kind == "True-True":
            assert len(files) == 3, "two shards and .metadata"
            workers = {int(pid) for pid, _, target in calls if "/.__0_" in target}
            assert workers and workers <= set(found["workers"])
        else:
            assert files == [], kind
        synced = {Path(target).name for _, _, target in calls}
        assert (kind in synced) == kind.startswith("True"), "the directory"
