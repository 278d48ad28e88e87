"""Plays back the record of a save, cuts it after every operation, and loads what a crash leaves.

    operations -> Disk --after every prefix--> trees -> Judge (our reader and stock's) -> Report

A tree is sound if it loads as the old checkpoint, as the new one, or, where there was none, says
that there is none. Trees that a reader cannot tell apart are loaded once.
"""

from __future__ import annotations

import itertools
import logging
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import StorageReader

from mpwriter import FsspecReader
from mpwriter._compat import StockFsspecReader
from mpwriter.errors import IncompleteCheckpointError
from tests import counts
from tests.fakes.recording import Operation
from tests.replay_disk import Disk, Tree, put_on_disk

__all__ = ["Judge", "Problem", "Report", "replay"]

State = dict[str, Any]

_READERS = {"ours": FsspecReader, "stock": StockFsspecReader}
_METADATA = re.compile(r"(?:__\d+)?\.metadata")


class Problem(NamedTuple):
    kind: str  # mixture: of values; unreadable; lost: not what it has to be by then
    where: str
    what: str


@dataclass
class Report:
    """What a replay has found."""

    prefixes: int = 0
    states: int = 0
    loads: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)

    @property
    def kinds(self) -> set[str]:
        return {problem.kind for problem in self.problems}

    def assert_sound(self, *, sees: Iterable[str]) -> None:
        """No problem was found, and the crashes do end in each of the ways that are given."""
        lost, mixed = (
            sum(problem.kind == kind for problem in self.problems) for kind in ("lost", "mixture")
        )
        counts.add(
            "replay",
            faults=self.prefixes,
            states=self.states,
            loads=self.loads,
            mixtures=mixed,
            silent_losses=lost,
        )
        stories = [f"{kind} {where}:\n    {what}" for kind, where, what in self.problems[:5]]
        assert not stories, f"{len(self.problems)} problems:\n" + "\n".join(stories)
        assert set(self.outcomes) == set(sees)


class Judge:
    """Loads trees; remembers what it has loaded.

    Args:
        scratch: a folder for its own.
        checkpoint: path of the checkpoint's directory in the trees.
        old: what was there before the save; None for nothing.
        new: what the save saves; the same keys.
    """

    def __init__(self, scratch: Path, checkpoint: str, *, old: State | None, new: State) -> None:
        self.old = old
        self._new = new
        self._scratch = scratch
        self._checkpoint = checkpoint
        self._known: dict[Any, dict[str, str]] = {}
        self._numbers = itertools.count()

    @property
    def loads(self) -> int:
        return len(self._known) * len(_READERS)

    def outcomes(self, tree: Tree) -> dict[str, str]:
        """What each reader makes of it: old, new, none, mixture, or what else went wrong."""
        inside = f"{self._checkpoint}/"
        files = {path[len(inside) :]: raw for path, raw in tree.items() if path.startswith(inside)}
        view = _as_readers_see_it(files) if self._checkpoint in tree else None
        if view not in self._known:
            self._known[view] = self._load_all(tree, files)
        return self._known[view]

    def _load_all(self, tree: Tree, files: Tree) -> dict[str, str]:
        folder = self._scratch / str(next(self._numbers))
        if self._checkpoint in tree:
            folder.mkdir(parents=True)
            put_on_disk(files, folder)
        exists = any(_METADATA.fullmatch(name) for name in files)
        try:
            return {name: self._load(name, folder, exists) for name in _READERS}
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _load(self, name: str, folder: Path, exists: bool) -> str:
        target = {
            key: torch.full_like(value, -1) if isinstance(value, torch.Tensor) else -1
            for key, value in self._new.items()
        }
        try:
            _load_into(target, _READERS[name](str(folder)))
        except (Exception, CheckpointException) as exc:
            error = exc.failures[0][0] if isinstance(exc, CheckpointException) else exc
            # Stock's way of saying that there is none.
            clean = IncompleteCheckpointError if name == "ours" else (OSError, AssertionError)
            if isinstance(error, clean) and not exists:
                return "none"
            return f"{type(error).__name__}: {error}"
        if _equal(target, self._new):
            return "new"
        if self.old is not None and _equal(target, self.old):
            return "old"
        return "mixture"


def _as_readers_see_it(files: Tree) -> Any:
    """What can make a difference to a reader: the metadata and what it names, or else all names."""
    metadata = {name: raw for name, raw in files.items() if raw and _METADATA.fullmatch(name)}
    if not metadata:
        return frozenset(files)
    named = [n for n in files if any(n.encode() in raw for raw in metadata.values() if raw)]
    return frozenset((name, files[name]) for name in [*metadata, *named])


def _load_into(target: State, reader: StorageReader) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # stock warns with a traceback wherever nothing is
        try:
            dcp.load(target, storage_reader=reader, no_dist=True)
        finally:
            logging.disable(before)


def _equal(found: State, expected: State) -> bool:
    return all(
        torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
        for key, value in expected.items()
    )


def replay(
    operations: Sequence[Operation],
    before: Tree,
    judge: Judge,
    *,
    power_loss: bool,
    ends: Collection[str],
) -> Report:
    """Crash after every prefix.

    Args:
        operations: of a save.
        before: what was on the disk, durable.
        judge: whose `old` is what `before` loads as.
        power_loss: whether the machine crashes; else the processes do.
        ends: what may load when all is over: the save has returned, or has raised.
    """
    disk, report = Disk(before), Report()
    allowed = {"new", "none" if judge.old is None else "old"}
    for number in range(len(operations) + 1):
        if number:
            disk.apply(operations[number - 1])
        report.prefixes += 1
        over = number == len(operations)
        last = "nothing" if not number else " ".join(operations[number - 1][:3]).rstrip()
        where = f"after {number} of {len(operations)} ({last})"
        trees = disk.after_power_loss() if power_loss else iter([disk.tree()])
        for tree in {frozenset(tree.items()): tree for tree in trees}.values():
            report.states += 1
            for reader, outcome in judge.outcomes(tree).items():
                report.outcomes[outcome] += 1
                kind = _problem(outcome, allowed, ends if over else allowed)
                if kind is not None:
                    what = f"{reader}: {outcome[:400]}\n    on disk: {_listing(tree)}"
                    report.problems.append(Problem(kind, where, what))
    report.loads = judge.loads
    return report


def _problem(outcome: str, allowed: Collection[str], due: Collection[str]) -> str | None:
    if outcome in due:
        return None
    if outcome in (*allowed, "none"):
        return "lost"
    return "mixture" if outcome == "mixture" else "unreadable"


def _listing(tree: Tree) -> str:
    return ", ".join(
        f"{path} ({'directory' if raw is None else len(raw)})" for path, raw in sorted(tree.items())
    )
