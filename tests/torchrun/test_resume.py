"""scripts/train.py goes on where a killed run has stopped, on any number of ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.torchrun.conftest import Reference
from tests.torchrun.jobs import (
    GLOO_AVERAGES,
    TRAIN,
    Job,
    complete_steps,
    copy_checkpoint,
    losses,
    torchrun,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Sums of other parts of the batch, in another order: the last bits may differ.
ROUNDING = 1e-4 if GLOO_AVERAGES else 1e-2


def test_train_keeps_every_checkpoint_when_told_so(
    reference: Callable[[int], Reference],
) -> None:
    run, found, _ = reference(4)
    assert complete_steps(run) == [2, 4, 6, 8]
    assert list(found) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(set(found.values())) == 8


def test_train_says_one_line_a_save_when_there_are_many_ranks(
    reference: Callable[[int], Reference],
) -> None:
    """Of the whole job, by rank 0; no progress, and no bar where nobody watches."""
    lines = [line for line in reference(4).output.splitlines() if "Saved " in line]
    assert len(lines) == 4
    for step, line in zip((2, 4, 6, 8), lines, strict=True):
        assert re.search(rf"step-{step:08}: \d+ bytes in \d+ files by \d+ workers of 4 ranks", line)
        assert re.search(r"slowest rank [0-3] wrote [\d.]+ s", line)
    assert "GiB," not in reference(4).output and "[#" not in reference(4).output


@pytest.mark.parametrize(("num_ranks", "options"), [(1, ""), (2, "--tp=2"), (3, "")], ids=str)
def test_resume_goes_on_with_the_losses_of_the_old_run_when_the_ranks_are_others(
    num_ranks: int,
    options: str,
    reference: Callable[[int], Reference],
    start: Callable[..., Job],
    tmp_path: Path,
) -> None:
    """B02, E03: from the newest complete checkpoint of 4 ranks; a later one has no end."""
    old, run = reference(4), tmp_path / "run"
    copy_checkpoint(old.run, 4, run, unfinished=6)
    (run / "step-00000007").mkdir()
    (run / "step-of-another-name").mkdir()
    job = start(torchrun(num_ranks, *TRAIN, "--steps=8", *options.split(), "--checkpoints", run))
    job.assert_succeeded()
    assert job.stderr.count("resumed from step 4") == 1
    found = losses(job.stdout)
    assert [step for step, _ in found] == [5, 6, 7, 8]
    assert dict(found) == pytest.approx({n: old.losses[n] for n in (5, 6, 7, 8)}, rel=ROUNDING)
    # Two are kept; what the killed run has left goes with them.
    assert complete_steps(run) == [6, 8]
    names = ["step-00000006", "step-00000008", "step-of-another-name"]
    assert sorted(path.name for path in run.iterdir()) == names
