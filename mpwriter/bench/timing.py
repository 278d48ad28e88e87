"""Timing saves: one at a time, in rounds, everybody in every round.

Runs in: trainer. One run at a time: CPU seconds are those of the whole process.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpwriter.bench import process_tree
from mpwriter.bench.places import Place
from mpwriter.bench.states import BenchState
from mpwriter.bench.subjects import Subject

__all__ = ["Sample", "timed_rounds", "timed_save"]


@dataclass(frozen=True)
class Sample:
    """One save, from making the writer to a durable checkpoint.

    Attributes:
        wall_s: seconds the caller waited.
        trainer_cpu_s: CPU seconds of this process, all threads.
        workers_cpu_s: CPU seconds of its children; None where /proc is missing.
        pickle_s: of these, pickling the metadata, where that is measured.
    """

    wall_s: float
    trainer_cpu_s: float
    workers_cpu_s: float | None
    pickle_s: float = 0.0


def timed_save(subject: Subject, state: BenchState, place: Place, url: str) -> Sample:
    """Save once and measure; nothing is removed.

    Raises:
        Whatever the writer raises.
    """
    gc.collect()  # what earlier runs left is not this one's to clean up
    place.ranks.barrier()
    workers_began, cpu_began = _workers_cpu_s(), _own_cpu_s()
    began = time.perf_counter()
    pickle_s = subject.save(state, place, url)
    wall_s = time.perf_counter() - began
    trainer_cpu_s, workers_ended = _own_cpu_s() - cpu_began, _workers_cpu_s()
    workers_cpu_s = None
    if workers_began is not None and workers_ended is not None:
        workers_cpu_s = max(workers_ended - workers_began, 0.0)
    return Sample(wall_s, trainer_cpu_s, workers_cpu_s, pickle_s)


def timed_rounds(
    state: BenchState,
    subjects: Sequence[Subject],
    place: Place,
    num_rounds: int,
    *,
    seed: int = 0,
    before: Callable[[Subject], None] = lambda subject: None,
    after: Callable[[Subject, str], None] = lambda subject, url: None,
) -> dict[Subject, list[Sample]]:
    """Save with every subject in every round, in a new random order each time.

    What the machine does meanwhile then hits all of them alike. The first round warms up (page
    tables, workers, caches of the filesystem) and is not counted.

    Args:
        state: what is saved.
        subjects: who saves it.
        place: where to.
        num_rounds: counted ones, without the first.
        seed: of the orders.
        before: called ahead of each save, outside the measured time.
        after: called after each save with the checkpoint's URL, while it exists.

    Raises:
        Whatever a writer raises.
    """
    shuffler = random.Random(seed)
    samples: dict[Subject, list[Sample]] = {subject: [] for subject in subjects}
    for number in range(num_rounds + 1):
        for subject in shuffler.sample(list(subjects), len(subjects)):
            before(subject)
            url = place.fresh_url()
            sample = timed_save(subject, state, place, url)
            after(subject, url)
            place.remove(url)
            if number > 0:
                samples[subject].append(sample)
    return samples


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _workers_cpu_s() -> float | None:
    return process_tree.descendants_cpu_s(os.getpid()) if process_tree.available() else None
