"""The trainer dies, at every point of a save: what its directory holds, and the next trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import fault_trainers
from tests.fakes import FaultPlan
from tests.fault_checks import Before, assert_next_save_works, attempt_to
from tests.fault_table import NUM_WORKERS, POINTS, state_of
from tests.fault_trainers import TrainerCase
from tests.saves import save
from tests.trainers import Trainer, wait_until

Start = Callable[..., Trainer]

_SAVES = """
import sys
from tests.fault_table import NUM_WORKERS, state_of
from tests.fault_trainers import die_when_told
from tests.saves import save
url, plan, order = sys.argv[1:]
die_when_told(order)
save(url, state_of(2), num_workers=NUM_WORKERS, plan=plan)
print("saved")
"""


@pytest.mark.parametrize("case", fault_trainers.cases(list(POINTS), None), ids=str)
def test_next_trainer_finds_one_of_two_states_when_the_trainer_dies(
    case: TrainerCase,
    start_trainer: Start,
    checkpoint_dir: Path,
    place: str,
    plan: FaultPlan,
    tmp_path: Path,
) -> None:
    """B01, B10: before the swap nothing of the save loads; the next one sweeps and works."""
    if case.with_old:
        save(place, state_of(1), num_workers=NUM_WORKERS, **plan.options)
    before = Before.of(checkpoint_dir)
    plan.add(**case.rule)
    order = tmp_path / "order"
    trainer = start_trainer(_SAVES, place, plan.folder, order)
    wait_until(lambda: plan.num_acts() == case.num_blocked)
    fault_trainers.end(case, trainer, order)
    fault_trainers.judge(case, checkpoint_dir, before, old=state_of(1), new=state_of(2))

    plan.clear()
    attempt = attempt_to(save, place, state_of(3), num_workers=NUM_WORKERS, **plan.options)
    assert_next_save_works(attempt, checkpoint_dir, state_of(3), NUM_WORKERS)
