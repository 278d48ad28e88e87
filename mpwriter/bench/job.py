"""From the figures of all ranks to those of the job: it has saved when its slowest rank has.

Runs in: trainer, on the first rank. Pure.

Per round: seconds are those of the slowest rank, CPU seconds and bytes are sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mpwriter.bench.async_mode import AsyncFigures
from mpwriter.bench.async_subjects import AsyncSubject
from mpwriter.bench.async_timing import AsyncSample
from mpwriter.bench.load_mode import LoadFigures, LoadSample
from mpwriter.bench.references import CopyTimes
from mpwriter.bench.sync_mode import StateFigures
from mpwriter.bench.timing import Sample

__all__ = ["JobSample", "job_of_async_saves", "job_of_loads", "job_of_saves"]


@dataclass(frozen=True)
class JobSample(AsyncSample):
    """One save of all ranks: the worst figure of any, and the steps of all.

    Attributes:
        of_ranks: each one's own.
    """

    of_ranks: Sequence[AsyncSample] = field(default=(), repr=False)

    @property
    def share(self) -> float:
        return min(sample.share for sample in self.of_ranks)

    @property
    def lost_s(self) -> float:
        return max(sample.lost_s for sample in self.of_ranks)


def job_of_saves(ranks: Sequence[StateFigures]) -> StateFigures:
    """Of blocking saves.

    Args:
        ranks: figures of the same rounds, in the order of ranks.
    """
    first = ranks[0]
    timing = {
        subject: [_slowest_save(of_round) for of_round in zip(*(r.timing[subject] for r in ranks))]
        for subject in first.timing
    }
    nbytes = sum(rank.nbytes for rank in ranks)
    return StateFigures(
        first.name, first.num_tensors, nbytes, timing, missing=first.missing, ranks=ranks
    )


def job_of_async_saves(ranks: Sequence[AsyncFigures]) -> AsyncFigures:
    """Of saves in the background: training goes on when it does on all ranks."""
    first = ranks[0]
    samples: dict[AsyncSubject, list[AsyncSample]] = {
        subject: [_worst_save(of_round) for of_round in zip(*(r.samples[subject] for r in ranks))]
        for subject in first.samples
    }
    copies = [_slowest_copy(of_round) for of_round in zip(*(rank.copies for rank in ranks))]
    nbytes = sum(rank.nbytes for rank in ranks)
    return AsyncFigures(
        first.name, first.num_tensors, nbytes, samples, first.failures, copies, ranks
    )


def job_of_loads(ranks: Sequence[LoadFigures]) -> LoadFigures:
    """Of loads."""
    first = ranks[0]
    samples = {
        label: [_slowest_load(of_round) for of_round in zip(*(r.samples[label] for r in ranks))]
        for label in first.samples
    }
    nbytes = sum(rank.nbytes for rank in ranks)
    return LoadFigures(first.name, first.num_tensors, nbytes, samples, first.missing, ranks)


def _slowest_save(of_round: Sequence[Sample]) -> Sample:
    workers = [sample.workers_cpu_s for sample in of_round if sample.workers_cpu_s is not None]
    return Sample(
        max(sample.wall_s for sample in of_round),
        sum(sample.trainer_cpu_s for sample in of_round),
        sum(workers) if len(workers) == len(of_round) else None,
        max(sample.pickle_s for sample in of_round),  # the coordinator's; others pickle nothing
    )


def _slowest_load(of_round: Sequence[LoadSample]) -> LoadSample:
    wall_s = max(sample.wall_s for sample in of_round)
    return LoadSample(wall_s, sum(sample.cpu_s for sample in of_round))


def _worst_save(of_round: Sequence[AsyncSample]) -> JobSample:
    return JobSample(
        stall_s=max(sample.stall_s for sample in of_round),
        staged_s=max(sample.staged_s for sample in of_round),
        save_s=max(sample.save_s for sample in of_round),
        window_s=max(sample.window_s for sample in of_round),
        steps_s=[step for sample in of_round for step in sample.steps_s],
        idle_steps_s=[step for sample in of_round for step in sample.idle_steps_s],
        idle_others=max(sample.idle_others for sample in of_round),
        others=max(sample.others for sample in of_round),
        of_ranks=of_round,
    )


def _slowest_copy(of_round: Sequence[CopyTimes]) -> CopyTimes:
    slowest: dict[str, Any] = {}
    for name in (one.name for one in fields(CopyTimes)):
        times = [getattr(copies, name) for copies in of_round]
        slowest[name] = None if None in times else max(times)
    return CopyTimes(**slowest)
