#!/usr/bin/env python
"""Saves by two ranks, one after another and at the same time, with faults drawn at random.

After every save the checkpoint is loaded by this process and compared bit for bit with what was
saved: with the values of this save where it was completed, with those of the one before where it
failed. What the ranks hold (descriptors, threads, processes, leases, memory) has to stay flat.

Ends with status 0 where nothing was lost, nothing hung and nothing was left behind; with status 1
at the first violation, whose step and story are printed. The same seed draws the same steps.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed.checkpoint as dcp
from soak_outside import RankProcess, ViolationError
from soak_steps import NUM_RANKS, PlannedSave, Step, step_of, whole_state

from mpwriter import FsspecReader
from tests.states import assert_same, blank

# No step takes as long: a hang is a violation.
STEP_WATCHDOG_S = 90.0
START_WATCHDOG_S = 120.0

# Saves after which what is held must not grow any more.
WARM_SAVES = 20
WARM_MEMORY_SAVES = 50

# Growth of a rank's private memory after the first 50 saves: states are of up to 10 MB, and malloc
# keeps what it once had.
MAX_GROWTH_BYTES = 64 << 20

PROGRESS_EVERY_S = 10.0


class Soak:
    """One run.

    Args:
        folder: for everything that it makes.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._held: dict[str, PlannedSave] = {}  # place -> whose values it has to have
        self._history: list[list[dict[str, Any]]] = []  # facts of all ranks, by save
        self.counts: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.ranks = [RankProcess(n, options.seed, folder) for n in range(NUM_RANKS)]

    @property
    def num_saves(self) -> int:
        return self.counts["saves"]

    def run(self) -> None:
        """All steps.

        Raises:
            ViolationError: the first one.
        """
        end_s = time.monotonic() + 60 * self._options.minutes
        shown_s = time.monotonic()
        number = 0
        while self.num_saves < self._options.saves and time.monotonic() < end_s:
            self._step(step_of(self._options.seed, number))
            number += 1
            if time.monotonic() > shown_s + PROGRESS_EVERY_S:
                shown_s = time.monotonic()
                self._show_progress(end_s - shown_s)
        for rank in self.ranks:
            rank.close_input()
        for rank in self.ranks:
            rank.end()
        self._check_growth()

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def _show_progress(self, left_s: float) -> None:
        c = self.counts
        print(
            f"{c['saves']} of {self._options.saves} saves: {c['completed']} completed, "
            f"{c['failed as expected']} failed as expected, {c['faults injected']} faults; "
            f"{left_s:.0f} s left",
            flush=True,
        )

    # -- a step ------------------------------------------------------------------------------

    def _step(self, step: Step) -> None:
        try:
            self._carry_out(step)
        except ViolationError as exc:
            self.counts[exc.kind] += 1
            raise ViolationError(exc.kind, self._story(step, exc)) from exc

    def _carry_out(self, step: Step) -> None:
        answers = self._answers(step)
        self.kinds[step.fault.kind] += 1
        self.counts["faults injected"] += sum(answer["fired"] for answer in answers)
        for position, save in enumerate(step.saves):
            self._judge(step, save, [answer["outcomes"][position] for answer in answers])
        facts = [answer["facts"] for answer in answers]
        for rank, (process, found) in enumerate(zip(self.ranks, facts)):
            process.workers.update(found["workers"])
            self._check_facts(rank, found)
        self._history += [facts] * len(step.saves)

    def _answers(self, step: Step) -> list[dict[str, Any]]:
        limit_s = STEP_WATCHDOG_S if self._history else START_WATCHDOG_S
        end_s = time.monotonic() + limit_s
        for rank in self.ranks:
            rank.ask(step.number)
        answers = []
        for number, rank in enumerate(self.ranks):
            answer = rank.answer(end_s - time.monotonic())
            if answer is None:
                self._explain_silence(number)
            else:
                answers.append(answer)
        return answers

    def _explain_silence(self, number: int) -> None:
        status = self.ranks[number].process.poll()
        if status is not None:
            raise ViolationError("unexpected failures", f"rank {number} has ended with {status}")
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.process.send_signal(signal.SIGUSR1)
        time.sleep(1)  # for the stacks to get into the logs
        raise ViolationError("hangs", f"rank {number} does not answer")

    def _judge(self, step: Step, save: PlannedSave, outcomes: list[str | None]) -> None:
        self.counts["saves"] += 1
        failed = [outcome is not None for outcome in outcomes]
        if any(failed) and not all(failed):
            raise ViolationError("unexpected failures", "the ranks disagree about the save")
        path = self._folder / save.place
        if not any(failed):
            self.counts["completed"] += 1
            self._held[save.place] = save
            self._require(path, save)
            self._require_tidy(step, path)
        else:
            if step.fault.must_succeed:
                raise ViolationError("unexpected failures", "nothing was wrong, yet it failed")
            self.counts["failed as expected"] += 1
            self._require_one_of_both(step, path, save)
        if not save.place.startswith("kept"):
            self._held.pop(save.place, None)
            shutil.rmtree(path, ignore_errors=True)

    def _require(self, path: Path, save: PlannedSave) -> None:
        """The checkpoint has the values of that save, to the last bit."""
        difference = _difference(path, save)
        if difference:
            raise ViolationError(
                "silent losses", f"{path.name} does not hold {save.key}: {difference}"
            )

    def _require_one_of_both(self, step: Step, path: Path, save: PlannedSave) -> None:
        """After a failure: the checkpoint before, or none; the new one where its word was lost."""
        before = self._held.get(save.place)
        if step.fault.may_follow_the_swap and not _difference(path, save):
            self._held[save.place] = save
        elif before is not None:
            self._require(path, before)
        elif (path / ".metadata").exists():
            raise ViolationError("silent losses", "a failed save has left a .metadata")

    def _require_tidy(self, step: Step, path: Path) -> None:
        if step.fault.kind == "none":
            left = [name for name in os.listdir(path) if name.endswith(".tmp")]
            # Of an earlier save that was killed: gone with this one, where the files are local.
            if left and step.saves[0].protocol == "fault":
                raise ViolationError("leaks", f"temporary files are left: {left}")

    # -- what is held ------------------------------------------------------------------------

    def _check_facts(self, rank: int, found: dict[str, Any]) -> None:
        for name in ("leases", "strays", "savers", "memfds_beyond_segments"):
            if found[name]:
                raise ViolationError("leaks", f"rank {rank} holds {name}: {found[name]}")

    def _check_growth(self) -> None:
        """Descriptors and threads are as many as after the first saves, memory within a bound.

        Raises:
            ViolationError: something has grown.
        """
        if len(self._history) <= WARM_SAVES:
            return
        for rank in range(NUM_RANKS):
            history = [facts[rank] for facts in self._history]
            for name in ("fds", "threads", "worker_fds"):
                warm = max(facts[name] for facts in history[:WARM_SAVES])
                if history[-1][name] > warm:
                    self.counts["leaks"] += 1
                    story = f"{name} of rank {rank}: {warm} at first, {history[-1][name]} now"
                    story += f"\n  {history[-1]}"
                    raise ViolationError("leaks", story)
        growth = self.growth_bytes()
        if growth is not None and growth > MAX_GROWTH_BYTES:
            self.counts["leaks"] += 1
            raise ViolationError("leaks", f"the memory of a rank has grown by {growth} bytes")

    def growth_bytes(self) -> int | None:
        """Of the rank that has grown most since the 50th save; None after fewer saves."""
        if len(self._history) < WARM_MEMORY_SAVES + 10:
            return None
        growths = []
        for rank in range(NUM_RANKS):
            rss = [facts[rank]["rss_bytes"] for facts in self._history]
            early = statistics.median(rss[WARM_MEMORY_SAVES - 10 : WARM_MEMORY_SAVES])
            growths.append(int(statistics.median(rss[-10:]) - early))
        return max(growths)

    def figures_of(self, name: str) -> str:
        """First and last figure of each rank."""
        spans = [
            f"{self._history[0][rank][name]} to {self._history[-1][rank][name]}"
            for rank in range(NUM_RANKS)
            if self._history
        ]
        return ", ".join(spans)

    # -- stories -----------------------------------------------------------------------------

    def _story(self, step: Step, exc: ViolationError) -> str:
        command = f"scripts/soak.py --seed {self._options.seed} --saves {self._options.saves}"
        lines = [f"{exc.kind}: step {step.number} of {command}: {exc}", f"  fault: {step.fault}"]
        lines += [f"  {save}" for save in step.saves]
        lines.append(f"  options: {step.options}")
        for save in step.saves:
            path = self._folder / save.place
            names = sorted(os.listdir(path)) if path.is_dir() else "none"
            lines.append(f"  files in {save.place}: {names}")
        return "\n".join([*lines, *(rank.tail() for rank in self.ranks)])


