"""One of two ranks dies, at every point of a save: the other one, the directory, a new pair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import fault_trainers
from tests.fakes import FaultPlan
from tests.fault_checks import Before
from tests.fault_table import POINTS, state_of_rank, state_of_ranks
from tests.fault_trainers import TrainerCase
from tests.saves import assert_holds, names_in, save
from tests.trainers import Trainer, wait_until

Start = Callable[..., Trainer]

_SAVES = """
import sys
import torch.distributed as dist
from tests import ranks
from tests.fault_table import state_of_rank
from tests.fault_trainers import die_when_told, join_group

pytestmark = pytest.mark.slow  # two ranks that start anew for each case
rank, rendezvous, url, plan, order = sys.argv[1:]
die_when_told(order)
join_group(int(rank), rendezvous)
ranks.save(url, state_of_rank(2, dist.get_rank()), plan=plan)
print("saved")
"""


@pytest.mark.parametrize("case", fault_trainers.cases(list(POINTS), 0, 1), ids=str)
def test_other_rank_ends_with_an_error_when_a_rank_dies(
    case: TrainerCase,
    start_trainer: Start,
    checkpoint_dir: Path,
    place: str,
    plan: FaultPlan,
    tmp_path: Path,
) -> None:
    """F13, B01, B10: no rank waits for a dead one; before the swap nothing of the save loads."""
    if case.with_old:
        state = {**state_of_rank(1, 0), **state_of_rank(1, 1)}
        save(place, state, num_workers=1, **plan.options)
    before = Before.of(checkpoint_dir)
    plan.add(**case.rule)
    orders = [tmp_path / f"order{rank}" for rank in range(2)]
    pair = [
        start_trainer(_SAVES, rank, tmp_path / "rendezvous", place, plan.folder, orders[rank])
        for rank in range(2)
    ]
    wait_until(lambda: plan.num_acts() == case.num_blocked)
    assert case.rank is not None
    dying, survivor = pair[case.rank], pair[1 - case.rank]
    survivors_workers = survivor.workers()
    fault_trainers.end(case, dying, orders[case.rank])
    plan.release()
    fault_trainers.assert_ends_with_error(survivor, survivors_workers)
    new = state_of_ranks(2)
    fault_trainers.judge(case, checkpoint_dir, before, old=state_of_ranks(1), new=new)

    plan.clear()
    save(place, state_of_ranks(3), num_workers=1, **plan.options)
    assert_holds(checkpoint_dir, state_of_ranks(3))
    assert [name for name in names_in(checkpoint_dir) if name.endswith(".tmp")] == []
