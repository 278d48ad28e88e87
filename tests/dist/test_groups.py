"""Process groups: which ranks save, beside what, and that the writer itself never talks to them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from mpwriter import MPFsspecWriter
from mpwriter._compat import HAS_RANK_METADATA
from tests import ranks
from tests.ranks import RankPair
from tests.saves import assert_holds, small_state

NUM_BARRIERS = 50

needs_group_coordinator = pytest.mark.skipif(
    not HAS_RANK_METADATA, reason="DCP of torch 2.7 broadcasts from global rank 0, whatever the group"
)

COLLECTIVES = [
    name
    for name in dir(dist)
    if name.startswith(("all_", "reduce", "broadcast", "gather", "scatter", "barrier", "send"))
    and callable(getattr(dist, name))
]


@needs_group_coordinator
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_save_is_of_its_group_when_that_lacks_the_first_rank(
    mode: str, rank_pair: RankPair, checkpoint_dir: Path
) -> None:
    """G01: global rank 1 is rank 0 of its group, and the coordinator."""
    rank_pair.run(_save_on, str(checkpoint_dir), (1,), mode)
    assert_holds(checkpoint_dir, small_state(1))
    assert {path.name[:4] for path in checkpoint_dir.glob("*.distcp")} == {"__0_"}


def _save_on(path: str, members: tuple[int, ...], mode: str) -> None:
    group = ranks.group(*members)
    if dist.get_rank() in members:
        _save_in(group, path, dist.get_rank(), mode)


def _save_in(group: Any, path: str, number: int, mode: str) -> None:
    state = small_state(number)
    if mode == "sync":
        ranks.save(path, state, process_group=group)
    else:
        writer = MPFsspecWriter(path, num_workers=1)
        dcp.async_save(state, storage_writer=writer, process_group=group).result()


@needs_group_coordinator
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_groups_save_side_by_side_when_each_has_its_directory(
    mode: str, rank_pair: RankPair, tmp_path: Path
) -> None:
    """G01: hybrid sharding: every replica group saves for itself, at the same time."""
    rank_pair.run(_save_apart, str(tmp_path), mode)
    for number in range(2):
        folder = tmp_path / str(number)
        assert_holds(folder, small_state(number))
        assert {path.name[:4] for path in folder.glob("*.distcp")} == {"__0_"}


def _save_apart(folder: str, mode: str) -> None:
    groups = [ranks.group(0), ranks.group(1)]
    number = dist.get_rank()
    _save_in(groups[number], f"{folder}/{number}", number, mode)


def test_save_goes_on_when_the_trainer_uses_its_own_group_meanwhile(
    rank_pair: RankPair, checkpoint_dir: Path
) -> None:
    """G11: barriers of the training loop during a background save."""
    rank_pair.run(_save_beside_barriers, str(checkpoint_dir))
    assert_holds(checkpoint_dir, small_state(7, num_tensors=40, numel=50_000))


def _save_beside_barriers(path: str) -> None:
    group = ranks.group(0, 1)
    writer = MPFsspecWriter(path, num_workers=2)
    state = small_state(7, num_tensors=40, numel=50_000)
    saved = dcp.async_save(state, storage_writer=writer, process_group=group)
    for _ in range(NUM_BARRIERS):
        dist.barrier()
    saved.result()


def test_writer_and_reader_use_no_collective_when_they_serve_ranks(
    rank_pair: RankPair, checkpoint_dir: Path
) -> None:
    """G11: every collective of a save or a load comes from DCP's own code."""
    for callers in rank_pair.run(_save_and_load_watched, str(checkpoint_dir)):
        assert callers and not [name for name in callers if name.startswith("mpwriter")]


def _save_and_load_watched(path: str) -> list[str]:
    callers = []

    def watched(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            callers.append(frame.f_globals["__name__"])
            # Also where one of torch's own functions stands between: as far up as DCP's.
            while (frame := frame.f_back) and "checkpoint" not in frame.f_globals["__name__"]:
                callers.append(frame.f_globals["__name__"])
            return real(*args, **kwargs)

        return call

    with mock.patch.multiple(dist, **{name: watched(getattr(dist, name)) for name in COLLECTIVES}):
        ranks.save(path, small_state(dist.get_rank()))
        ranks.load(path, small_state(0))
    return callers


def test_saves_do_not_mix_when_two_are_in_flight_on_every_rank(
    rank_pair: RankPair, tmp_path: Path
) -> None:
    """A04, G01: one writer, two directories, two groups of the same ranks."""
    rank_pair.run(_save_twice, str(tmp_path))
    for number in range(2):
        for rank in range(2):
            key = f"rank{rank}.weight"
            expected = {key: torch.full((100_000,), 10.0 * number + rank)}
            assert_holds(tmp_path / str(number), expected)


def _save_twice(folder: str) -> None:
    groups = [ranks.group(0, 1, number=number) for number in range(2)]
    writer = MPFsspecWriter(f"{folder}/unused", num_workers=2)
    weight = torch.empty(100_000)
    saves = []
    for number, group in enumerate(groups):
        weight.fill_(10.0 * number + dist.get_rank())
        saves.append(
            dcp.async_save(
                {f"rank{dist.get_rank()}.weight": weight},
                checkpoint_id=f"{folder}/{number}",
                storage_writer=writer,
                process_group=group,
            )
        )
    weight.zero_()
    for saved in saves:
        saved.result()