def _difference(path: Path, save: PlannedSave) -> str:
    """What is wrong with a checkpoint, "" where it holds the values of that save."""
    expected = whole_state(save)
    target = blank(expected)
    try:
        dcp.load(target, storage_reader=FsspecReader(path, num_workers=1), no_dist=True)
        assert_same(target, expected)
    except BaseException as exc:
        if isinstance(exc, KeyboardInterrupt):
            raise
        return f"{type(exc).__name__}: {exc}"[:2000]
    return ""


def table(soak: Soak, seed: int, elapsed_s: float) -> str:
    growth = soak.growth_bytes()
    grown = "too few saves to tell" if growth is None else f"{growth / 2**20:.1f} MiB"
    rows = [
        ("seed", seed),
        ("seconds", f"{elapsed_s:.0f}"),
        ("saves", soak.counts["saves"]),
        ("completed", soak.counts["completed"]),
        ("failed as expected", soak.counts["failed as expected"]),
        ("faults injected", soak.counts["faults injected"]),
        ("silent losses", soak.counts["silent losses"]),
        ("unexpected failures", soak.counts["unexpected failures"]),
        ("hangs", soak.counts["hangs"]),
        ("leaks", soak.counts["leaks"]),
        ("descriptors per rank", soak.figures_of("fds")),
        ("threads per rank", soak.figures_of("threads")),
        (f"memory growth after {WARM_MEMORY_SAVES} saves", grown),
        ("  bound", f"{MAX_GROWTH_BYTES / 2**20:.0f} MiB"),
    ]
    rows += [(f"steps: {kind}", number) for kind, number in sorted(soak.kinds.items())]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saves", type=int, default=500, help="how many (500)")
    parser.add_argument("--minutes", type=float, default=10, help="end after this long (10)")
    parser.add_argument("--seed", type=int, help="of everything that is drawn; one at random")
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(10**6)
    return options


def main(arguments: list[str]) -> int:
    warnings.simplefilter("ignore")
    options = parse(arguments)
    print(f"seed {options.seed}", flush=True)
    begin_s = time.monotonic()
    status = 0
    with tempfile.TemporaryDirectory(prefix="soak", ignore_cleanup_errors=True) as folder:
        soak = Soak(options, Path(folder))
        try:
            soak.run()
        except ViolationError as exc:
            print(exc, file=sys.stderr, flush=True)
            status = 1
        finally:
            soak.close()
    print(table(soak, options.seed, time.monotonic() - begin_s))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
