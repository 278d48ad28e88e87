"""Whether all ranks of a load read the same checkpoint.

Runs in: trainer. No collective of its own: what a rank sees travels with its plan, and the
coordinator compares in `prepare_global_plan`, whose errors DCP sends to every rank.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from torch.distributed.checkpoint.planner import LoadPlan

from mpwriter.errors import IncompleteCheckpointError

__all__ = ["RankView", "check_agreement", "with_view", "without_views"]


class RankView(NamedTuple):
    """What one rank reads from.

    Attributes:
        place: the checkpoint, without credentials.
        save_id: of the save that made it, as its metadata has it.
        use_collectives: False where the rank found only metadata of its own.
    """

    place: str
    save_id: str | None
    use_collectives: bool


def with_view(plan: LoadPlan, view: RankView) -> LoadPlan:
    """Send `view` with the plan, unless its planner uses the place."""
    if plan.storage_data is not None:
        return plan
    return dataclasses.replace(plan, storage_data=view)


def without_views(plans: list[LoadPlan]) -> list[LoadPlan]:
    """Give the plans back as the planners made them."""
    return [
        dataclasses.replace(plan, storage_data=None)
        if isinstance(plan.storage_data, RankView)
        else plan
        for plan in plans
    ]


def check_agreement(plans: list[LoadPlan]) -> None:
    """Compare the views of all ranks.

    Raises:
        IncompleteCheckpointError: some ranks see the checkpoint's metadata and others only their
            own (DCP would wait for ever in two different collectives), or the metadata of two
            saves into the same place.
    """
    views = {
        rank: plan.storage_data
        for rank, plan in enumerate(plans)
        if isinstance(plan.storage_data, RankView)
    }
    alone = [rank for rank, view in views.items() if not view.use_collectives]
    if alone and len(alone) < len(views):
        place = views[alone[0]].place
        raise IncompleteCheckpointError(
            f"no complete checkpoint at {place}: ranks {alone} see no .metadata there, the other "
            "ranks do",
            path=place,
        )
    if not alone:  # else each rank's metadata is of a save of its own
        _check_saves(views)


def _check_saves(views: dict[int, RankView]) -> None:
    saves: dict[str, str | None] = {}
    for rank, view in views.items():
        if saves.setdefault(view.place, view.save_id) != view.save_id:
            raise IncompleteCheckpointError(
                f"the checkpoint at {view.place} was overwritten while it was being read: rank "
                f"{rank} sees another save than the ranks before it",
                path=view.place,
            )
