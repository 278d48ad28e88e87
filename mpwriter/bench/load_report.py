"""What the figures of loads say: a table, findings, JSON.

Runs in: trainer. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from mpwriter.bench.load_mode import LOADERS, LoadFigures
from mpwriter.bench.stats import ratio, summarize
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

__all__ = ["LEGEND", "load_figures_as_json", "load_findings", "load_report"]

LEGEND = """\
x stock   how many times as long the faster one of torch's readers takes
own       the reader's own share: less DCP's planning and the reading of .metadata, which are
          measured with a reader that reads nothing else
CPU       of this process, all threads
"""

_FAMILY = {label: family for label, family, _ in LOADERS}
_OURS, _UNVERIFIED = (label for label, family, _ in LOADERS if family == "ours")
_STOCK = ("fsspec", "filesystem")


def load_report(figures: LoadFigures) -> str:
    """The table of one state, as text."""
    size = format_bytes(figures.nbytes)
    head = f"{figures.name}: {figures.num_tensors:,} tensors, {size}"
    head += among_ranks(len(figures.ranks))
    stock_s, stock_own_s = _best(figures, _STOCK), _least_own_s(figures)
    unit = time_unit(_medians(figures).values())
    headers = [
        *("dcp.load", f"median {unit.name}", "min", "max", "GiB/s", "x stock"),
        *(f"own {unit.name}", "x stock", "CPU s"),
    ]
    cells = []
    for label, median_s in _medians(figures).items():
        own_s = _own_s(figures, label)
        comparison = [
            format_ratio(ratio(stock_s, median_s) if _FAMILY[label] != "planning" else None),
            unit.format(own_s),
            format_ratio(ratio(stock_own_s, own_s)),
        ]
        cells.append([label, *_cells(figures, label, unit, comparison)])
        cells += [
            [f"  rank {number}", *_cells(rank, label, unit)]
            for number, rank in enumerate(figures.ranks)
        ]
    lines = [render_table(headers, cells)]
    lines += [f"{label}  {why}" for label, why in figures.missing.items()]
    return f"{head}\n{'=' * len(head)}\n\n" + "\n".join(lines) + "\n"


def _cells(
    figures: LoadFigures,
    label: str,
    unit: TimeUnit,
    comparison: Sequence[str] = (MISSING, MISSING, MISSING),
) -> list[str]:
    """One line without its label; that of a rank has nothing to be compared with."""
    samples = figures.samples[label]
    wall = summarize([sample.wall_s for sample in samples])
    rate = figures.nbytes / 2**30 / wall.median
    return [
        *(unit.format(seconds) for seconds in (wall.median, wall.low, wall.high)),
        f"{rate:.2f}" if _FAMILY[label] != "planning" else MISSING,
        *comparison,
        TimeUnit("s", 1.0, 3).format(median(sample.cpu_s for sample in samples)),
    ]


def load_findings(all_figures: Sequence[LoadFigures]) -> list[str]:
    """One line per question that a reader brings."""
    return [f"{figures.name}: {line}" for figures in all_figures for line in _findings(figures)]


def _findings(figures: LoadFigures) -> list[str]:
    medians = _medians(figures)
    ours, stock = medians.get(_OURS), _best(figures, _STOCK)
    lines = []
    if ours is not None and stock is not None:
        lines.append(f"dcp.load {_versus(ours, stock)}")
        own_s, stock_own_s = _own_s(figures, _OURS), _least_own_s(figures)
        if own_s is not None and stock_own_s is not None:
            lines.append(f"reader's own share {_versus(own_s, stock_own_s)}")
    plain = _best(figures, ("plain",))
    if ours is not None and plain is not None:
        lines.append(f"{format_ratio(ratio(ours, plain))} the time of a plain readinto")
    unverified = medians.get(_UNVERIFIED)
    if ours is not None and unverified is not None:
        lines.append(f"verification costs {100 * (ours / unverified - 1):.0f} %")
    return lines


def load_figures_as_json(figures: LoadFigures) -> dict[str, Any]:
    """Every sample and every median, under the loaders' labels."""
    return {
        "name": figures.name,
        "num_tensors": figures.num_tensors,
        "nbytes": figures.nbytes,
        "loads": {
            label: {
                "wall_s": summarize([sample.wall_s for sample in samples])._asdict(),
                "own_s": _own_s(figures, label),
                "samples": [asdict(sample) for sample in samples],
            }
            for label, samples in figures.samples.items()
        },
        **ranks_as_json(figures.ranks, load_figures_as_json),
    }


def _medians(figures: LoadFigures) -> dict[str, float]:
    return {
        label: median(sample.wall_s for sample in samples)
        for label, samples in figures.samples.items()
    }


def _best(figures: LoadFigures, families: Sequence[str]) -> float | None:
    found = [s for label, s in _medians(figures).items() if _FAMILY[label] in families]
    return min(found, default=None)


def _own_s(figures: LoadFigures, label: str) -> float | None:
    planning_s = _best(figures, ("planning",))
    if planning_s is None or _FAMILY[label] in ("planning", "plain"):
        return None
    return _medians(figures)[label] - planning_s


def _least_own_s(figures: LoadFigures) -> float | None:
    found = [_own_s(figures, label) for label in figures.samples if _FAMILY[label] in _STOCK]
    return min((own_s for own_s in found if own_s is not None), default=None)


def _versus(ours: float, stock: float) -> str:
    times = format_ratio(ratio(stock, ours))
    return f"ours {format_seconds(ours)}, stock {format_seconds(stock)}, ratio {times}"
