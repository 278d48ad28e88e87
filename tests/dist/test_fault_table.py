"""The fault table on two ranks: whatever hits one rank's worker, both ranks hear of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import mpwriter
from tests import fault_table, ranks
from tests.fakes import FaultPlan
from tests.fault_checks import Attempt, Before, assert_next_save_works, attempt_to, judge
from tests.fault_table import Case, state_of_rank, state_of_ranks
from tests.ranks import RankPair
from tests.saves import worker_pids

pytestmark = pytest.mark.slow  # two ranks, 106 cells


@pytest.mark.parametrize("case", fault_table.cases(fault_table.RANKS), ids=str)
def test_save_ends_in_one_of_two_states_when_a_rank_is_hit(
    case: Case, rank_pair: RankPair, checkpoint_dir: Path, place: str, plan: FaultPlan
) -> None:
    """F13, A05, C01, C02, B01: both ranks raise, and what loads is old or new, whole.

    And the next save of both finds everything it needs.
    """
    if case.with_old:
        rank_pair.run(_save, place, 1, plan.options)
    before = Before.of(checkpoint_dir)
    plan.add(**case.rule)
    answers = rank_pair.run(_save, place, 2, {**plan.options, **case.cause.options})
    states = {"old": state_of_ranks(1), "new": state_of_ranks(2)}
    judge(case, plan, answers, checkpoint_dir, before, **states)

    plan.clear()
    for _, attempt in rank_pair.run(_save, place, 3, plan.options):
        assert_next_save_works(attempt, checkpoint_dir, state_of_ranks(3), 1)


def _save(place: str, number: int, options: dict[str, Any]) -> tuple[list[int], Attempt]:
    """On a rank: its worker beforehand, and what came of the save."""
    mpwriter.warm_up(1)
    workers = worker_pids()
    dist.barrier()
    state = state_of_rank(number, dist.get_rank())
    return workers, attempt_to(ranks.save, place, state, **options)
