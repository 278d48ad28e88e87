"""The fault table in a single process: whatever hits its workers, wherever in a save."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

import mpwriter
from tests import fault_table
from tests.fakes import FaultPlan
from tests.fault_checks import Before, assert_next_save_works, attempt_to, judge
from tests.fault_table import NUM_WORKERS, Case, state_of
from tests.saves import assert_holds, names_in, save, worker_pids


@pytest.mark.parametrize("case", fault_table.cases(fault_table.WORKERS), ids=str)
def test_save_ends_in_one_of_two_states_when_a_worker_is_hit(
    case: Case, checkpoint_dir: Path, place: str, plan: FaultPlan
) -> None:
    """A05, C01, C02, B01: an error and the checkpoint before, or the new one, complete.

    And the next save finds everything it needs.
    """
    if case.with_old:
        save(place, state_of(1), num_workers=NUM_WORKERS, **plan.options)
    mpwriter.warm_up(NUM_WORKERS)
    before, workers = Before.of(checkpoint_dir), worker_pids()
    plan.add(**case.rule)
    options = {**plan.options, **case.cause.options}
    attempt = attempt_to(save, place, state_of(2), num_workers=NUM_WORKERS, **options)
    states = {"old": state_of(1), "new": state_of(2)}
    judge(case, plan, [(workers, attempt)], checkpoint_dir, before, **states)

    plan.clear()
    attempt = attempt_to(save, place, state_of(3), num_workers=NUM_WORKERS, **plan.options)
    assert_next_save_works(attempt, checkpoint_dir, state_of(3), NUM_WORKERS)


@pytest.mark.parametrize(
    ("protocol", "op"),
    [
        ("objectlike", "commit"),
        ("objectlike", "cp"),
        ("commitlike", "commit"),
        ("closelike", "commit"),
    ],
)
def test_save_leaves_no_object_when_only_the_word_of_an_upload_is_lost(
    checkpoint_dir: Path, plan: FaultPlan, protocol: str, op: str
) -> None:
    """A05, invariant 4: "before the reply" on object stores; the shard is there, and unknown."""
    place = f"{protocol}://{checkpoint_dir}"
    plan.add(op, "__0_1.*", after=True, errno=errno.EIO)
    attempt = attempt_to(save, place, state_of(1), num_workers=NUM_WORKERS, **plan.options)
    assert plan.num_acts() == 1
    assert attempt.errors is not None and attempt.leaks == []
    assert attempt.errors[0].fields["errno"] == errno.EIO
    assert [name for name in names_in(checkpoint_dir) if "__0_" in name or "metadata" in name] == []
    plan.clear()
    save(place, state_of(2), num_workers=NUM_WORKERS, **plan.options)
    assert_holds(checkpoint_dir, state_of(2))
