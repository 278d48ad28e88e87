"""Asynchronous saves: what they cost the training loop that goes on meanwhile.

Runs in: trainer. One run at a time, from the main thread, which trains.

    idle | async_save ...  |  the loop runs while the save does   | cleaning up, not measured
         |<--- stall ----->|<------------ window ---------------->|
                                    saved ^   ^ end of that step

    lost = stall + window - steps in the window x seconds of an idle step
"""

from __future__ import annotations

import gc
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.distributed.checkpoint.api import CheckpointException

from mpwriter._redact import scrub
from mpwriter.bench.async_subjects import AsyncSubject, Saver, choose_async_subjects
from mpwriter.bench.checkpoint_process import (
    end_checkpoint_process,
    release_descriptors,
    start_checkpoint_process,
)
from mpwriter.bench.options import Options
from mpwriter.bench.places import Place
from mpwriter.bench.progress import ProgressBar
from mpwriter.bench.references import CopyTimes, measure_copies
from mpwriter.bench.states import BenchState, build_state, nested, on_device
from mpwriter.bench.training import StillRunningError, TrainingLoop
from mpwriter.bench.verify import verify_checkpoint

__all__ = ["AsyncFigures", "AsyncSample", "failure_text", "measure_async", "timed_async_save"]

_SAVE_LIMIT_S = 600.0
_MAX_FAILURE_CHARS = 100

