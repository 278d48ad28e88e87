"""The command behind `make soak`: its shortest run, and that it finds what it is there to find."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.saves import save
from tests.trainers import REPOSITORY

# Three interpreters import torch at the same time.
_WATCHDOG_S = 150.0

# Its first steps are without a blocked filesystem, which takes seconds; with kills and errors.
_SEED = "3"


def figure(table: str, name: str) -> int:
    found = re.search(rf"^{name} +(\d+)$", table, re.MULTILINE)
    assert found, table
    return int(found[1])


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_soak_ends_well_when_nothing_is_lost() -> None:
    """Issue 4: the table has the figures, and the status is 0."""
    done = subprocess.run(
        [sys.executable, "scripts/soak.py", "--saves", "12", "--seed", _SEED],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=_WATCHDOG_S,
        check=False,
    )
    table = done.stdout
    assert done.returncode == 0, done.stderr
    assert table.startswith(f"seed {_SEED}\n")
    num_saves = figure(table, "saves")
    assert num_saves in (12, 13)
    assert figure(table, "completed") + figure(table, "failed as expected") == num_saves
    assert figure(table, "completed") > 0 and figure(table, "failed as expected") > 0
    assert figure(table, "faults injected") > 0
    for name in ("silent losses", "unexpected failures", "hangs", "leaks"):
        assert figure(table, name) == 0


# -- what it finds ------------------------------------------------------------------------------

# Of a rank that holds nothing that it should not.
_FACTS = {
    "workers": [],
    "strays": [],
    "savers": 0,
    "leases": 0,
    "claimed_bytes": 0,
    "memfds_beyond_segments": 0,
    "threads": 5,
    "fds": 20,
    "worker_fds": 8,
    "rss_bytes": 300 << 20,
}


class Rank:
    """Answers what it was told to."""

    def __init__(self, answer: dict[str, Any] | None) -> None:
        self.said = answer
        self.workers: set[int] = set()

    def ask(self, number: int) -> None:
        pass

    def answer(self, within_s: float) -> dict[str, Any] | None:
        return self.said

    def tail(self) -> str:
        return "the end of its log"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    import soak

    return soak


@pytest.fixture
def run(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A soak of which only the steps are real; `run.step` is one save without a fault."""
    monkeypatch.setattr(scripts, "RankProcess", lambda *args: Rank(None))
    made = scripts.Soak(argparse.Namespace(seed=1, saves=9, minutes=1), tmp_path)
    planned = scripts.PlannedSave("1/0/kept0", "kept0", "fault", False)
    made.step = scripts.Step(0, (planned,), _fault("none"), {})
    return made


def _fault(kind: str, **fields: Any) -> Any:
    from soak_steps import Fault

    return Fault(kind, 0, **fields)


def carry_out(run: Any, *outcomes: str | None, **facts: Any) -> None:
    answers = [{"outcomes": [o], "fired": 0, "facts": {**_FACTS, **facts}} for o in outcomes]
    run.ranks = [Rank(answer) for answer in answers]
    run._step(run.step)


def write(scripts: Any, run: Any, path: Path) -> None:
    save(path, scripts.whole_state(run.step.saves[0]))


def test_soak_lets_a_save_pass_when_it_holds_its_values(
    scripts: Any, run: Any, tmp_path: Path
) -> None:
    write(scripts, run, tmp_path / "kept0")
    carry_out(run, None, None)
    assert run.counts == Counter({"saves": 1, "completed": 1, "faults injected": 0})


@pytest.mark.parametrize("damage", ["nothing written", "other values", "a shard is gone"])
def test_soak_finds_a_completed_save_that_does_not_hold_its_values(
    damage: str, scripts: Any, run: Any, tmp_path: Path
) -> None:
    if damage == "other values":
        state = scripts.whole_state(run.step.saves[0])
        tensors = [v for v in state.values() if isinstance(v, torch.Tensor) and v.numel()]
        tensors[0].view(-1).contiguous()
        state = {**state, "rank0.note": {"seed": "another"}}
        save(tmp_path / "kept0", state)
    elif damage == "a shard is gone":
        write(scripts, run, tmp_path / "kept0")
        next((tmp_path / "kept0").glob("__0_0*")).unlink()
    with pytest.raises(scripts.ViolationError, match=r"step 0 of .*--seed 1 --saves 9") as caught:
        carry_out(run, None, None)
    assert caught.value.kind == "silent losses" and run.counts["silent losses"] == 1
    assert "the end of its log" in str(caught.value)


def test_soak_finds_a_failed_save_that_has_damaged_the_one_before(
    scripts: Any, run: Any, tmp_path: Path
) -> None:
    write(scripts, run, tmp_path / "kept0")
    carry_out(run, None, None)
    run.step = scripts.Step(1, run.step.saves, _fault("disk"), {})
    carry_out(run, "OSError", "OSError")
    assert run.counts["failed as expected"] == 1
    (tmp_path / "kept0" / ".metadata").unlink()
    with pytest.raises(scripts.ViolationError, match="does not hold"):
        carry_out(run, "OSError", "OSError")


def test_soak_finds_a_metadata_that_a_failed_save_has_left(
    scripts: Any, run: Any, tmp_path: Path
) -> None:
    """Unless the fault was at that very file: then only the word of it may have been lost."""
    write(scripts, run, tmp_path / "kept0")
    run.step = scripts.Step(1, run.step.saves, _fault("disk", rule={"name": "__0_*"}), {})
    with pytest.raises(scripts.ViolationError, match=r"left a \.metadata"):
        carry_out(run, "OSError", "OSError")
    run.step = scripts.Step(1, run.step.saves, _fault("disk", rule={"name": ".metadata"}), {})
    carry_out(run, "OSError", "OSError")


@pytest.mark.parametrize(
    ("outcomes", "kind", "words"),
    [
        (("OSError", "OSError"), "unexpected failures", "nothing was wrong"),
        ((None, "OSError"), "unexpected failures", "disagree"),
    ],
)
def test_soak_finds_a_failure_that_nothing_explains(
    outcomes: tuple[str | None, ...], kind: str, words: str, scripts: Any, run: Any
) -> None:
    with pytest.raises(scripts.ViolationError, match=words) as caught:
        carry_out(run, *outcomes)
    assert caught.value.kind == kind


@pytest.mark.parametrize("name", ["leases", "strays", "savers", "memfds_beyond_segments"])
def test_soak_finds_what_a_rank_has_not_given_back(
    name: str, scripts: Any, run: Any, tmp_path: Path
) -> None:
    write(scripts, run, tmp_path / "kept0")
    with pytest.raises(scripts.ViolationError, match=name) as caught:
        carry_out(run, None, None, **{name: 1})
    assert caught.value.kind == "leaks"


@pytest.mark.parametrize("name", ["fds", "threads", "worker_fds", "rss_bytes"])
def test_soak_finds_what_grows(name: str, scripts: Any, run: Any) -> None:
    """A little more with every save, on one rank; flat figures are let pass."""
    run._history = [[_FACTS, _FACTS]] * 200
    run._check_growth()
    grown = [{**_FACTS, name: _FACTS[name] + _FACTS[name] * n // 100} for n in range(200)]
    run._history = [[_FACTS, facts] for facts in grown]
    with pytest.raises(scripts.ViolationError) as caught:
        run._check_growth()
    assert caught.value.kind == "leaks" and run.counts["leaks"] == 1
