"""scripts/benchmark.py under torchrun: every mode over two ranks, one table, one file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.torchrun.jobs import Job, torchrun
from tests.trainers import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BENCHMARK = REPOSITORY / "scripts" / "benchmark.py"
QUICK = "--quick --rounds 1 --workers 1 --threads 1 --states small".split()
# Where the JSON of each mode has its rows.
ROWS = {"sync": "timing", "async": "saves", "load": "loads"}
FAMILIES = {
    "sync": ["ours", "fsspec", "plain", "planning"],
    "async": ["ours", "planning"],
    "load": ["ours", "fsspec", "plain"],
}
# 500 tensors of 4 KiB, of which each rank has a half.
STATE_BYTES = 500 * 4096


@pytest.mark.parametrize("mode", ROWS)
def test_benchmark_shows_every_rank_and_the_job_when_under_torchrun(
    mode: str, start: Callable[..., Job], tmp_path: Path
) -> None:
    place, figures = tmp_path / "place", tmp_path / "figures.json"
    place.mkdir()
    options = ["--mode", mode, "--verify", "--url", place, "--json", figures]
    options += ["--families", *FAMILIES[mode], "--checkpointers", "thread"]
    job = start(torchrun(2, BENCHMARK, *QUICK, *options))
    job.assert_succeeded()
    assert job.stdout.count("machine:") == 1, job.story()
    assert job.stdout.count("small: 500 tensors, 1.95 MiB, among 2 ranks") == 1, job.story()
    assert list(place.iterdir()) == []
    (state,) = json.loads(figures.read_text())["states"]
    assert state["nbytes"] == STATE_BYTES
    assert [rank["nbytes"] for rank in state["ranks"]] == [STATE_BYTES // 2] * 2
    rows = ROWS[mode]
    assert state[rows]
    for label, row in state[rows].items():
        assert len(row["samples"]) == 1
        assert all(len(rank[rows][label]["samples"]) == 1 for rank in state["ranks"])
        (at,) = [
            n for n, line in enumerate(job.stdout.splitlines()) if line.startswith(label + " ")
        ][:1]
        below = job.stdout.splitlines()[at + 1 : at + 3]
        assert [line.split()[:2] for line in below] == [["rank", "0"], ["rank", "1"]], job.story()


def test_benchmark_ends_and_says_why_once_when_an_option_means_nothing_over_ranks(
    start: Callable[..., Job],
) -> None:
    job = start(torchrun(2, BENCHMARK, "--passes", "cold"))
    assert job.ended() != 0
    assert job.stderr.count("they measure new processes") == 1, job.story()
    assert job.stdout == ""


def test_benchmark_ends_and_leaves_nothing_when_one_rank_fails(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    """The second one fails on its own, while the first one goes on to wait for it."""
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from mpwriter.bench import main, subjects\n"
        "def fail(*_):\n"
        "    raise OSError(5, 'this rank only')\n"
        "if os.environ['RANK'] == '1':\n"
        "    subjects._SAVERS['plain'] = fail\n"
        "sys.exit(main.main())\n"
    )
    place = tmp_path / "place"
    place.mkdir()
    job = start(torchrun(2, script, *QUICK, "--url", place, "--families", "plain"))
    assert job.ended() != 0
    assert "this rank only" in job.stderr, job.story()
    assert list(place.iterdir()) == []
