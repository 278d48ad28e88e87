"""Staging without a save."""

from __future__ import annotations

from typing import Any

import torch

from mpwriter._arena import get_arena
from mpwriter._staged_state import StagedState
from mpwriter._state_staging import StateStaging
from mpwriter._streams import StreamFactory

__all__ = ["assert_own", "leased_bytes", "stage"]


def stage(
    state: dict[str, Any],
    *,
    stream_for: StreamFactory | None = None,
    budget_bytes: int | None = None,
    timeout_s: float = 0,
) -> StagedState:
    """Both steps at once."""
    staging = StateStaging(stream_for)
    staging.prepare(state, budget_bytes=budget_bytes, timeout_s=timeout_s)
    return staging.copy()


def leased_bytes() -> int:
    """What is leased in the arena of this process."""
    return get_arena().stats().leased_bytes


def assert_own(staged: torch.Tensor) -> None:
    """It lies in the arena, row after row, on a storage of its own bytes only."""
    assert type(staged) is torch.Tensor
    assert staged.is_contiguous()
    assert not staged.requires_grad and not staged.is_inference()
    assert not staged.is_conj() and not staged.is_neg()
    assert staged.untyped_storage().nbytes() == staged.nbytes
    if staged.numel():
        assert get_arena().find(staged) is not None
