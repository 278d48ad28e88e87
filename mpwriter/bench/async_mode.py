"""Asynchronous saves: what they cost the training loop that goes on meanwhile.

Runs in: trainer. One run at a time, from the main thread, which trains.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.checkpoint.api import CheckpointException

from mpwriter._redact import scrub
from mpwriter.bench.async_subjects import AsyncSubject, Saver, choose_async_subjects
from mpwriter.bench.async_timing import AsyncSample, timed_async_save
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
from mpwriter.bench.training import LOOPS, StillRunningError, TrainingLoop
from mpwriter.bench.verify import verify_checkpoint

__all__ = ["AsyncFigures", "failure_text", "measure_async"]

_MAX_FAILURE_CHARS = 100

# Seconds of training before a save, and how often to wait as long for a machine that is calm; a
# save beside which something else has run is made again.
_IDLE_S, _QUICK_IDLE_S = 0.6, 0.1
_MAX_IDLE_TRIES = 5
_MAX_SAVES = 3


@dataclass
class AsyncFigures:
    """Everything measured with one state."""

    name: str
    num_tensors: int
    nbytes: int
    samples: dict[AsyncSubject, list[AsyncSample]] = field(default_factory=dict)
    failures: dict[AsyncSubject, str] = field(default_factory=dict)
    copies: list[CopyTimes] = field(default_factory=list)
    ranks: Sequence[AsyncFigures] = ()  # under torchrun, each one's own; the rest is the job's


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
    silent = not place.ranks.is_first
    with (
        _torch_threads(options.torch_threads),
        _quiet_dcp(),
        ProgressBar(num_steps, silent=silent) as bar,
    ):
        bar.show("starting")
        loop = LOOPS[options.loop](options.device)
        try:
            for name in options.states:
                built = build_state(name, quick=options.quick, ranks=place.ranks)
                state = on_device(nested(built), options.device)
                figures.append(_Run(state, subjects, place, options, loop, bar).measure())
                bar.clear()
                report(figures[-1])
        finally:
            end_checkpoint_process()
    return figures


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
        self._quick = options.quick
        self._unverified = {s for s in subjects if s.writes_checkpoint and options.verify}
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
                copies = measure_copies(
                    self._state, self._place, max(self._options.workers), self._train
                )
                self._figures.copies += [copies] if number > 0 else []
        finally:
            self._saver.close()
        return self._figures

    def _train(self) -> None:
        self._loop.run_for(self._idle_s)

    @property
    def _idle_s(self) -> float:
        return _QUICK_IDLE_S if self._quick else _IDLE_S

    def _one(self, subject: AsyncSubject, *, counted: bool) -> None:
        if subject not in self._figures.failures:
            self._bar.show(f"{self._state.name}: {subject.label}")
            samples = self._saves(subject, _MAX_SAVES if counted and not self._quick else 1)
            if subject in self._figures.failures:
                self._recover(subject)
            elif counted:
                calmest = min(samples, key=lambda sample: sample.others)
                self._figures.samples.setdefault(subject, []).append(calmest)
        self._bar.step()

    def _saves(self, subject: AsyncSubject, max_saves: int) -> list[AsyncSample]:
        """Save until one is not disturbed, or it makes no sense to try again."""
        samples: list[AsyncSample] = []
        while len(samples) < max_saves:
            if subject.checkpointer == "process" and not self._process_runs:
                start_checkpoint_process()
                self._process_runs = True
            url = self._place.fresh_url()
            sample = self._save(subject, url)
            self._place.ranks.agree_on_failure(self._figures.failures.get(subject))
            if sample is not None:  # one decision for all ranks
                sample = replace(sample, others=self._place.ranks.most(sample.others))
            if sample is not None and subject in self._unverified:
                self._unverified.discard(subject)
                verify_checkpoint(self._state, self._place, url)
            self._place.remove(url)
            samples += [] if sample is None else [sample]
            if sample is None or sample.calm or not sample.began_calm:
                break
        return samples

    def _save(self, subject: AsyncSubject, url: str) -> AsyncSample | None:
        """Save; note a failure, so that the subject is left out from then on."""
        try:
            return timed_async_save(
                subject,
                self._saver,
                url,
                self._loop,
                idle_s=self._idle_s,
                max_idle_tries=1 if self._quick else _MAX_IDLE_TRIES,
                ranks=self._place.ranks,
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
def _torch_threads(number: int | None) -> Iterator[None]:
    """With so many threads for torch's operators in this process; None changes nothing."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _quiet_dcp() -> Iterator[None]:
    """Without what DCP says at every save: there is no process group, it copies to the CPU."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch\\.distributed")
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
