"""The training loop whose speed an asynchronous save is judged by.

Runs in: trainer, on the thread that also calls `async_save`. One thread owns a loop.

A step is what a small trainer does: a batch is put together in Python, a network goes forward and
backward, an optimizer steps, a loss is read. Most of it is torch without the GIL; the rest needs
the GIL, and waits whenever a save in another thread holds it. torch uses the threads that it uses
by default.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

__all__ = ["LOOPS", "MatmulLoop", "Steps", "StillRunningError", "TrainingLoop", "percentile"]

_WIDTH, _NUM_LAYERS = 256, 4
_BATCHES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_LEAST_STEP_S = 2.5e-3
_TRIAL_STEPS = 24
# Turns of a Python loop per step: some 0.3 ms, a tenth of the step, as a data loader's share.
_PYTHON_TURNS = 4000
# Rows and columns of the matrices of a matmul loop: some 5 ms on one core of 50 GFLOP/s.
_MATRIX_SIDE = 512


class StillRunningError(RuntimeError):
    """What the loop was to run beside does not end. No TimeoutError: a save may raise one."""


class Steps(NamedTuple):
    """What the loop did in a stretch of time.

    Attributes:
        window_s: from the start of the first step to the end of the last.
        steps_s: seconds of each step, from the end of the one before it.
    """

    window_s: float
    steps_s: list[float]


class TrainingLoop:
    """Trains a small network for real, with a batch such that a step takes 2.5 to 5 ms.

    Args:
        device: where the network lies.
    """

    def __init__(self, device: str = "cpu") -> None:
        layers: list[torch.nn.Module] = []
        for _ in range(_NUM_LAYERS):
            layers += [torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.GELU()]
        self._network = torch.nn.Sequential(*layers).to(device)
        # A rate of 0, with the same work: a network that learns would have other numbers in the
        # end than at the beginning, and denormal ones take a hundred times as long.
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=0.0, momentum=0.9)
        self._device = device
        self._metrics: dict[str, float] = {}
        self._choose_batch()

    def step(self) -> None:
        """One step. Ends when its result is known, on an accelerator too."""
        total = 0
        for number in range(_PYTHON_TURNS):
            total += number & 7
        loss = self._network(self._batch).square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._metrics = {"loss": loss.item(), "tokens": float(total)}

    def run_for(self, seconds: float) -> Steps:
        """Train for `seconds`, at least one step."""
        end = time.perf_counter() + seconds
        return self.run_until(lambda: time.perf_counter() >= end)

    def run_until(self, done: Callable[[], bool], limit_s: float | None = None) -> Steps:
        """Train, at least one step, until `done()` is true after a step.

        Raises:
            StillRunningError: that took longer than `limit_s` seconds.
        """
        began = last = time.perf_counter()
        steps_s: list[float] = []
        while True:
            self.step()
            now = time.perf_counter()
            steps_s.append(now - last)
            last = now
            if done():
                return Steps(now - began, steps_s)
            if limit_s is not None and now - began > limit_s:
                raise StillRunningError(f"not done after {limit_s:.0f} s of training")

    def _choose_batch(self) -> None:
        for size in _BATCHES:
            self._batch = torch.randn(size, _WIDTH, device=self._device)
            for _ in range(_TRIAL_STEPS // 6):
                self.step()
            trial = [self.run_for(0).window_s for _ in range(_TRIAL_STEPS)]
            if min(trial) >= _LEAST_STEP_S:  # others can only make a step longer
                return


class MatmulLoop(TrainingLoop):
    """Multiplies matrices and does nothing else: what a save costs in cores, not in the GIL.

    Args:
        device: where the matrices lie.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.left, self.right = torch.randn(2, _MATRIX_SIDE, _MATRIX_SIDE, device=device)
        self.product = torch.empty_like(self.left)

    def step(self) -> None:
        """One product. Ends when it is known, on an accelerator too."""
        torch.mm(self.left, self.right, out=self.product)
        self.product[0, 0].item()


LOOPS: dict[str, Callable[[str], TrainingLoop]] = {"training": TrainingLoop, "matmul": MatmulLoop}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed.

    Args:
        values: in any order.
        share: 0 to 1.

    Raises:
        ValueError: `values` is empty.
    """
    if not values:
        raise ValueError("nothing was measured")
    ordered = sorted(values)
    rank = -int(-share * len(ordered) // 1)  # rounded up
    return ordered[min(max(rank, 1), len(ordered)) - 1]
