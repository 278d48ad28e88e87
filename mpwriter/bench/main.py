"""The benchmark's command: reads options, runs a mode, prints, writes files.

Runs in: trainer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mpwriter.bench.machine import describe_load, describe_machine, redact_command, redact_url
from mpwriter.bench.options import Options, parse_options
from mpwriter.bench.places import Place, open_place
from mpwriter.bench.plot import can_plot, plot_timing
from mpwriter.bench.sync_mode import StateFigures, measure_sync
from mpwriter.bench.sync_report import LEGEND, figures_as_json, findings, state_report

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Args:
        argv: the command line without the program's name; that of this process by default.

    Returns:
        Exit status: 0, or 2 when an option cannot be served.

    Raises:
        Whatever a writer raises: a benchmark of a broken save has no result.
    """
    argv = sys.argv[1:] if argv is None else argv
    options = parse_options(argv, list(_MODES))
    if options.plot_path and not can_plot():
        message = "--plot needs matplotlib, which is not installed: pip install 'mpwriter[bench]'"
        print(message, file=sys.stderr)
        return 2
    with open_place(options.url, options.storage_options) as place:
        head = {
            "command": redact_command(["benchmark.py", *argv]),
            "place": redact_url(place.url),
            **describe_machine(place.local_path),
        }
        for name, text in head.items():
            print(f"{name + ':':12} {text}", flush=True)
        print()
        result = _MODES[options.mode](options, place)
        print(f"\nload now: {describe_load()}")
    if options.json_path:
        with open(options.json_path, "w", encoding="utf-8") as file:
            json.dump({**head, "mode": options.mode, **result}, file, indent=1)
    return 0


def _run_sync(options: Options, place: Place) -> dict[str, Any]:
    def report(figures: StateFigures) -> None:
        print(state_report(figures), flush=True)

    print(LEGEND)
    all_figures = measure_sync(options, place, report)
    lines = findings(all_figures)
    print("\n".join(lines))
    if options.plot_path:
        plot_timing(all_figures, options.plot_path)
    return {
        "quick": options.quick,
        "num_rounds": options.num_rounds,
        "states": [figures_as_json(figures) for figures in all_figures],
        "findings": lines,
    }


_MODES: dict[str, Callable[[Options, Place], dict[str, Any]]] = {"sync": _run_sync}
