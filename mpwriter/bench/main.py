"""The benchmark's command: reads options, runs a mode, prints, writes files.

Runs in: trainer.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from typing import Any, Generic, TypeVar

from mpwriter.bench import async_report, discard, load_report, sync_report
from mpwriter.bench.async_mode import measure_async
from mpwriter.bench.job import job_of_async_saves, job_of_loads, job_of_saves
from mpwriter.bench.load_mode import measure_loads
from mpwriter.bench.machine import describe_load, describe_machine, redact_command, redact_url
from mpwriter.bench.options import Options, parse_options
from mpwriter.bench.places import Place, open_place
from mpwriter.bench.plot import can_plot, plot_lost, plot_timing
from mpwriter.bench.ranks import Ranks, join_ranks
from mpwriter.bench.sync_mode import measure_sync

__all__ = ["main"]

_Figures = TypeVar("_Figures")

_RANKS_LEGEND = """\
rank      that rank's own figures, with its part of the bytes; n is per rank. The lines above are
          the job's: seconds of the slowest rank in each round, bytes and CPU of all
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; under torchrun with the other ranks, of which the first one prints.

    Args:
        argv: the command line without the program's name; that of this process by default.

    Returns:
        Exit status: 0, or 2 when an option cannot be served.

    Raises:
        Whatever a writer raises: a benchmark of a broken save has no result.
    """
    argv = sys.argv[1:] if argv is None else argv
    with join_ranks() as ranks:
        options = _read_options(argv, ranks)
        refusal = _refusal(options)
        if refusal is None:
            with _only_first_speaks(ranks):
                _run(argv, options, ranks)
        elif ranks.is_first:
            print(refusal, file=sys.stderr)
    return 0 if refusal is None else 2


def _read_options(argv: Sequence[str], ranks: Ranks) -> Options:
    try:
        with _only_first_speaks(ranks, errors=True):
            options = parse_options(argv, list(_MODES), ranks)
    except SystemExit:
        ranks.barrier()  # until it has been said: torchrun ends all when one is gone
        raise
    return options if ranks.is_first else replace(options, json_path=None, plot_path=None)


def _refusal(options: Options) -> str | None:
    if options.plot_path and not can_plot():
        return "--plot needs matplotlib, which is not installed: pip install 'mpwriter[bench]'"
    if options.plot_path and options.mode == "load":
        return "--plot draws saves only, not --mode load"
    return None


@contextmanager
def _only_first_speaks(ranks: Ranks, *, errors: bool = False) -> Iterator[None]:
    """Throw away what the other ranks print, on standard error only where it is an echo too."""
    with ExitStack() as stack:
        if not ranks.is_first:
            stack.enter_context(redirect_stdout(io.StringIO()))
            if errors:
                stack.enter_context(redirect_stderr(io.StringIO()))
        yield


def _run(argv: Sequence[str], options: Options, ranks: Ranks) -> None:
    discard.register()
    with open_place(options.url, options.storage_options, ranks) as place:
        head = {
            "command": redact_command(["benchmark.py", *argv]),
            "place": redact_url(place.url),
            **describe_machine(place.local_path),
        }
        if not ranks.alone:
            head["ranks"] = f"{ranks.num_ranks}, {ranks.num_local} of them on this machine"
        for name, text in head.items():
            print(f"{name + ':':12} {text}", flush=True)
        print(end="\n" if ranks.alone else f"\n{_RANKS_LEGEND}\n")
        result = _MODES[options.mode](options, place)
        print(f"\nload now: {describe_load()}")
    if options.json_path:
        with open(options.json_path, "w", encoding="utf-8") as file:
            json.dump({**head, "mode": options.mode, **result}, file, indent=1)


def _run_sync(options: Options, place: Place) -> dict[str, Any]:
    print(sync_report.LEGEND)
    jobs = _Jobs(place.ranks, job_of_saves, sync_report.state_report)
    measure_sync(options, place, jobs.report)
    if options.plot_path:
        plot_timing(jobs.figures, options.plot_path)
    states = [sync_report.figures_as_json(figures) for figures in jobs.figures]
    return _conclude(options, states, sync_report.findings(jobs.figures))


def _run_async(options: Options, place: Place) -> dict[str, Any]:
    print(async_report.LEGEND)
    jobs = _Jobs(place.ranks, job_of_async_saves, async_report.async_state_report)
    measure_async(options, place, jobs.report)
    if options.plot_path:
        plot_lost(jobs.figures, options.plot_path)
    states = [async_report.async_figures_as_json(figures) for figures in jobs.figures]
    return _conclude(options, states, async_report.async_findings(jobs.figures))


def _run_load(options: Options, place: Place) -> dict[str, Any]:
    print(load_report.LEGEND)
    jobs = _Jobs(place.ranks, job_of_loads, load_report.load_report)
    measure_loads(options, place, jobs.report)
    states = [load_report.load_figures_as_json(figures) for figures in jobs.figures]
    return _conclude(options, states, load_report.load_findings(jobs.figures))


class _Jobs(Generic[_Figures]):
    """Gathers the ranks' figures of each state; `figures` are the job's, empty but on the first.

    Args:
        ranks: without others, its figures are the job's.
        merge: makes the job's figures of those of all ranks.
        as_text: what is printed of them.
    """

    def __init__(
        self,
        ranks: Ranks,
        merge: Callable[[Sequence[_Figures]], _Figures],
        as_text: Callable[[_Figures], str],
    ) -> None:
        self._ranks, self._merge, self._as_text = ranks, merge, as_text
        self.figures: list[_Figures] = []

    def report(self, figures: _Figures) -> None:
        of_ranks = self._ranks.gather(figures)
        if of_ranks is not None:
            self.figures.append(figures if self._ranks.alone else self._merge(of_ranks))
            print(self._as_text(self.figures[-1]), flush=True)


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
