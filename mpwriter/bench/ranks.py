"""The ranks that run the benchmark together under torchrun; without it, one that is alone.

Runs in: trainer. From the main thread, and on all ranks in the same order: each method but
`divide` is a collective.

What the ranks tell each other goes through a group of their own; DCP has the default group to
itself, so that a save which fails half way does not take an answer that is meant for the benchmark.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

__all__ = ["ALONE", "Ranks", "ignore_termination", "join_ranks", "under_torchrun"]

_T = TypeVar("_T")

# Longer than the 600 s that a writer gives a worker: the rank that gives up says why.
_GROUP_TIMEOUT = timedelta(seconds=900)
# A save ends on all ranks at once. One that waits longer for the others has failed on its own.
_MEETING_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True)
class Ranks:
    """This rank among the others.

    Attributes:
        rank: 0 prints and writes files.
        num_ranks: of the job.
        num_local: of them on this machine.
        group: for what the benchmark has to tell; None without torchrun.
        mesh: over which a state is divided.
    """

    rank: int = 0
    num_ranks: int = 1
    num_local: int = 1
    group: Any = field(default=None, repr=False)
    mesh: Any = field(default=None, repr=False)

    @property
    def alone(self) -> bool:
        return self.group is None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def launcher(self) -> int | None:
        """Process id of torchrun here, whose descendants all belong to the job."""
        return None if self.alone else os.getppid()

    def barrier(self) -> None:
        """Wait for all ranks."""
        if not self.alone:
            dist.barrier(self.group)

    def shared(self, value: _T) -> _T:
        """The first rank's `value`, on every rank."""
        if self.alone:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def most(self, value: float) -> float:
        """The largest `value` of all ranks, so that all of them decide alike."""
        if self.alone:
            return value
        largest = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return float(largest)

    def gather(self, value: _T) -> list[_T] | None:
        """Everybody's `value` in the order of ranks, on the first; None on the others."""
        if self.alone:
            return [value]
        values: list[Any] | None = [None] * self.num_ranks if self.is_first else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values

    def agree_on_failure(self, failure: str | None) -> None:
        """Return if all ranks have failed, or none; to be called after a save.

        Raises:
            RuntimeError: some have failed and others not, or do not come.
        """
        if self.alone:
            return
        try:
            dist.monitored_barrier(self.group, timeout=_MEETING_TIMEOUT)
        except RuntimeError as error:
            here = failure or "no failure here"
            raise RuntimeError(f"other ranks do not come to the end of a save ({here})") from error
        failures: list[str | None] = [None] * self.num_ranks
        dist.all_gather_object(failures, failure, group=self.group)
        failed = {rank: text for rank, text in enumerate(failures) if text is not None}
        if failed and len(failed) < self.num_ranks:
            raise RuntimeError(f"a save has failed on some ranks only: {failed}")

    def divide(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of `tensor` by rows, as FSDP2 divides a parameter.

        A scalar stays whole, and so does everything where there are no other ranks.
        """
        if self.alone or tensor.dim() == 0:
            return tensor
        parts = tensor.chunk(self.num_ranks)
        empty = tensor.new_empty((0, *tensor.shape[1:]))
        # A copy: a view would keep the whole in memory.
        part = parts[self.rank].clone() if self.rank < len(parts) else empty
        return DTensor.from_local(
            part,
            self.mesh,
            [Shard(0)],
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )


ALONE = Ranks()


def under_torchrun(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is a rank, by the variables that torchrun sets."""
    environ = os.environ if environ is None else environ
    return "RANK" in environ and "WORLD_SIZE" in environ


@contextmanager
def join_ranks() -> Iterator[Ranks]:
    """Meet the other ranks, if there are any, and part at the end.

    Under torchrun an error in the block ends this process at once, after its traceback: the usual
    way out of Python waits for saves in the background, which wait for this rank, and torchrun
    would never know. It ends the other ranks as soon as one is gone.
    """
    if not under_torchrun():
        yield ALONE
        return
    signal.signal(signal.SIGTERM, _raise_exit)  # what torchrun sends; the place is to be removed
    try:
        ranks = _join()
        yield ranks
        ranks.barrier()
    except BaseException as error:
        _end_process(error)
    dist.destroy_process_group()


def ignore_termination(ranks: Ranks) -> None:
    """Let nothing but SIGKILL disturb what is done at the very end, under torchrun."""
    if not ranks.alone:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _join() -> Ranks:
    dist.init_process_group("gloo", timeout=_GROUP_TIMEOUT)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    mesh = init_device_mesh("cpu", (num_ranks,))
    group = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT)
    return Ranks(rank, num_ranks, num_local, group, mesh)


def _raise_exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _end_process(error: BaseException) -> None:
    status: Any = 1
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(cast(int, status))
