"""What the figures of blocking saves say: tables, findings, JSON.

Runs in: trainer. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from mpwriter.bench.fresh import ColdSave
from mpwriter.bench.stats import ratio
from mpwriter.bench.subjects import STOCK_FAMILIES
from mpwriter.bench.sync_mode import StateFigures
from mpwriter.bench.sync_rows import TimingRow, best_row, least_own_s, timing_rows
from mpwriter.bench.table import (
    MISSING,
    TimeUnit,
    among_ranks,
    format_bytes,
    format_ratio,
    format_seconds,
    ranks_as_json,
    render_table,
    time_unit,
)

__all__ = [
    "LEGEND",
    "TimingRow",
    "best_row",
    "figures_as_json",
    "findings",
    "state_report",
    "timing_rows",
    "timing_table",
]

LEGEND = """\
n         worker processes (MPFsspecWriter) or threads (stock writers)
x stock   how many times as long the best setting of the stock writers takes
own       the writer's own share: less DCP's planning and the pickling of .metadata, which are
          measured with writers that store nothing
CPU       of the trainer's process; workers: of its children
"""

_MIB = 2**20
# Below this a rate per GiB would be the fixed cost of a save, divided by next to nothing.
_LEAST_RATED_BYTES = _MIB


def state_report(figures: StateFigures) -> str:
    """The tables of one state, as text."""
    plural = "s"[: figures.num_tensors != 1]
    size = format_bytes(figures.nbytes)
    head = f"{figures.name}: {figures.num_tensors:,} tensor{plural}, {size}"
    head += among_ranks(len(figures.ranks))
    parts = [head + "\n" + "=" * len(head)]
    if figures.timing:
        parts.append(timing_table(figures))
    if figures.cold:
        parts.append(_cold_table(figures))
    if figures.memory:
        parts.append(_memory_table(figures))
    return "\n\n".join(parts) + "\n"


def timing_table(figures: StateFigures) -> str:
    """The timing pass of one state, a line a subject."""
    rows = timing_rows(figures.timing)
    stock = best_row(rows, STOCK_FAMILIES)
    stock_s, stock_own_s = stock.wall.median if stock else None, least_own_s(rows)
    gib = _rated_gib(figures)
    unit = time_unit(row.wall.median for row in rows)
    cpu_unit = unit if gib is None else TimeUnit("s/GiB", 1.0, 3)
    headers = [
        *("dcp.save", f"median {unit.name}", "min", "max", "GiB/s", "x stock"),
        *(f"own {unit.name}", "x stock", f"CPU {cpu_unit.name}", "workers"),
    ]
    ranks = [(_rank_gib(rank, gib), timing_rows(rank.timing)) for rank in figures.ranks]
    cells = []
    for place, row in enumerate(rows):
        stores = row.subject.family not in ("planning", "metadata")
        comparison = [
            format_ratio(ratio(stock_s, row.wall.median) if stores else None),
            unit.format(row.own_s),
            format_ratio(ratio(stock_own_s, row.own_s)),
        ]
        cells.append(_cells(row.subject.label, row, gib, (unit, cpu_unit), comparison))
        cells += [
            _cells(f"  rank {rank}", rows_of_rank[place], gib_of_rank, (unit, cpu_unit))
            for rank, (gib_of_rank, rows_of_rank) in enumerate(ranks)
        ]
    table = render_table(headers, cells)
    return "\n".join([table, *(f"{s.label}  {why}" for s, why in figures.missing.items())])


def _cells(
    label: str,
    row: TimingRow,
    gib: float | None,
    units: tuple[TimeUnit, TimeUnit],
    comparison: Sequence[str] = (MISSING, MISSING, MISSING),
) -> list[str]:
    """One line; that of a rank has nothing to be compared with."""
    unit, cpu_unit = units
    stores = row.subject.family not in ("planning", "metadata")
    return [
        label,
        *(unit.format(seconds) for seconds in (row.wall.median, row.wall.low, row.wall.high)),
        _rate(gib if stores else None, row.wall.median),
        *comparison,
        cpu_unit.format(_per_gib(row.trainer_cpu_s, gib)),
        cpu_unit.format(_per_gib(row.workers_cpu_s, gib)),
    ]


def _cold_table(figures: StateFigures) -> str:
    medians = [
        (
            subject.label,
            median(save.first_s for save in saves),
            median(median(save.warm_s) for save in saves),
        )
        for subject, saves in figures.cold.items()
    ]
    unit = time_unit(first_s for _, first_s, _ in medians)
    headers = ["new process, median", f"first {unit.name}", f"warm {unit.name}", "difference"]
    cells = [
        [label, unit.format(first_s), unit.format(warm_s), unit.format(first_s - warm_s)]
        for label, first_s, warm_s in medians
    ]
    return render_table(headers, cells)


def _memory_table(figures: StateFigures) -> str:
    headers = ["memory of the tree, MiB", "extra PSS", "memfd", "before", "samples"]
    cells = [
        [
            subject.label,
            *(
                f"{nbytes / _MIB:.1f}"
                for nbytes in (
                    use.extra_pss_bytes,
                    use.shared_memory_bytes,
                    use.baseline_pss_bytes,
                )
            ),
            str(use.num_samples),
        ]
        for subject, use in figures.memory.items()
    ]
    return render_table(headers, cells)


def findings(all_figures: Sequence[StateFigures]) -> list[str]:
    """One line per question that a reader brings: how much faster, at which cost."""
    return [
        f"{figures.name}: {line}"
        for figures in all_figures
        for line in (
            *_timing_findings(figures),
            *_cold_findings(figures),
            *_memory_findings(figures),
        )
    ]


def _timing_findings(figures: StateFigures) -> list[str]:
    rows = timing_rows(figures.timing)
    ours, stock = best_row(rows, ["ours"]), best_row(rows, STOCK_FAMILIES)
    if ours is None or stock is None:
        return []
    labels = f"({ours.subject.label}, {stock.subject.label})"
    lines = [f"dcp.save {_versus(ours.wall.median, stock.wall.median)} {labels}"]
    if ours.own_s is not None:
        lines.append(f"writer's own share {_versus(ours.own_s, least_own_s(rows))}")
    if figures.nbytes >= _LEAST_RATED_BYTES:
        gib = figures.nbytes / 2**30
        cpu_s, stock_cpu_s = (row.trainer_cpu_s / gib for row in (ours, stock))
        lines.append(f"trainer CPU per GiB {_versus(cpu_s, stock_cpu_s)}")
    elif ours.over_planning_s is not None:
        lines.append(f"{format_seconds(ours.over_planning_s)} over a writer that writes nothing")
    return lines


def _cold_findings(figures: StateFigures) -> list[str]:
    return [
        f"first save of a process {format_seconds(_over_warm_s(saves))} over a warm one, "
        f"{subject.label}"
        for subject, saves in figures.cold.items()
        if subject.family == "ours"
    ]


def _memory_findings(figures: StateFigures) -> list[str]:
    return [
        f"extra PSS {format_bytes(use.extra_pss_bytes)}, {subject.label}"
        for subject, use in figures.memory.items()
        if subject.family == "ours"
    ]


def _over_warm_s(saves: Sequence[ColdSave]) -> float:
    return median(save.first_s - median(save.warm_s) for save in saves)


def _versus(ours: float | None, stock: float | None) -> str:
    times = format_ratio(ratio(stock, ours))
    return f"ours {format_seconds(ours)}, stock {format_seconds(stock)}, ratio {times}"


def figures_as_json(figures: StateFigures) -> dict[str, Any]:
    """Every sample and every median, under the subjects' labels."""
    return {
        "name": figures.name,
        "num_tensors": figures.num_tensors,
        "nbytes": figures.nbytes,
        "timing": {
            row.subject.label: {
                **asdict(row.subject),
                "wall_s": row.wall._asdict(),
                "over_planning_s": row.over_planning_s,
                "own_s": row.own_s,
                "trainer_cpu_s": row.trainer_cpu_s,
                "workers_cpu_s": row.workers_cpu_s,
                "samples": [asdict(sample) for sample in figures.timing[row.subject]],
            }
            for row in timing_rows(figures.timing)
        },
        "cold": {
            subject.label: [asdict(save) for save in saves]
            for subject, saves in figures.cold.items()
        },
        "memory": {subject.label: asdict(use) for subject, use in figures.memory.items()},
        "missing": {subject.label: why for subject, why in figures.missing.items()},
        **ranks_as_json(figures.ranks, figures_as_json),
    }


def _rate(gib: float | None, wall_s: float) -> str:
    """In GiB/s; of a far store, in as many digits as say something."""
    if gib is None:
        return "-"
    return f"{gib / wall_s:.{2 if gib / wall_s >= 0.1 else 4}f}"


def _rated_gib(figures: StateFigures) -> float | None:
    return figures.nbytes / 2**30 if figures.nbytes >= _LEAST_RATED_BYTES else None


def _rank_gib(rank: StateFigures, job_gib: float | None) -> float | None:
    """None where the job has no rate either: a column has one unit."""
    return rank.nbytes / 2**30 if job_gib is not None else None


def _per_gib(seconds: float | None, gib: float | None) -> float | None:
    if gib == 0:
        return None  # a rank without a part
    return seconds if seconds is None or gib is None else seconds / gib
