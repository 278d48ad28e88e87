"""Plain aligned tables and figures with units, for a terminal or a pipe.

Runs in: both. Pure; safe from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "MISSING",
    "TimeUnit",
    "among_ranks",
    "format_bytes",
    "format_ratio",
    "format_seconds",
    "ranks_as_json",
    "render_table",
    "time_unit",
]

MISSING = "-"

_T = TypeVar("_T")


class TimeUnit(NamedTuple):
    """What the times of one table are shown in, so that a column can be read down."""

    name: str
    seconds: float
    decimals: int

    def format(self, seconds: float | None) -> str:
        """`seconds` in this unit, without its name."""
        return MISSING if seconds is None else f"{seconds / self.seconds:.{self.decimals}f}"


def render_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out `rows` under `headers`: the first column to the left, figures to the right.

    Raises:
        ValueError: a row has another number of cells than there are headers.
    """
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"{len(row)} cells under {len(headers)} headers: {list(row)}")
    widths = [max(len(line[column]) for line in (headers, *rows)) for column in range(len(headers))]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([_line(headers, widths), rule, *(_line(row, widths) for row in rows)])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = cells[0].ljust(widths[0])
    rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:]))
    return "  ".join([first, *rest]).rstrip()


def time_unit(seconds: Iterable[float]) -> TimeUnit:
    """Milliseconds where all of `seconds` are below a fifth of a second, else seconds."""
    return TimeUnit("ms", 1e-3, 1) if max(seconds, default=0) < 0.2 else TimeUnit("s", 1.0, 3)


def format_seconds(seconds: float | None) -> str:
    """Three significant digits in s, or in ms below a tenth of a second."""
    if seconds is None:
        return MISSING
    if abs(seconds) < 0.1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.3f} s" if abs(seconds) < 10 else f"{seconds:.1f} s"


def format_bytes(nbytes: float | None) -> str:
    """In GiB, MiB or KiB, whichever is the largest that is not below one."""
    if nbytes is None:
        return MISSING
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def format_ratio(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}x"


def among_ranks(num_ranks: int) -> str:
    """What the head of a table says of the ranks, if there are any."""
    return f", among {num_ranks} rank{'s'[: num_ranks != 1]}" if num_ranks else ""


def ranks_as_json(ranks: Sequence[_T], as_json: Callable[[_T], Any]) -> dict[str, Any]:
    """Each rank's own figures, beside those of the job; nothing where there are no ranks."""
    return {"ranks": [as_json(rank) for rank in ranks]} if ranks else {}
