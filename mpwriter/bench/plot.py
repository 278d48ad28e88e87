"""The timings as a picture.

Runs in: trainer. matplotlib is an optional extra and imported only here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from mpwriter.bench.async_mode import AsyncFigures
from mpwriter.bench.async_report import AsyncRow, async_rows
from mpwriter.bench.stats import Summary
from mpwriter.bench.sync_mode import StateFigures
from mpwriter.bench.sync_report import timing_rows
from mpwriter.bench.table import format_bytes

__all__ = ["can_plot", "plot_lost", "plot_timing"]

_COLOURS = {"ours": "tab:blue", "fsspec": "tab:orange", "filesystem": "tab:red"}
_OTHER_COLOUR = "tab:gray"


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def plot_timing(all_figures: Sequence[StateFigures], path: str) -> None:
    """Draw one panel a state: medians as bars, from the fastest to the slowest round as lines.

    Args:
        all_figures: states; those without a timing pass are left out.
        path: of the PNG file.

    Raises:
        ImportError: matplotlib is missing; ask `can_plot` first.
        OSError: the file cannot be written.
    """
    drawn = [figures for figures in all_figures if figures.timing]
    if not drawn:
        return
    figure, panels = _open_figure([len(figures.timing) for figures in drawn])
    for figures, panel in zip(drawn, panels):
        rows = timing_rows(figures.timing)
        panel.barh(
            [row.subject.label for row in rows],
            [row.wall.median for row in rows],
            xerr=_spreads([row.wall for row in rows]),
            color=[_colour(row.subject.family) for row in rows],
            capsize=3,
        )
        panel.set_xlabel("seconds")
        panel.set_title(_title(figures))
    figure.savefig(path, dpi=120)


def plot_lost(all_figures: Sequence[AsyncFigures], path: str) -> None:
    """Draw one panel a state: training time lost, medians and range, the stall within it darker.

    Raises:
        As `plot_timing`.
    """
    drawn = [figures for figures in all_figures if figures.samples]
    if not drawn:
        return
    figure, panels = _open_figure([len(figures.samples) for figures in drawn])
    for figures, panel in zip(drawn, panels):
        rows: list[AsyncRow] = async_rows(figures)
        labels = [row.subject.label for row in rows]
        colours = [_colour(row.subject.family) for row in rows]
        lost = [row.lost.median for row in rows]
        spreads = _spreads([row.lost for row in rows])
        panel.barh(labels, lost, xerr=spreads, color=colours, alpha=0.5, capsize=3)
        panel.barh(labels, [row.stall.median for row in rows], color=colours, height=0.4)
        panel.set_xlabel("seconds of training lost per save; narrow: stall of the call")
        panel.set_title(_title(figures))
    figure.savefig(path, dpi=120)


def _open_figure(nums_bars: Sequence[int]) -> tuple[Any, list[Any]]:
    """A figure with one panel above the other, each as high as its bars need."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws without a display
    from matplotlib.figure import Figure

    heights = [1 + 0.3 * number for number in nums_bars]
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)
    for (panel,) in panels:
        panel.invert_yaxis()
    return figure, [panel for (panel,) in panels]


def _title(figures: StateFigures | AsyncFigures) -> str:
    return f"{figures.name}: {figures.num_tensors:,} tensors, {format_bytes(figures.nbytes)}"


def _colour(family: str) -> str:
    return _COLOURS.get(family, _OTHER_COLOUR)


def _spreads(summaries: Sequence[Summary]) -> list[list[float]]:
    return [
        [summary.median - summary.low for summary in summaries],
        [summary.high - summary.median for summary in summaries],
    ]
