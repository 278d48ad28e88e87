"""The benchmark's figures over ranks: how they are gathered, and the tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mpwriter.bench.async_mode import AsyncFigures
from mpwriter.bench.async_report import async_figures_as_json, async_rows, async_state_report
from mpwriter.bench.async_subjects import AsyncSubject
from mpwriter.bench.async_timing import AsyncSample
from mpwriter.bench.job import job_of_async_saves, job_of_loads, job_of_saves
from mpwriter.bench.load_mode import LoadFigures, LoadSample
from mpwriter.bench.load_report import load_figures_as_json, load_report
from mpwriter.bench.options import parse_options
from mpwriter.bench.places import Place
from mpwriter.bench.ranks import ALONE, Ranks, under_torchrun
from mpwriter.bench.references import CopyTimes
from mpwriter.bench.states import build_state, local_part
from mpwriter.bench.subjects import Subject
from mpwriter.bench.sync_mode import StateFigures
from mpwriter.bench.sync_report import figures_as_json, state_report
from mpwriter.bench.timing import Sample

OURS, STOCK, FLOOR = Subject("ours", 2), Subject("fsspec", 2), Subject("planning")
# Two ranks on one machine; nothing here talks to the other one.
SECOND = Ranks(1, 2, 2, group="no group")
MODES = ["sync", "async", "load"]


def saves(nbytes: int, walls_s: Sequence[float], workers_cpu_s: float | None = 0.25) -> Any:
    samples = [Sample(wall_s, 0.5, workers_cpu_s, 0.1) for wall_s in walls_s]
    floor = [Sample(0.25, 0.25, 0.0)] * len(walls_s)
    stock = [Sample(4.0, 2.0, 0.0)] * len(walls_s)
    return StateFigures("large", 32, nbytes, {OURS: samples, STOCK: stock, FLOOR: floor})


def row(text: str, label: str, place: int = 0) -> list[str]:
    """Figures of a line, or of the line so many below it."""
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(label))
    start = label if place == 0 else f"  rank {place - 1}"
    assert lines[at + place].startswith(start)
    return lines[at + place][len(start) :].split()


def test_job_of_saves_takes_the_slowest_rank_of_every_round() -> None:
    ranks = [saves(2**30, [1.0, 2.0, 4.0]), saves(2**29, [3.0, 1.0, 1.0])]
    job = job_of_saves(ranks)
    assert job.nbytes == 2**30 + 2**29
    assert [sample.wall_s for sample in job.timing[OURS]] == [3.0, 2.0, 4.0]
    assert job.timing[OURS][0] == Sample(3.0, 1.0, 0.5, 0.1)
    assert list(job.ranks) == ranks


def test_job_of_saves_knows_no_workers_when_a_rank_does_not() -> None:
    job = job_of_saves([saves(1, [1.0]), saves(1, [1.0], workers_cpu_s=None)])
    assert job.timing[OURS][0].workers_cpu_s is None


def test_table_of_saves_has_a_line_for_the_job_and_for_every_rank() -> None:
    text = state_report(job_of_saves([saves(2**30, [1.0] * 3), saves(2**30, [2.0] * 3)]))
    assert "large: 32 tensors, 2.00 GiB, among 2 ranks" in text
    assert row(text, OURS.label) == [
        "2.000", "2.000", "2.000", "1.00", "2.00x", "-", "-", "0.500", "0.250",
    ]  # fmt: skip
    assert row(text, OURS.label, 1) == [
        "1.000", "1.000", "1.000", "1.00", "-", "-", "-", "0.500", "0.250",
    ]  # fmt: skip
    assert row(text, OURS.label, 2)[:4] == ["2.000", "2.000", "2.000", "0.50"]
    assert row(text, FLOOR.label, 2)[3] == "-"


def test_table_of_saves_is_whole_when_a_rank_has_no_part() -> None:
    text = state_report(job_of_saves([saves(2**30, [1.0]), saves(0, [1.0])]))
    assert row(text, OURS.label, 2) == ["1.000", "1.000", "1.000", "0.0000", *["-"] * 5]


def test_figures_of_saves_hold_every_rank_in_json() -> None:
    found = json.loads(
        json.dumps(figures_as_json(job_of_saves([saves(3, [1.0]), saves(5, [2.0])])))
    )
    assert (found["nbytes"], [rank["nbytes"] for rank in found["ranks"]]) == (8, [3, 5])
    medians = [one["timing"][OURS.label]["wall_s"]["median"] for one in (found, *found["ranks"])]
    assert medians == [2.0, 1.0, 2.0]
    assert "ranks" not in figures_as_json(saves(3, [1.0]))


def test_table_of_loads_has_a_line_for_the_job_and_for_every_rank() -> None:
    ranks = [
        LoadFigures("large", 32, 2**30, {"FsspecReader (ours)": [LoadSample(wall_s, 0.5)]})
        for wall_s in (1.0, 4.0)
    ]
    job = job_of_loads(ranks)
    assert job.samples["FsspecReader (ours)"] == [LoadSample(4.0, 1.0)]
    text = load_report(job)
    assert "2.00 GiB, among 2 ranks" in text
    rates = [row(text, "FsspecReader (ours)", place)[3] for place in range(3)]
    assert rates == ["0.50", "1.00", "0.25"]
    found = json.loads(json.dumps(load_figures_as_json(job)))
    assert [rank["nbytes"] for rank in found["ranks"]] == [2**30, 2**30]


# -- asynchronous saves -------------------------------------------------------------------------

IN_THREAD = AsyncSubject("ours", "thread", 2)


def background(stall_s: float, steps_s: list[float], others: float = 0.0) -> AsyncFigures:
    window_s = sum(steps_s)
    one = AsyncSample(
        stall_s, stall_s, stall_s + window_s, window_s, steps_s, [0.01] * 10, 0.0, others
    )
    copies = CopyTimes(stall_s, None, stall_s, stall_s)
    return AsyncFigures("small", 500, 2**20, {IN_THREAD: [one]}, copies=[copies])


def test_job_of_async_saves_loses_what_its_slowest_rank_loses() -> None:
    ranks = [background(0.5, [0.01] * 20), background(0.1, [0.04] * 10)]
    job = job_of_async_saves(ranks)
    (row_of_job,) = async_rows(job)
    assert row_of_job.stall.median == 0.5
    assert row_of_job.lost.median == pytest.approx(0.5)
    assert row_of_job.share.median == pytest.approx(0.25)
    assert row_of_job.longest_gap.median == 0.04
    assert job.copies == [CopyTimes(0.5, None, 0.5, 0.5)]
    assert job.nbytes == 2 * 2**20


def test_table_of_async_saves_has_a_line_for_the_job_and_for_every_rank() -> None:
    job = job_of_async_saves([background(0.5, [0.01] * 20), background(0.1, [0.04] * 10)])
    text = async_state_report(job)
    assert "2.00 MiB, among 2 ranks" in text
    assert [row(text, IN_THREAD.label, place)[0] for place in range(3)] == [
        "500.0",
        "500.0",
        "100.0",
    ]
    found = json.loads(json.dumps(async_figures_as_json(job)))
    (one,) = found["saves"][IN_THREAD.label]["samples"]
    assert "of_ranks" not in one
    assert [len(rank["saves"][IN_THREAD.label]["samples"]) for rank in found["ranks"]] == [1, 1]


# -- ranks --------------------------------------------------------------------------------------


def test_process_is_a_rank_when_torchrun_says_so() -> None:
    assert under_torchrun({"RANK": "0", "WORLD_SIZE": "1"})
    assert not under_torchrun({"RANK": "0"})
    assert not under_torchrun({})


def test_nothing_changes_when_there_are_no_ranks() -> None:
    tensor = torch.ones(3)
    assert ALONE.divide(tensor) is tensor
    assert ALONE.gather("x") == ["x"]
    assert (ALONE.shared("x"), ALONE.most(0.5), ALONE.launcher) == ("x", 0.5, None)
    ALONE.barrier()
    ALONE.agree_on_failure("failed: it may, and is left out")
    assert Place("/nowhere").own_file("x") == "x"
    assert Place("/nowhere", {}, SECOND).own_file("x") == "x.rank1"


@pytest.mark.parametrize("name", ["large", "small", "model"])
def test_state_is_divided_among_ranks_without_a_rest(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts are as FSDP2 has them: by rows, the same number but for the last ranks."""

    def part(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor

    monkeypatch.setattr("mpwriter.bench.ranks.DTensor.from_local", part)
    whole = build_state(name, quick=True)
    parts = [
        build_state(name, quick=True, ranks=Ranks(r, 3, 3, group="no group")) for r in range(3)
    ]
    for tensors in zip(whole.tensors(), *(state.tensors() for state in parts)):
        one, *of_ranks = map(local_part, tensors)
        if one.dim() == 0:
            assert all(torch.equal(one, tensor) for tensor in of_ranks)
            continue
        assert torch.cat(of_ranks).shape == one.shape
        firsts = [float(tensor.view(-1)[0]) for tensor in of_ranks if tensor.numel()]
        assert len(set(firsts)) == len(firsts)
        assert of_ranks[0].untyped_storage().nbytes() < one.untyped_storage().nbytes()


def test_workers_and_threads_are_shared_by_the_ranks_of_a_machine_when_not_given() -> None:
    options = parse_options(["--mode", "sync"], MODES, SECOND)
    assert (list(options.workers), list(options.threads)) == ([1, 2], [1, 2])
    assert list(options.passes) == ["timing"]
    assert list(parse_options(["--workers", "4"], MODES, SECOND).workers) == [4]


@pytest.mark.parametrize(
    ("argv", "ranks", "said"),
    [
        (["--passes", "timing", "cold"], SECOND, "new processes"),
        (["--mode", "async", "--device", "cuda"], SECOND, "on the CPU only"),
        (["--url", "memory://x"], SECOND, "every rank has another one"),
        ([], Ranks(1, 2, 1, group="no group"), "need --url"),
    ],
)
def test_options_are_refused_when_they_mean_nothing_over_ranks(
    argv: list[str], ranks: Ranks, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_options(argv, MODES, ranks)
    assert said in capsys.readouterr().err
    parse_options(argv, MODES)


def test_place_is_closed_by_the_first_rank_only(tmp_path: Path) -> None:
    kept = tmp_path / "place"
    kept.mkdir()
    Place(str(kept), {}, SECOND).close()
    assert kept.exists()
    Place(str(kept), {}).close()
    assert not kept.exists()
