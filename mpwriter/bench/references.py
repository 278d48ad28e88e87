"""What the call of `async_save` is compared with: plain copies of the same bytes.

Runs in: trainer.

Each is timed as the call is, right after steps of the training loop: a state that has just been
copied is still in the caches, and a state that was trained on is not.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mpwriter import MPFsspecWriter
from mpwriter.bench.places import Place
from mpwriter.bench.states import BenchState

__all__ = ["CopyTimes", "measure_copies"]

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class CopyTimes:
    """Seconds for the bytes of one state.

    Attributes:
        loop_s: `copy_` tensor by tensor into warm ordinary memory; page-locked memory, and one
            wait at the end, where the state is on an accelerator.
        shared_loop_s: the same into warm shared memory, which has small pages; None where the
            system has no memfd.
        flat_s: one copy of as many bytes.
        stage_s: `MPFsspecWriter.stage()` alone.
    """

    loop_s: float
    shared_loop_s: float | None
    flat_s: float
    stage_s: float


def measure_copies(
    state: BenchState, place: Place, num_workers: int, train: Callable[[], object]
) -> CopyTimes:
    """Measure each once. Takes twice the state's memory while it runs.

    Args:
        state: whose bytes.
        place: for the writer whose staging is timed.
        num_workers: of that writer.
        train: called before each copy.

    Raises:
        StagingMemoryError: `stage()` finds no room.
    """
    sources = list(state.tensors())
    on_cpu = all(source.is_cpu for source in sources)
    nbytes = sum(map(_room_bytes, sources))
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=not on_cpu).zero_()
    loop_s = _timed_copy(_views(target, sources), sources, train)
    shared_loop_s = None
    flat = torch.empty(0, dtype=torch.uint8)
    if on_cpu and hasattr(os, "memfd_create"):
        flat = _shared(nbytes).zero_()
        shared_loop_s = _timed_copy(_views(flat, sources), sources, train)
    else:
        flat = torch.zeros(nbytes, dtype=torch.uint8, device=sources[0].device)
    flat_s = _timed_copy([target], [flat], train)
    del target, flat
    writer = MPFsspecWriter(place.fresh_url(), num_workers=num_workers, **place.storage_options)
    train()
    return CopyTimes(loop_s, shared_loop_s, flat_s, _stage_s(state, writer))


def _stage_s(state: BenchState, writer: MPFsspecWriter) -> float:
    began = time.perf_counter()
    staged = writer.stage(state.state_dict)
    stage_s = time.perf_counter() - began
    del staged  # its memory goes back
    return stage_s


def _timed_copy(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], train: Callable[[], object]
) -> float:
    train()
    device = sources[0].device
    began = time.perf_counter()
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter() - began


def _views(buffer: torch.Tensor, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Places in `buffer` for tensors like these, one after another."""
    views, start = [], 0
    for like in likes:
        view = buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)
        views.append(view)
        start += _room_bytes(like)
    return views


def _room_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _shared(nbytes: int) -> torch.Tensor:
    """Memory such as the arena has, without the arena."""
    fd = os.memfd_create("mpwriter-bench")
    try:
        os.ftruncate(fd, nbytes)
        return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
    finally:
        os.close(fd)
