"""One asynchronous save, measured from the training loop's side.

Runs in: trainer, on the thread that trains.

    idle | async_save ...  |  the loop runs while the save does   | cleaning up, not measured
         |<--- stall ----->|<------------ window ---------------->|
                                    saved ^   ^ end of that step

    lost = stall + window - steps in the window x seconds of an idle step
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

from mpwriter.bench.async_subjects import AsyncSubject, Saver
from mpwriter.bench.neighbours import Neighbours
from mpwriter.bench.ranks import ALONE, Ranks
from mpwriter.bench.training import TrainingLoop

__all__ = ["AsyncSample", "timed_async_save"]

_SAVE_LIMIT_S = 600.0
_CALL_BACK_S = 1e-4
# A machine is calm where others use less than this many cores.
_CALM_CORES = 0.2


@dataclass(frozen=True)
class AsyncSample:
    """One save in the background.

    Attributes:
        stall_s: until `async_save` returned, the writer's construction included.
        staged_s: from the call until the tensors may change.
        save_s: from the call to the complete checkpoint.
        window_s: from the return to the end of the first step after that.
        steps_s: of the training steps in the window.
        idle_steps_s: of those just before the call.
        idle_others, others: cores that other programs kept busy before the call and from then on.
    """

    stall_s: float
    staged_s: float
    save_s: float
    window_s: float
    steps_s: Sequence[float] = field(repr=False)
    idle_steps_s: Sequence[float] = field(repr=False)
    idle_others: float = 0.0
    others: float = 0.0

    @property
    def began_calm(self) -> bool:
        """Whether next to nothing else ran before the call."""
        return self.idle_others < _CALM_CORES

    @property
    def calm(self) -> bool:
        """Whether next to nothing else ran all the time; else the figures are not the save's."""
        return self.began_calm and self.others < _CALM_CORES

    @property
    def idle_step_s(self) -> float:
        return sum(self.idle_steps_s) / len(self.idle_steps_s)

    @property
    def share(self) -> float:
        """Steps per second in the window over those before the call."""
        return len(self.steps_s) * self.idle_step_s / self.window_s

    @property
    def lost_s(self) -> float:
        """Training time that the save took away: the stall, and the loss of speed."""
        return self.stall_s + self.window_s * (1 - self.share)

    @property
    def longest_gap_s(self) -> float:
        return max(self.steps_s)

    def as_json(self) -> dict[str, Any]:
        """Every figure; the times of steps in microseconds."""
        times = asdict(self)
        steps_s, idle_steps_s = times.pop("steps_s"), times.pop("idle_steps_s")
        times.pop("of_ranks", None)  # each rank has its own entry
        return {
            **times,
            "share": self.share,
            "lost_s": self.lost_s,
            "steps_us": [round(step * 1e6) for step in steps_s],
            "idle_steps_us": [round(step * 1e6) for step in idle_steps_s],
        }


def timed_async_save(
    subject: AsyncSubject,
    saver: Saver,
    url: str,
    loop: TrainingLoop,
    *,
    idle_s: float,
    max_idle_tries: int = 1,
    ranks: Ranks = ALONE,
) -> AsyncSample:
    """Save once while the loop trains, and measure; nothing is removed.

    Args:
        subject: how.
        saver: holds the state.
        url: of the checkpoint.
        loop: trains on this thread.
        idle_s: seconds of training before the call, to compare with.
        max_idle_tries: how often to train as long, waiting for a machine that is calm.
        ranks: who save and train together.

    Raises:
        Whatever the call or the save raises; StillRunningError when it does not end.
    """
    gc.collect()  # what earlier saves left is not this one's to clean up
    for _ in range(max_idle_tries):
        ranks.barrier()
        before = Neighbours(ranks.launcher)
        idle = loop.run_for(idle_s)
        idle_others = ranks.most(before.num_cores())
        if idle_others < _CALM_CORES:
            break
    ends: dict[str, float] = {}
    meanwhile = Neighbours(ranks.launcher)
    ranks.barrier()
    began = time.perf_counter()
    started = saver.start(subject, url)
    returned = time.perf_counter()
    _note_end(started.saved, "saved", ends)
    if started.staged is not None:
        _note_end(started.staged, "staged", ends)
    steps = loop.run_until(started.saved.done, _SAVE_LIMIT_S)
    others = meanwhile.num_cores()
    started.saved.result()
    while "saved" not in ends:  # a future is done before it calls back
        time.sleep(_CALL_BACK_S)
    return AsyncSample(
        stall_s=returned - began,
        staged_s=ends.get("staged", returned) - began,
        save_s=max(ends["saved"], returned) - began,
        window_s=steps.window_s,
        steps_s=steps.steps_s,
        idle_steps_s=idle.steps_s,
        idle_others=idle_others,
        others=others,
    )


def _note_end(future: Future[object], name: str, ends: dict[str, float]) -> None:
    future.add_done_callback(lambda _: ends.__setitem__(name, time.perf_counter()))
