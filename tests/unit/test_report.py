"""What a save says of itself, and of the other ranks."""

from __future__ import annotations

import logging
import pickle
from dataclasses import replace

import pytest
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from mpwriter._report import RankReport, SaveReport
from mpwriter._save_events import SaveEvents
from mpwriter._save_jobs import ranks_of, with_report

GIB = 1 << 30
WHERE = "/run/step"


def _report(rank: int = 0, nbytes: int = GIB, write_s: float = 2.0) -> SaveReport:
    return SaveReport(
        checkpoint_id=WHERE,
        save_id="0123",
        rank=rank,
        nbytes=nbytes,
        files=2,
        num_workers=2,
        plan_s=0.1,
        stage_s=0.5 + rank,
        write_s=write_s,
        commit_s=0.2,
        total_s=9.0,
    )


def _results(number: int) -> list[WriteResult]:
    return [WriteResult(MetadataIndex(f"key{n}"), n, f"place{n}") for n in range(number)]


def _gathered(*of_ranks: list[WriteResult]) -> list[list[WriteResult]]:
    """As DCP brings them to the coordinator."""
    return pickle.loads(pickle.dumps(list(of_ranks)))  # type: ignore[no-any-return]


def test_results_bring_the_figures_of_every_rank_when_they_are_gathered() -> None:
    reports = [_report(0, GIB, 2.0), _report(1, 3 * GIB, 4.0)]
    sent = [with_report(_results(3), report) for report in reports]
    assert ranks_of(_gathered(*sent)) == (
        RankReport(0, WHERE, GIB, 2, 2, 0.5, 2.0),
        RankReport(1, WHERE, 3 * GIB, 2, 2, 1.5, 4.0),
    )


def test_results_are_the_same_when_one_carries_a_report() -> None:
    for plain, sent in zip(_results(3), with_report(_results(3), _report()), strict=True):
        assert isinstance(sent, WriteResult)
        assert sent.index == plain.index
        assert sent.size_in_bytes == plain.size_in_bytes
        assert sent.storage_data == plain.storage_data


def test_ranks_are_left_out_when_they_wrote_nothing_or_tell_nothing() -> None:
    assert with_report([], _report()) == []
    gathered = _gathered([], _results(2), with_report(_results(1), _report(2)))
    assert [rank.rank for rank in ranks_of(gathered)] == [2]


def test_summary_is_of_all_ranks_when_there_are_several() -> None:
    ranks = tuple(
        RankReport(rank, WHERE, nbytes, 2, 3, stage_s, write_s)
        for rank, (nbytes, stage_s, write_s) in enumerate(
            [(GIB, 0.5, 2.0), (3 * GIB, 1.5, 4.0), (0, 0.1, 1.0)]
        )
    )
    report = replace(_report(), ranks=ranks)
    assert report.slowest_rank == ranks[1]
    assert report.gib_per_s_of_all == pytest.approx(1.0)
    text = report.summary()
    for figure in (
        f"{4 * GIB} bytes in 6 files by 9 workers of 3 ranks",
        "staged up to 1.500 s",
        "slowest rank 1 wrote 4.000 s",
        "total 9.000 s",
        "1.00 GiB/s",
    ):
        assert figure in text


@pytest.mark.parametrize("ranks", [(), (RankReport(0, WHERE, GIB, 2, 2, 0.5, 2.0),)])
def test_summary_is_of_this_rank_when_there_is_no_other(ranks: tuple[RankReport, ...]) -> None:
    text = replace(_report(), ranks=ranks).summary()
    assert text.startswith(f"{GIB} bytes in 2 files by 2 workers; ")
    assert "rank" not in text and text.endswith("0.50 GiB/s")


def test_rate_of_all_is_nothing_when_nothing_was_written() -> None:
    assert _report().slowest_rank is None
    assert _report().gib_per_s_of_all == 0
    assert replace(_report(), ranks=(RankReport(0, WHERE, 0, 0, 0, 0, 0.0),)).gib_per_s_of_all == 0


@pytest.mark.parametrize("aloud", [True, False])
def test_save_logs_its_summary_at_info_when_it_speaks_for_all(
    aloud: bool, caplog: pytest.LogCaptureFixture
) -> None:
    events = SaveEvents("/run/step", "0123", None, background=False)
    events.report = _report()
    with caplog.at_level(logging.DEBUG, "mpwriter"):
        events.concluded(committed=aloud, aloud=aloud)
    (record,) = caplog.records
    assert record.levelno == (logging.INFO if aloud else logging.DEBUG)
    assert "Saved /run/step: " in record.getMessage()
