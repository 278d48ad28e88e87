"""Loading what we wrote, after it was damaged or into something it does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from mpwriter import FsspecReader
from tests.saves import failure_of, load, save, small_state

STATE = small_state(1, num_tensors=8, numel=5000)


@pytest.mark.parametrize("cut", [1, 1000, 0.5, None, "deleted"])
def test_load_names_the_shard_when_it_was_cut_off(
    checkpoint_dir: Path, cut: float | str | None
) -> None:
    """A08: by 1 byte, by 1000, by half, to nothing, or deleted; the key is named as well."""
    save(checkpoint_dir, STATE)
    shard = next(checkpoint_dir.glob("__0_1.*.distcp"))
    size = shard.stat().st_size
    if cut == "deleted":
        shard.unlink()
    else:
        left = 0 if cut is None else size - cut if isinstance(cut, int) else size // 2
        with open(shard, "r+b") as file:
            file.truncate(left)
    with pytest.raises(CheckpointException) as caught:
        load(checkpoint_dir, STATE)
    error = failure_of(caught.value)
    assert shard.name in str(error)
    key = getattr(error, "key", None)
    assert key in STATE and key in str(error)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("shape", [(5,), (2, 2), (1, 4)])
def test_load_raises_when_the_target_has_another_shape(
    checkpoint_dir: Path, shape: tuple[int, ...]
) -> None:
    """A11: (4,) does not go into (5,), (2, 2) or (1, 4); the target is as it was."""
    save(checkpoint_dir, {"weight": torch.arange(4.0), "other": torch.ones(3)})
    target = {"weight": torch.full(shape, -1.0), "other": torch.zeros(3)}
    with pytest.raises((ValueError, CheckpointException)) as caught:
        dcp.load(target, storage_reader=FsspecReader(checkpoint_dir), no_dist=True)
    error = caught.value
    if isinstance(error, CheckpointException):
        error = failure_of(error)
    assert isinstance(error, ValueError)
    assert "weight" in str(error)
    assert torch.equal(target["weight"], torch.full(shape, -1.0))
