"""Checks on a device: the arena page-locks a segment once (D11).

Runs in: trainer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mpwriter import shutdown
from mpwriter._arena import get_arena
from mpwriter._pinning import Pinner
from mpwriter._state_staging import StateStaging
from mpwriter.bench.device_rig import Result, Rig, State, checked, make_state

__all__ = ["PinLog", "check_locks"]

_NUM_SAVES = 4


class PinLog:
    """Stands between the arena of this process and the driver, and notes what passes."""

    def __init__(self, pinner: Pinner) -> None:
        self._pinner = pinner
        self.locked: set[int] = set()
        self.num_locks = self.num_refused = self.num_twice = 0

    def register(self, address: int, nbytes: int) -> bool | None:
        done = self._pinner.register(address, nbytes)
        self.num_locks += done is True
        self.num_refused += done is False
        self.num_twice += address in self.locked
        if done:
            self.locked.add(address)
        return done

    def unregister(self, address: int) -> None:
        self._pinner.unregister(address)
        self.locked.discard(address)


def check_locks(rig: Rig) -> list[Result]:
    """D11: once per segment over many saves, also where the state grows; unlocked at the end."""
    shutdown()
    arena, log = get_arena(), PinLog(rig.pinner)
    arena._pinner, previous = log, arena._pinner
    used: list[frozenset[int]] = []
    try:
        for number in range(_NUM_SAVES):
            used.append(_stage_once(rig, make_state(rig.device, number)))
        reused = len(set(used)) == 1
        for number in range(_NUM_SAVES):
            ones = torch.ones((number + 1) << 20, device=rig.device)
            _stage_once(rig, {f"t{n}": ones * n for n in range(number)})
            _stage_once(rig, {"large": ones.repeat(8)})
        results = [
            Result("memory used again by every save", reused, f"{len(used[0])} segments"),
            Result("page-locked once", log.num_locks > 0 and not log.num_twice,
                   f"{log.num_locks} locks in {3 * _NUM_SAVES} saves, {log.num_twice} twice"),
            Result("no lock refused (error 712)", not log.num_refused, f"{log.num_refused}"),
            checked("kernels run after a refused lock", partial(_refuse, rig, log)),
        ]  # fmt: skip
        shutdown()
        left = f"{len(log.locked)} still locked"
        return [*results, Result("unlocked at the end", not log.locked, left)]
    finally:
        arena._pinner = previous


def _stage_once(rig: Rig, state: State) -> frozenset[int]:
    """Stage and give the memory back; the segments that were used."""
    staging = StateStaging(rig.stream_for())
    staging.prepare(state, budget_bytes=None, timeout_s=10)
    staged = staging.copy()
    lease: Any = staged.lease
    segments = frozenset(extent.segment for extent in lease.extents)
    lease.release()
    return segments


def _refuse(rig: Rig, log: PinLog) -> str:
    """A second lock of the same pages is refused, and nothing of that is left in the driver."""
    if not log.locked:
        return "nothing is locked"
    assert not rig.pinner.register(next(iter(log.locked)), 4096), "the pages were not locked"
    ones = torch.ones(1000, device=rig.device)
    assert float((ones + ones).sum()) == 2000
    return "refused, then computed"
