"""The timings as a picture.

Runs in: trainer. matplotlib is an optional extra and imported only here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from mpwriter.bench.sync_mode import StateFigures
from mpwriter.bench.sync_report import TimingRow, timing_rows
from mpwriter.bench.table import format_bytes

__all__ = ["can_plot", "plot_timing"]

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
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws without a display
    from matplotlib.figure import Figure

    drawn = [figures for figures in all_figures if figures.timing]
    if not drawn:
        return
    figure = Figure(figsize=(9, 3.4 * len(drawn)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(drawn), 1, squeeze=False)
    for figures, (panel,) in zip(drawn, panels):
        rows = timing_rows(figures.timing)
        panel.barh(
            [row.subject.label for row in rows],
            [row.wall.median for row in rows],
            xerr=_spreads(rows),
            color=[_COLOURS.get(row.subject.family, _OTHER_COLOUR) for row in rows],
            capsize=3,
        )
        panel.invert_yaxis()
        panel.set_xlabel("seconds")
        size = format_bytes(figures.nbytes)
        panel.set_title(f"{figures.name}: {figures.num_tensors:,} tensors, {size}")
    figure.savefig(path, dpi=120)


def _spreads(rows: Sequence[TimingRow]) -> list[list[float]]:
    return [
        [row.wall.median - row.wall.low for row in rows],
        [row.wall.high - row.wall.median for row in rows],
    ]