# Seconds of training before a save, and how often to wait as long for a calm machine.
_IDLE_S, _QUICK_IDLE_S = 0.6, 0.1
_MAX_CALM_TRIES = 10


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
        calm: whether these ran at full speed; else something else keeps the machine busy.
    """

    stall_s: float
    staged_s: float
    save_s: float
    window_s: float
    steps_s: Sequence[float] = field(repr=False)
    idle_steps_s: Sequence[float] = field(repr=False)
    calm: bool = True

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


@dataclass
class AsyncFigures:
    """Everything measured with one state."""

    name: str
    num_tensors: int
    nbytes: int
    samples: dict[AsyncSubject, list[AsyncSample]] = field(default_factory=dict)
    failures: dict[AsyncSubject, str] = field(default_factory=dict)
    copies: list[CopyTimes] = field(default_factory=list)


def measure_async(
    options: Options, place: Place, report: Callable[[AsyncFigures], None]
) -> list[AsyncFigures]:
    """Measure the states that `options` asks for.

    Args:
        options: what to measure.
        place: where to save.
        report: called with a state's figures as soon as they are complete.

    Raises:
        StillRunningError: a save did not end. Errors of saves are among the figures.
        RuntimeError: `verify` finds a difference.
    """
    subjects = choose_async_subjects(
        options.families,
        options.checkpointers,
        options.workers,
        options.threads,
        local=place.local_path is not None,
    )
    figures = []
    num_steps = len(options.states) * len(subjects) * (options.num_rounds + 1)
    with _quiet_dcp(), ProgressBar(num_steps) as bar:
        bar.show("starting")
        loop = TrainingLoop(options.device)
        try:
            for name in options.states:
                state = on_device(nested(build_state(name, quick=options.quick)), options.device)
                figures.append(_Run(state, subjects, place, options, loop, bar).measure())
                bar.clear()
                report(figures[-1])
        finally:
            end_checkpoint_process()
    return figures


def timed_async_save(
    subject: AsyncSubject,
    saver: Saver,
    url: str,
    loop: TrainingLoop,
    *,
    idle_s: float,
    max_calm_tries: int = 1,
) -> AsyncSample:
    """Save once while the loop trains, and measure; nothing is removed.

    Args:
        subject: how.
        saver: holds the state.
        url: of the checkpoint.
        loop: trains on this thread.
        idle_s: seconds of training before the call, to compare with.
        max_calm_tries: how often to train as long, where something else slows the machine down.

    Raises:
        Whatever the call or the save raises; StillRunningError when it does not end.
    """
    gc.collect()  # what earlier saves left is not this one's to clean up
    idle, calm = loop.run_calm(idle_s, max_calm_tries)
    ends: dict[str, float] = {}
    began = time.perf_counter()
    started = saver.start(subject, url)
    returned = time.perf_counter()
    _note_end(started.saved, "saved", ends)
    if started.staged is not None:
        _note_end(started.staged, "staged", ends)
    steps = loop.run_until(started.saved.done, _SAVE_LIMIT_S)
    started.saved.result()
    return AsyncSample(
        stall_s=returned - began,
        staged_s=ends.get("staged", returned) - began,
        save_s=max(ends["saved"], returned) - began,
        window_s=steps.window_s,
        steps_s=steps.steps_s,
        idle_steps_s=idle.steps_s,
        calm=calm,
    )


def _note_end(future: Future[object], name: str, ends: dict[str, float]) -> None:
    future.add_done_callback(lambda _: ends.__setitem__(name, time.perf_counter()))


class _Run:
    """All rounds with one state: every subject in every round, in a new order each time."""

    def __init__(
        self,
        state: BenchState,
        subjects: Sequence[AsyncSubject],
        place: Place,
        options: Options,
        loop: TrainingLoop,
        bar: ProgressBar,
    ) -> None:
        self._state, self._subjects, self._place = state, subjects, place
        self._options, self._loop, self._bar = options, loop, bar
        self._saver = Saver(state, place)
        self._process_runs = False
        self._figures = AsyncFigures(state.name, state.num_tensors, state.nbytes)

    def measure(self) -> AsyncFigures:
        shuffler = random.Random(self._options.seed)
        try:
            for number in range(self._options.num_rounds + 1):
                order = shuffler.sample(list(self._subjects), len(self._subjects))
                if number == 0:
                    # A save that fails may end the checkpoint process: let it do so before the
                    # others, ours too, have warmed up theirs.
                    order.sort(key=lambda subject: (subject.checkpointer, subject.family == "ours"))
                for subject in order:
                    self._one(subject, counted=number > 0)
                copies = measure_copies(self._state, self._place, max(self._options.workers))
                self._figures.copies += [copies] if number > 0 else []
        finally:
            self._saver.close()
        return self._figures

    def _one(self, subject: AsyncSubject, *, counted: bool) -> None:
        if subject not in self._figures.failures:
            self._bar.show(f"{self._state.name}: {subject.label}")
            if subject.checkpointer == "process" and not self._process_runs:
                start_checkpoint_process()
                self._process_runs = True
            url = self._place.fresh_url()
            sample = self._save(subject, url)
            if sample is None:
                self._recover(subject)
            elif counted:
                self._figures.samples.setdefault(subject, []).append(sample)
            elif self._options.verify and subject.writes_checkpoint:
                verify_checkpoint(self._state, self._place, url)
            self._place.remove(url)
        self._bar.step()

    def _save(self, subject: AsyncSubject, url: str) -> AsyncSample | None:
        """Save; note a failure, so that the subject is left out from then on."""
        quick = self._options.quick
        try:
            return timed_async_save(
                subject,
                self._saver,
                url,
                self._loop,
                idle_s=_QUICK_IDLE_S if quick else _IDLE_S,
                max_calm_tries=1 if quick else _MAX_CALM_TRIES,
            )
        except StillRunningError:
            raise  # it still runs, beside whatever would come next
        except (Exception, CheckpointException) as error:
            self._figures.failures[subject] = failure_text(error)
            return None
        finally:
            self._saver.close_writers()

    def _recover(self, subject: AsyncSubject) -> None:
        """Called after the error is gone, and with it the references to what had been staged."""
        self._figures.samples.pop(subject, None)
        self._saver.close()
        if subject.checkpointer == "process":
            release_descriptors()
            end_checkpoint_process()
            self._process_runs = False


def failure_text(error: BaseException) -> str:
    """`failed: ` with the first line of what went wrong, without credentials."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = scrub(str(error)).strip().splitlines() or [""]
    text = f"failed: {type(error).__name__}: {lines[0]}"
    return text if len(text) <= _MAX_FAILURE_CHARS else text[: _MAX_FAILURE_CHARS - 3] + "..."


@contextmanager
def _quiet_dcp() -> Iterator[None]:
    """Without what DCP says at every save: there is no process group, it copies to the CPU."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch\\.distributed")
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
