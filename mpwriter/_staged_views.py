"""Tensors on leased extents.

Runs in: trainer.

A trainer that saves the same state again gets the same extents for it, and here the same tensors:
20,000 new ones cost 25 ms, and a collection of the garbage collector on top.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch

from mpwriter._arena import Arena
from mpwriter._types import Extent

__all__ = ["StagedViews", "views"]

# Saves in flight at the same time have extents of their own; more than this is rare.
_REMEMBERED = 4


class StagedViews:
    """Makes them, and remembers the latest. Thread-safe.

    What is remembered goes when the arena frees a segment: it would keep that mapped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[Extent, ...], tuple[list[int], list[torch.Tensor]]] = {}
        self._listening: weakref.WeakSet[Arena] = weakref.WeakSet()

    def on(
        self,
        arena: Arena,
        extents: Sequence[Extent],
        packs: list[int],
        offsets: list[int],
        likes: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """One row-major tensor per item of `likes`, of its dtype and shape.

        Args:
            extents: leased.
            packs, offsets: of each tensor, which extent and where in it.
        """
        self._listen(arena)
        key = tuple(extents)
        with self._lock:
            known = self._known.pop(key, None)
            if known is None or known[0] != offsets or not _alike(known[1], likes):
                known = (offsets, _make(arena, extents, packs, offsets, likes))
            self._known[key] = known
            while len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
            return known[1]

    def forget(self) -> None:
        """Let go of every remembered tensor."""
        with self._lock:
            self._known.clear()

    def _listen(self, arena: Arena) -> None:
        if arena not in self._listening:
            self._listening.add(arena)
            arena.add_listener(lambda segments: self.forget())


views = StagedViews()


def _alike(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    if len(some) != len(others):
        return False
    for one, other in zip(some, others, strict=True):
        if one.dtype is not other.dtype or one.shape != other.shape:
            return False
    return True


def _make(
    arena: Arena,
    extents: Sequence[Extent],
    packs: list[int],
    offsets: list[int],
    likes: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    typed: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    strides_of: dict[torch.Size, list[int]] = {}
    made = []
    with torch.inference_mode(False):
        for like, pack, within in zip(likes, packs, offsets, strict=True):
            segment, offset, _ = extents[pack]
            dtype, shape = like.dtype, like.shape
            base = typed.get((segment, dtype))
            if base is None:
                whole = Extent(segment, 0, arena.segment_nbytes(segment))
                base = typed[(segment, dtype)] = arena.tensor(whole).view(dtype)
            strides = strides_of.get(shape)
            if strides is None:
                strides = strides_of[shape] = _row_major(shape)
            made.append(base.as_strided(shape, strides, (offset + within) // dtype.itemsize))
    return made


def _row_major(shape: torch.Size) -> list[int]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return strides
