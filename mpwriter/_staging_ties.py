"""Which items of a save are tied: the same view of the same storage under several keys.

Runs in: trainer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["TieTable"]


class TieTable:
    """Finds values that are the same view of the same storage, so that they are written once.

    Remembers addresses and positions only: no tensor that a planner made for the occasion is kept
    alive. An address alone proves nothing, it may recur; where it is met again, the earlier item
    is resolved once more and both tensors, now alive together, are compared. One table serves one
    save of one rank.
    """

    def __init__(self) -> None:
        # Numbers where one will do: a tuple each for 20,000 tensors would be enough to set off a
        # full collection of Python's garbage collector.
        self._positions_at: dict[int, int | tuple[int, ...]] = {}
        self.owner_of: dict[int, int] = {}  # position of a tied item -> position of the written one

    def tied(
        self, tensor: torch.Tensor, position: int, resolve: Callable[[int], torch.Tensor]
    ) -> bool:
        """Whether `tensor` equals the view of an earlier position; if not, remember it."""
        address = tensor.data_ptr()
        earlier = self._positions_at.setdefault(address, position)
        if earlier == position:
            return False
        if isinstance(earlier, int):
            earlier = (earlier,)
        for other in earlier:
            if other != position and _same_view(tensor, resolve(other)):
                self.owner_of[position] = other
                return True
        if position not in earlier:
            self._positions_at[address] = (*earlier, position)
        return False


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.device == other.device
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )
