"""The lines of the table of blocking saves, as figures.

Runs in: trainer. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from mpwriter.bench.stats import Summary, summarize
from mpwriter.bench.subjects import STOCK_FAMILIES, Subject
from mpwriter.bench.timing import Sample

__all__ = ["TimingRow", "best_row", "least_own_s", "timing_rows"]


@dataclass(frozen=True)
class TimingRow:
    """One line of the timing table.

    Attributes:
        subject: who saved.
        wall: seconds that `dcp.save` took.
        over_planning_s: median, less that of DCP with a writer that writes nothing; None
            without such a measurement, or for one that does no planning.
        own_s: the same, less the pickling of the metadata: the writer's own share.
        trainer_cpu_s: median CPU seconds of the trainer.
        workers_cpu_s: median CPU seconds of its children, None if not known.
    """

    subject: Subject
    wall: Summary
    over_planning_s: float | None
    own_s: float | None
    trainer_cpu_s: float
    workers_cpu_s: float | None


def timing_rows(timing: Mapping[Subject, Sequence[Sample]]) -> list[TimingRow]:
    """A row a subject, in the order given."""
    planning_s = _family_median(timing, "planning", "wall_s")
    pickle_s = _family_median(timing, "metadata", "pickle_s")
    rows = []
    for subject, samples in timing.items():
        wall = summarize([sample.wall_s for sample in samples])
        over_planning_s = own_s = None
        if subject.writes_checkpoint and planning_s is not None:
            over_planning_s = wall.median - planning_s
            own_s = None if pickle_s is None else over_planning_s - pickle_s
        workers = [s.workers_cpu_s for s in samples if s.workers_cpu_s is not None]
        rows.append(
            TimingRow(
                subject,
                wall,
                over_planning_s,
                own_s,
                median(sample.trainer_cpu_s for sample in samples),
                median(workers) if workers else None,
            )
        )
    return rows


def best_row(rows: Sequence[TimingRow], families: Sequence[str]) -> TimingRow | None:
    """The row with the lowest median among `families`."""
    chosen = [row for row in rows if row.subject.family in families]
    return min(chosen, key=lambda row: row.wall.median, default=None)


def least_own_s(rows: Sequence[TimingRow]) -> float | None:
    """The smallest share of a stock writer, where it was measured."""
    stock = [row.own_s for row in rows if row.subject.family in STOCK_FAMILIES]
    return min((own_s for own_s in stock if own_s is not None), default=None)


def _family_median(
    timing: Mapping[Subject, Sequence[Sample]], family: str, figure: str
) -> float | None:
    values = [
        getattr(sample, figure)
        for subject, samples in timing.items()
        if subject.family == family
        for sample in samples
    ]
    return median(values) if values else None
