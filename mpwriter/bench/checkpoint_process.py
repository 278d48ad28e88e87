"""DCP's checkpoint process, that of AsyncCheckpointerType.PROCESS: start, end, clean up after.

Runs in: trainer. One thread at a time.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_sharer
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from mpwriter._compat import end_checkpoint_process
from mpwriter.bench.empty_writers import PlanningOnlyWriter

__all__ = ["end_checkpoint_process", "release_descriptors", "start_checkpoint_process"]

_CLOSE_TIMEOUT_S = 10.0


def start_checkpoint_process() -> None:
    """Start the process with a save of nothing, which takes seconds; saves then find it.

    It is started with a process group of one rank, which DCP asks for at that time only: saves in
    thread mode are then measured without collectives, as a program of one process has them.

    Raises:
        RuntimeError: it did not start.
    """
    with _group_of_one(), _environment(MASTER_ADDR="127.0.0.1"), _silent_children():
        response: Any = async_save(
            {"nothing": torch.zeros(1)},
            storage_writer=PlanningOnlyWriter(),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        getattr(response, "upload_completion", response).result()


def release_descriptors() -> None:
    """Close what a failed save has left open in this process, thousands of descriptors.

    A tensor on its way to another process leaves one with multiprocessing's resource sharer, which
    keeps it for a receiver that may never come. Call with no reference left to the failed save.
    """
    gc.collect()
    resource_sharer.stop(timeout=_CLOSE_TIMEOUT_S)


@contextmanager
def _group_of_one() -> Iterator[None]:
    if dist.is_initialized():
        yield
        return
    # The store is in this process: no port that somebody else could take.
    module: Any = dist  # which does not declare that it exports it
    dist.init_process_group("gloo", store=module.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set variables for children that are started meanwhile, unless the user has set them."""
    ours = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


@contextmanager
def _silent_children() -> Iterator[None]:
    """Let children that are started meanwhile write their standard error to nowhere.

    DCP makes its process log every step of every save there; errors come back as exceptions.
    """
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
