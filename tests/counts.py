"""What the checks of reliability have counted in this run, for the end of its output.

    counts.add("fault table", faults=1)
    counts.add("fault table", silent_losses=1)

One line per name is printed when the run is over. Where MPWRITER_COUNTS names a file, a line of
JSON is appended to it as well: `scripts/repeat_faults.py` adds up many runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping

__all__ = ["FILE_VARIABLE", "add", "lines", "of", "write_out"]

FILE_VARIABLE = "MPWRITER_COUNTS"

# What must be zero; told even where nothing has been added.
FAILURES = ("silent_losses", "hangs", "leaks")

_counts: dict[str, dict[str, int]] = {}


def add(name: str, **figures: int) -> None:
    """Count something of the check `name`; figures are called what they are in the line."""
    of_name = _counts.setdefault(name, {"faults": 0, **dict.fromkeys(FAILURES, 0)})
    for figure, number in figures.items():
        of_name[figure] = of_name.get(figure, 0) + number


def of(name: str) -> dict[str, int]:
    """What has been counted under a name."""
    return dict(_counts.get(name, {}))


def lines(counts: Mapping[str, Mapping[str, int]] | None = None) -> Iterator[str]:
    """One line per name; of this run where no counts are given."""
    for name, figures in sorted((_counts if counts is None else counts).items()):
        known = dict(figures)
        failures = {figure: known.pop(figure, 0) for figure in FAILURES}
        shown = [f"{number:,} {_words(figure)}" for figure, number in known.items()]
        shown += [f"{_words(figure)}: {number:,}" for figure, number in failures.items()]
        yield f"{name}: {', '.join(shown)}"


def _words(figure: str) -> str:
    return "faults injected" if figure == "faults" else figure.replace("_", " ")


def write_out() -> None:
    """Hand the counts over, where somebody adds them up."""
    path = os.environ.get(FILE_VARIABLE)
    if path and _counts:
        with open(path, "a") as file:
            file.write(json.dumps(_counts) + "\n")
