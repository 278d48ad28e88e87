"""Tensors on leased extents.

Runs in: trainer.

A trainer that saves the same state again gets the same extents for it, and here the same tensors:
20,000 new ones cost 25 ms, and a collection of the garbage collector on top.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mpwriter._arena import Arena
from mpwriter._types import Extent

__all__ = ["StagedViews", "row_major", "views"]

# Saves in flight at the same time have extents of their own; more than this is rare.
_REMEMBERED = 4


class _Known(NamedTuple):
    offsets: Sequence[int]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    tensors: list[torch.Tensor]


class StagedViews:
    """Makes them, and remembers the latest. Thread-safe.

    What is remembered goes when the arena frees a segment: it would keep that mapped.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[Extent, ...], _Known] = {}
        self._listening: weakref.WeakSet[Arena] = weakref.WeakSet()

    def on(
        self,
        arena: Arena,
        extents: Sequence[Extent],
        packs: Sequence[int],
        offsets: Sequence[int],
        dtypes: list[torch.dtype],
        shapes: list[torch.Size],
    ) -> list[torch.Tensor]:
        """One row-major tensor of each dtype and shape.

        Each on a storage of its own bytes only: where a planner pickles it, as part of a tuple, a
        view of the whole segment would take all of its neighbours along.

        Args:
            extents: leased.
            packs, offsets: of each tensor, which extent and where in it.
        """
        self._listen(arena)
        key = tuple(extents)
        with self._lock:
            known = self._known.pop(key, None)
            if (
                known is None
                or known.offsets != offsets
                or known.dtypes != dtypes
                or known.shapes != shapes
            ):
                made = _make(arena, extents, packs, offsets, dtypes, shapes)
                known = _Known(offsets, dtypes, shapes, made)
            self._known[key] = known
            while len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
            return known.tensors

    def forget(self) -> None:
        """Let go of every remembered tensor."""
        with self._lock:
            self._known.clear()

    def forget_in_child(self) -> None:
        """In a fork: the memory is the parent's, and a thread that is gone may hold the lock."""
        self._begin()

    def _listen(self, arena: Arena) -> None:
        if arena not in self._listening:
            self._listening.add(arena)
            arena.add_listener(lambda segments: self.forget())


views = StagedViews()
os.register_at_fork(after_in_child=views.forget_in_child)


def _make(
    arena: Arena,
    extents: Sequence[Extent],
    packs: Sequence[int],
    offsets: Sequence[int],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[torch.Size],
) -> list[torch.Tensor]:
    storages: dict[int, torch.UntypedStorage] = {}
    strides_of: dict[torch.Size, list[int]] = {}
    made = []
    with torch.inference_mode(False):
        for dtype, shape, pack, within in zip(dtypes, shapes, packs, offsets, strict=True):
            segment, offset, _ = extents[pack]
            storage = storages.get(segment)
            if storage is None:
                storage = storages[segment] = arena.storage(segment)
            strides = strides_of.get(shape)
            if strides is None:
                strides = strides_of[shape] = row_major(shape)
            start = offset + within
            own: Any = storage[start : start + math.prod(shape) * dtype.itemsize]
            made.append(torch.empty(0, dtype=dtype, device="cpu").set_(own, 0, shape, strides))
    return made


def row_major(shape: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return strides
