"""What the figures of asynchronous saves say: tables, findings, JSON.

Runs in: trainer. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from mpwriter.bench.async_mode import AsyncFigures
from mpwriter.bench.async_subjects import AsyncSubject
from mpwriter.bench.async_timing import AsyncSample
from mpwriter.bench.stats import Summary, ratio, summarize
from mpwriter.bench.table import (
    MISSING,
    among_ranks,
    format_bytes,
    format_ratio,
    format_seconds,
    ranks_as_json,
    render_table,
)
from mpwriter.bench.training import percentile

__all__ = [
    "LEGEND",
    "AsyncRow",
    "async_figures_as_json",
    "async_findings",
    "async_rows",
    "async_state_report",
    "best_stock_row",
]

LEGEND = """\
n         worker processes (MPFsspecWriter) or threads (stock writers); thread, process: where
          DCP runs the save. stager kept: stock's DefaultStager, used again for every save
stall     until async_save returns; of copy: times a plain copy_ of each tensor into warm memory,
          timed likewise, right after training steps
staged    from the call until the tensors may change, where that is after the return
save      from the call to the complete checkpoint
steps/s   of the training loop during the save, in per cent of those just before it
p99, gap  99th percentile of these steps (all rounds), and the longest one of a save
lost      training time: stall + time of the save x lost share of the steps
x stock   how many times as much the best stock row loses
"""

_COLUMNS = (
    *("async_save, medians", "stall ms", "of copy", "staged ms", "save s", "steps/s %"),
    *("p99 ms", "gap ms", "lost s", "min", "max", "x stock"),
)


@dataclass(frozen=True)
class AsyncRow:
    """One line of the table. Seconds; medians over the rounds but for `p99_s`.

    `disturbed`: other programs ran beside every save, so that the figures are not the save's alone;
    saves that were disturbed do not count where there are others.
    """

    subject: AsyncSubject
    disturbed: bool
    stall: Summary
    staged: Summary
    save: Summary
    share: Summary
    lost: Summary
    longest_gap: Summary
    p99_s: float


def async_rows(figures: AsyncFigures) -> list[AsyncRow]:
    """A row for each subject that did not fail: ours, then stock, then the floor."""

    def summary(samples: Sequence[AsyncSample], value: Callable[[AsyncSample], float]) -> Summary:
        return summarize([value(sample) for sample in samples])

    counted = {
        subject: [sample for sample in samples if sample.calm] or samples
        for subject, samples in figures.samples.items()
    }
    return [
        AsyncRow(
            subject,
            disturbed=not samples[0].calm,
            stall=summary(samples, lambda sample: sample.stall_s),
            staged=summary(samples, lambda sample: sample.staged_s),
            save=summary(samples, lambda sample: sample.save_s),
            share=summary(samples, lambda sample: sample.share),
            lost=summary(samples, lambda sample: sample.lost_s),
            longest_gap=summary(samples, lambda sample: sample.longest_gap_s),
            p99_s=percentile([step for sample in samples for step in sample.steps_s], 0.99),
        )
        for subject, samples in sorted(counted.items(), key=lambda item: _order(item[0]))
    ]


def best_stock_row(
    rows: Iterable[AsyncRow], checkpointer: str | None = None, *, as_it_comes: bool = False
) -> AsyncRow | None:
    """The stock row that loses the least.

    Args:
        rows: among which.
        checkpointer: only this mode, where it is named.
        as_it_comes: only writers with their own staging, without a stager that is kept.
    """
    return _least_lost(
        row
        for row in rows
        if row.subject.is_stock
        and checkpointer in (None, row.subject.checkpointer)
        and not (as_it_comes and row.subject.staging)
    )


def async_state_report(figures: AsyncFigures) -> str:
    """The table of one state with what it is compared with, as text."""
    size = format_bytes(figures.nbytes)
    head = f"{figures.name}: {figures.num_tensors:,} tensors, {size}"
    head += among_ranks(len(figures.ranks))
    return "\n".join(
        [head, "=" * len(head), *_references(figures), "", _table(figures), ""],
    )


def _references(figures: AsyncFigures) -> list[str]:
    lines = []
    for name, label in (
        ("loop_s", "copy_ tensor by tensor, warm memory"),
        ("shared_loop_s", "the same, warm shared memory"),
        ("flat_s", "one copy of as many bytes"),
        ("stage_s", "MPFsspecWriter.stage() alone"),
    ):
        values = [getattr(copies, name) for copies in figures.copies]
        if values and None not in values:
            low, high = format_seconds(min(values)), format_seconds(max(values))
            lines.append(f"{label + ':':38}{format_seconds(median(values))}  ({low} to {high})")
    samples = [sample for of_subject in figures.samples.values() for sample in of_subject]
    idle = [step for sample in samples for step in sample.idle_steps_s]
    if idle:
        p99, longest = format_seconds(percentile(idle, 0.99)), format_seconds(max(idle))
        rate = len(idle) / sum(idle)
        lines.append(f"{'idle training:':38}{rate:.0f} steps/s, p99 {p99}, longest {longest}")
    num_busy = sum(not sample.calm for sample in samples)
    if num_busy:
        lines.append(
            f"{num_busy} of {len(samples)} saves were disturbed by other programs; they count only "
            "in rows with a *, which have no others"
        )
    return lines


def _table(figures: AsyncFigures) -> str:
    rows = {row.subject: row for row in async_rows(figures)}
    stock = best_stock_row(rows.values())
    copy_s = _copy_s(figures)
    cells = []
    for subject in sorted([*rows, *figures.failures], key=_order):
        if subject in rows:
            cells.append(_cells(rows[subject], copy_s, stock))
            cells += [
                [f"  rank {number}", *_cells(row, copy_of_rank_s, None)[1:]]
                for number, (row, copy_of_rank_s) in enumerate(_of_ranks(figures, subject))
            ]
        else:
            cells.append([subject.label, "failed", *[MISSING] * (len(_COLUMNS) - 2)])
    table = render_table(_COLUMNS, cells)
    notes = [f"{subject.label}: {text}" for subject, text in figures.failures.items()]
    return "\n".join([table, *notes])


def _of_ranks(
    figures: AsyncFigures, subject: AsyncSubject
) -> Iterator[tuple[AsyncRow, float | None]]:
    for rank in figures.ranks:
        rows = {row.subject: row for row in async_rows(rank)}
        yield rows[subject], _copy_s(rank)


def _cells(row: AsyncRow, copy_s: float | None, stock: AsyncRow | None) -> list[str]:
    stores = row.subject.writes_checkpoint
    return [
        row.subject.label + " *" * row.disturbed,
        _ms(row.stall.median),
        format_ratio(ratio(row.stall.median, copy_s)),
        _ms(row.staged.median) if row.staged.median > row.stall.median else MISSING,
        f"{row.save.median:.3f}",
        f"{100 * row.share.median:.0f}",
        _ms(row.p99_s),
        _ms(row.longest_gap.median),
        *(f"{value:.3f}" for value in row.lost[:3]),
        format_ratio(ratio(stock.lost.median, row.lost.median) if stock and stores else None),
    ]


def async_findings(all_figures: Sequence[AsyncFigures]) -> list[str]:
    """One line per question that a reader brings."""
    return [
        f"{figures.name}: {line}" for figures in all_figures for line in _state_findings(figures)
    ]


def _state_findings(figures: AsyncFigures) -> list[str]:
    rows = async_rows(figures)
    ours = [row for row in rows if row.subject.family == "ours"]
    lines = []
    blocking = _least_lost(row for row in ours if not row.subject.staging)
    if blocking is not None:
        times = format_ratio(ratio(blocking.stall.median, _copy_s(figures)))
        stall = format_seconds(blocking.stall.median)
        lines.append(f"the call takes {stall}, {times} a plain copy ({blocking.subject.label})")
    for mode in dict.fromkeys(row.subject.checkpointer for row in ours):
        best = _least_lost(row for row in ours if row.subject.checkpointer == mode)
        assert best is not None
        stock = best_stock_row(rows, mode)
        plain = best_stock_row(rows, mode, as_it_comes=True)
        lines.append(_lost_finding(best, plain, f"best stock writer in a {mode}"))
        if stock != plain:
            lines.append(_lost_finding(best, stock, f"best stock in a {mode}"))
        lines.append(_gap_finding(best, rows))
    best, overall = _least_lost(ours), best_stock_row(rows)
    if best is not None and overall is not None:
        lines.append(_lost_finding(best, overall, "best stock of all"))
    lines += [
        f"{subject.label} {text}"
        for subject, text in figures.failures.items()
        if subject.family == "ours"
    ]
    return lines


def _lost_finding(ours: AsyncRow, stock: AsyncRow | None, what: str) -> str:
    lost = f"training time lost {format_seconds(ours.lost.median)} ({ours.subject.label})"
    if stock is None:
        return f"{lost}, {what}: none that works"
    times = format_ratio(ratio(stock.lost.median, ours.lost.median))
    stock_lost = format_seconds(stock.lost.median)
    return f"{lost}, {what} {stock_lost} ({stock.subject.label}), ratio {times}"


def _gap_finding(ours: AsyncRow, rows: Sequence[AsyncRow]) -> str:
    gap = f"longest gap {format_seconds(ours.longest_gap.median)} ({ours.subject.label})"
    floors = [row for row in rows if row.subject.family == "planning"]
    shown = [f"{row.subject.label} {format_seconds(row.longest_gap.median)}" for row in floors]
    return ", ".join([gap, *shown])


def async_figures_as_json(figures: AsyncFigures) -> dict[str, Any]:
    """Every sample, under the subjects' labels; the times of steps in microseconds."""
    return {
        "name": figures.name,
        "num_tensors": figures.num_tensors,
        "nbytes": figures.nbytes,
        "copies": [asdict(copies) for copies in figures.copies],
        "failures": {subject.label: text for subject, text in figures.failures.items()},
        "saves": {
            row.subject.label: {
                **asdict(row.subject),
                **{
                    name: getattr(row, name)._asdict()
                    for name in ("stall", "staged", "save", "share", "lost", "longest_gap")
                },
                "p99_s": row.p99_s,
                "disturbed": row.disturbed,
                "samples": [one.as_json() for one in figures.samples[row.subject]],
            }
            for row in async_rows(figures)
        },
        **ranks_as_json(figures.ranks, async_figures_as_json),
    }


def _order(subject: AsyncSubject) -> tuple[int, str, str, str, int]:
    """Ours first, then stock, then the floor; threads before the process."""
    rank = 0 if subject.family == "ours" else 1 if subject.is_stock else 2
    mode = "" if subject.checkpointer == "thread" else subject.checkpointer
    return (rank, mode, subject.family, subject.staging, subject.parallelism)


def _least_lost(rows: Iterable[AsyncRow]) -> AsyncRow | None:
    return min(rows, key=lambda row: row.lost.median, default=None)


def _copy_s(figures: AsyncFigures) -> float | None:
    return median(copies.loop_s for copies in figures.copies) if figures.copies else None


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
