"""The benchmark's command: reads options, runs a mode, prints, writes files.

Runs in: trainer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mpwriter.bench import async_report, discard, load_report, sync_report
from mpwriter.bench.async_mode import AsyncFigures, measure_async
from mpwriter.bench.load_mode import LoadFigures, measure_loads
from mpwriter.bench.machine import describe_load, describe_machine, redact_command, redact_url
from mpwriter.bench.options import Options, parse_options
from mpwriter.bench.places import Place, open_place
from mpwriter.bench.plot import can_plot, plot_lost, plot_timing
from mpwriter.bench.sync_mode import StateFigures, measure_sync

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
    if options.plot_path and options.mode == "load":
        print("--plot draws saves only, not --mode load", file=sys.stderr)
        return 2
    discard.register()
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
        print(sync_report.state_report(figures), flush=True)

    print(sync_report.LEGEND)
    all_figures = measure_sync(options, place, report)
    if options.plot_path:
        plot_timing(all_figures, options.plot_path)
    states = [sync_report.figures_as_json(figures) for figures in all_figures]
    return _conclude(options, states, sync_report.findings(all_figures))


def _run_async(options: Options, place: Place) -> dict[str, Any]:
    def report(figures: AsyncFigures) -> None:
        print(async_report.async_state_report(figures), flush=True)

    print(async_report.LEGEND)
    all_figures = measure_async(options, place, report)
    if options.plot_path:
        plot_lost(all_figures, options.plot_path)
    states = [async_report.async_figures_as_json(figures) for figures in all_figures]
    return _conclude(options, states, async_report.async_findings(all_figures))


def _run_load(options: Options, place: Place) -> dict[str, Any]:
    def report(figures: LoadFigures) -> None:
        print(load_report.load_report(figures), flush=True)

    print(load_report.LEGEND)
    all_figures = measure_loads(options, place, report)
    states = [load_report.load_figures_as_json(figures) for figures in all_figures]
    return _conclude(options, states, load_report.load_findings(all_figures))


def _conclude(
    options: Options, states: list[dict[str, Any]], findings: list[str]
) -> dict[str, Any]:
    print("\n".join(findings))
    return {
        "quick": options.quick,
        "num_rounds": options.num_rounds,
        "states": states,
        "findings": findings,
    }


_MODES: dict[str, Callable[[Options, Place], dict[str, Any]]] = {
    "sync": _run_sync,
    "async": _run_async,
    "load": _run_load,
}
