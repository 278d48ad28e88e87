"""Saves and loads of small states, for tests and for the trainers that they start."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from mpwriter import FsspecReader, MPFsspecWriter
from mpwriter._pool import get_pool

__all__ = [
    "assert_holds",
    "failure_in_save",
    "failure_of",
    "load",
    "names_in",
    "open_fds",
    "save",
    "save_and_count",
    "small_state",
    "tree_pids",
    "worker_pids",
]

State = dict[str, Any]


def small_state(number: int = 0, *, num_tensors: int = 4, numel: int = 1000) -> State:
    """Tensors and an object whose values tell the number and each other apart."""
    state: State = {
        f"layer{n}.weight": torch.arange(numel, dtype=torch.float32) + 1000 * n + number
        for n in range(num_tensors)
    }
    return {**state, "step": number}


def save(
    path: str | os.PathLike[str], state: State, *, num_workers: int = 2, **options: Any
) -> MPFsspecWriter:
    """Save with a writer of its own."""
    writer = MPFsspecWriter(path, num_workers=num_workers, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, storage_writer=writer)
    return writer


def load(path: str | os.PathLike[str], like: State) -> State:
    """Load what `like` has keys for into a state of other values."""
    target = {
        key: torch.full_like(value, -1) if isinstance(value, torch.Tensor) else -1
        for key, value in like.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(target, storage_reader=FsspecReader(path, num_workers=1))
    return target


def assert_holds(path: str | os.PathLike[str], state: State) -> None:
    """The checkpoint at `path` loads, and its values are those of `state`."""
    loaded = load(path, state)
    for key, value in state.items():
        same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
        assert same(loaded[key], value), key


def failure_of(error: BaseException, rank: int = 0) -> BaseException:
    """What the rank raised, out of DCP's exception around it."""
    assert isinstance(error, CheckpointException), repr(error)
    return error.failures[rank][0]


def failure_in_save(*args: Any, **options: Any) -> BaseException:
    """What the rank raises in a save that fails; arguments as of `save`."""
    try:
        save(*args, **options)
    except CheckpointException as error:
        return failure_of(error)
    raise AssertionError("the save has succeeded")


def names_in(folder: str | os.PathLike[str]) -> list[str]:
    """Every name below `folder`, hidden ones too; none where it does not exist."""
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


def worker_pids() -> list[int]:
    """Process ids of this process's live workers."""
    return sorted(get_pool().pids())


def open_fds(pid: int | None = None) -> int:
    """How many file descriptors a process has, not counting the one that looks."""
    return len(os.listdir(f"/proc/{pid or 'self'}/fd")) - (pid is None)


def tree_pids(pid: int | None = None) -> list[int]:
    """A process and all below it."""
    process = psutil.Process(pid)
    return [process.pid, *(child.pid for child in process.children(recursive=True))]


def save_and_count(path: str, number: int, report_to: str | None = None) -> int:
    """Save `small_state(number)`; how many worker processes took part."""
    report = save(path, small_state(number)).last_report
    assert report is not None
    if report_to is not None:
        Path(report_to).write_text(str(report.num_workers))
    return report.num_workers
