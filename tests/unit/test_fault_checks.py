"""The checks of the fault table see what they are there to see, and count it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpwriter._arena import get_arena
from tests import counts, fault_checks, fault_table
from tests.fault_checks import FAULT_TABLE, Before, attempt_to
from tests.saves import names_in, save, small_state


@pytest.fixture(autouse=True)
def _own_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is provoked here is none of the run's faults."""
    monkeypatch.setattr(counts, "_counts", {})


def counted() -> dict[str, int]:
    return {figure: number for figure, number in counts.of(FAULT_TABLE).items() if number}


def test_silent_loss_is_counted_when_a_shard_of_a_save_that_returned_is_missing(
    checkpoint_dir: Path,
) -> None:
    attempt = attempt_to(save, checkpoint_dir, small_state(1))
    assert attempt.errors is None and attempt.leaks == []
    fault_checks.assert_next_save_works(attempt, checkpoint_dir, small_state(1), 2)
    assert counted() == {}
    next(checkpoint_dir.glob("*.distcp")).unlink()
    with pytest.raises(BaseException, match="distcp"):
        fault_checks.assert_next_save_works(attempt, checkpoint_dir, small_state(1), 2)
    assert counted() == {"silent_losses": 1}


def test_silent_loss_is_counted_when_the_values_are_those_of_another_save(
    checkpoint_dir: Path,
) -> None:
    save(checkpoint_dir, small_state(1))
    with pytest.raises(AssertionError):
        fault_checks.assert_nothing_lost(checkpoint_dir, small_state(2))
    assert counted() == {"silent_losses": 1}


def test_hang_is_counted_when_a_rank_ends_late() -> None:
    fault_checks.assert_quick(fault_checks.ENDS_WITHIN_S - 1)
    with pytest.raises(AssertionError, match="31"):
        fault_checks.assert_quick(fault_checks.ENDS_WITHIN_S + 1)
    assert counted() == {"hangs": 1}


def test_leak_is_told_when_a_save_does_not_give_its_memory_back() -> None:
    extents = []
    attempt = attempt_to(lambda: extents.append(get_arena().lease(1 << 16)))
    get_arena().release(extents[0])
    assert attempt.leaks == ["1 leases of 65536 bytes"]


def test_leak_is_told_when_a_save_leaves_a_file_open(tmp_path: Path) -> None:
    files: list[Any] = []
    attempt = attempt_to(lambda: files.append((tmp_path / "left").open("w")))
    files[0].close()
    assert len(attempt.leaks) == 1 and "left" in attempt.leaks[0]


@pytest.mark.parametrize("name", ["__0_0.01234567.distcp", ".__0_0.01234567.distcp.89abcdef.tmp"])
def test_leak_is_counted_when_a_failed_save_leaves_a_file(checkpoint_dir: Path, name: str) -> None:
    save(checkpoint_dir, small_state(1))
    before = Before.of(checkpoint_dir)
    fault_checks.assert_kept(checkpoint_dir, before, small_state(1))
    (checkpoint_dir / name).touch()
    with pytest.raises(AssertionError, match="left behind"):
        fault_checks.assert_kept(checkpoint_dir, before, small_state(1))
    assert counted() == {"leaks": 1}


@pytest.mark.parametrize("lost", [".metadata", "a shard", "nothing"])
def test_failed_save_is_found_out_when_it_has_touched_the_old_checkpoint(
    checkpoint_dir: Path, lost: str
) -> None:
    save(checkpoint_dir, small_state(1))
    before = Before.of(checkpoint_dir)
    if lost == "nothing":
        save(checkpoint_dir, small_state(2))  # it has become another one
    else:
        names = [name for name in names_in(checkpoint_dir) if lost in (name, "a shard")]
        (checkpoint_dir / names[-1]).unlink()
    with pytest.raises(AssertionError):
        fault_checks.assert_kept(checkpoint_dir, before, small_state(1))


def test_table_has_every_cell_once_in_both_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    for places, num_shard_places in ((fault_table.WORKERS, 3), (fault_table.RANKS, 2)):
        rounds = []
        for number in ("0", "1"):
            monkeypatch.setenv(fault_table.ROUND_VARIABLE, number)
            rounds.append({str(case) for case in fault_table.cases(places)})
        # 12 causes, two of which mean something at two of the six points only.
        assert len(rounds[0]) == len(rounds[1]) == (10 * 4 + 2) * num_shard_places + 10 * 2 + 2
        assert not rounds[0] & rounds[1]


def test_lines_tell_zeros_when_nothing_has_gone_wrong() -> None:
    counts.add("some check", faults=1200, prefixes=3)
    counts.add("some check", faults=34)
    assert list(counts.lines()) == [
        "some check: 1,234 faults injected, 3 prefixes, silent losses: 0, hangs: 0, leaks: 0"
    ]
