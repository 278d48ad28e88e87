"""Blocking saves: timing, the first save of a process, memory.

Runs in: trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mpwriter.bench import process_tree
from mpwriter.bench.fresh import ColdSave, MemoryUse, cold_save, measure_memory
from mpwriter.bench.options import Options
from mpwriter.bench.places import Place
from mpwriter.bench.progress import ProgressBar
from mpwriter.bench.states import BenchState, build_state
from mpwriter.bench.subjects import Subject, choose_subjects
from mpwriter.bench.timing import Sample, timed_rounds
from mpwriter.bench.verify import verify_checkpoint

__all__ = ["StateFigures", "measure_sync", "time_state"]

_WARM_SAVES = 2  # after each cold one: what it is compared with, in the same process
_MEMORY_SAVES = 3  # a first save, then others in memory that is warm


@dataclass
class StateFigures:
    """Everything measured with one state; passes that were not asked for are empty."""

    name: str
    num_tensors: int
    nbytes: int
    timing: dict[Subject, list[Sample]] = field(default_factory=dict)
    cold: dict[Subject, list[ColdSave]] = field(default_factory=dict)
    memory: dict[Subject, MemoryUse] = field(default_factory=dict)
    missing: dict[Subject, str] = field(default_factory=dict)  # who cannot take part, and why
    ranks: Sequence[StateFigures] = ()  # under torchrun, each one's own; the rest is the job's


def measure_sync(
    options: Options, place: Place, report: Callable[[StateFigures], None]
) -> list[StateFigures]:
    """Run the passes that `options` asks for.

    Args:
        options: what to measure.
        place: where to save.
        report: called with a state's figures as soon as they are complete.

    Raises:
        Whatever a writer raises; RuntimeError when `verify` finds a difference.
    """
    chosen = choose_subjects(
        options.families,
        options.workers,
        options.threads,
        local=place.local_path is not None,
        url=place.url,
    )
    missing = {subject: why for subject in chosen if (why := subject.missing())}
    subjects = [subject for subject in chosen if subject not in missing]
    figures = []
    silent = not place.ranks.is_first
    with ProgressBar(_num_steps(options, subjects), silent=silent) as bar:
        for name in options.states:
            state = build_state(name, quick=options.quick, ranks=place.ranks)
            of_state = StateFigures(name, state.num_tensors, state.nbytes, missing=missing)
            if "timing" in options.passes:
                of_state.timing = time_state(state, subjects, place, options, bar)
            del state  # the fresh processes need the room for theirs
            _run_fresh_passes(of_state, subjects, place, options, bar)
            bar.clear()
            report(of_state)
            figures.append(of_state)
    return figures


def time_state(
    state: BenchState,
    subjects: Sequence[Subject],
    place: Place,
    options: Options,
    bar: ProgressBar,
) -> dict[Subject, list[Sample]]:
    """The timing pass with one state; verifies each subject's first checkpoint if asked to.

    Raises:
        As `measure_sync`.
    """
    unverified = {subject for subject in subjects if subject.writes_checkpoint}

    def after(subject: Subject, url: str) -> None:
        if options.verify and subject in unverified:
            unverified.discard(subject)
            verify_checkpoint(state, place, url)
        bar.step()

    return timed_rounds(
        state,
        subjects,
        place,
        options.num_rounds,
        seed=options.seed,
        before=lambda subject: bar.show(f"{state.name}: {subject.label}"),
        after=after,
    )


def _run_fresh_passes(
    figures: StateFigures,
    subjects: Sequence[Subject],
    place: Place,
    options: Options,
    bar: ProgressBar,
) -> None:
    for _ in range(options.num_cold_rounds):
        for subject in _cold_subjects(options, subjects):
            bar.show(f"{figures.name}, new process: {subject.label}")
            measured = cold_save(
                subject, figures.name, place, quick=options.quick, num_warm=_WARM_SAVES
            )
            figures.cold.setdefault(subject, []).append(measured)
            bar.step()
    for subject in _memory_subjects(options, subjects):
        bar.show(f"{figures.name}, memory: {subject.label}")
        figures.memory[subject] = measure_memory(
            subject, figures.name, place, quick=options.quick, num_saves=_MEMORY_SAVES
        )
        bar.step()


def _cold_subjects(options: Options, subjects: Sequence[Subject]) -> list[Subject]:
    """One of each kind, since every figure costs the start of a process.

    DCP alone is among them: its first save is slower than the next one, too.
    """
    if "cold" not in options.passes:
        return []
    chosen = []
    for family in ("ours", "fsspec", "planning"):
        members = [subject for subject in subjects if subject.family == family]
        if members:
            chosen.append(min(members, key=lambda subject: abs(subject.parallelism - 2)))
    return chosen


def _memory_subjects(options: Options, subjects: Sequence[Subject]) -> list[Subject]:
    if "memory" not in options.passes or not process_tree.available():
        return []
    return [subject for subject in subjects if subject.family in ("ours", "fsspec")]


def _num_steps(options: Options, subjects: Sequence[Subject]) -> int:
    timing = (options.num_rounds + 1) * len(subjects) if "timing" in options.passes else 0
    cold = options.num_cold_rounds * len(_cold_subjects(options, subjects))
    return len(options.states) * (timing + cold + len(_memory_subjects(options, subjects)))
