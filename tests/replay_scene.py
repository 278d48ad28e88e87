"""A disk, what was on it before, and the recorded story of what happens there."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import StorageWriter

import tests.fakes.recorded  # noqa: F401
from tests.fakes.recording import Operation, Recording
from tests.replay import Judge, Report, replay
from tests.replay_disk import Disk, Tree, put_on_disk, tree_of
from tests.saves import failure_of, save, small_state

__all__ = ["NEW", "OLD", "Scene", "save_new"]

OLD, NEW = small_state(1, numel=300), small_state(2, numel=300)


def save_new(place: str, recording: dict[str, Any], **options: Any) -> None:
    save(place, NEW, **recording, **options)


class Scene:
    """One checkpoint's directory on a disk of its own.

    Args:
        folder: for the disk, the records and the loads.

    Attributes:
        old: what was saved before the story, if anything was.
        new: what is saved in it.
        checkpoint: path of the checkpoint's directory on the disk.
        before: what was there before the story, durable.
        operations: the story so far.
    """

    def __init__(self, folder: Path) -> None:
        self.old, self.new = OLD, NEW
        self.checkpoint = "checkpoint"
        self.before: Tree = {}
        self.operations: list[Operation] = []
        self._folder = folder
        self._disk = folder / "disk"
        self._disk.mkdir()
        self._num_recordings = 0

    @property
    def path(self) -> Path:
        return self._disk / self.checkpoint

    def tree(self) -> Tree:
        """What is there now."""
        return tree_of(self._disk)

    def happened(self, action: Callable[[], object]) -> None:
        """Something that lies long back when the story begins."""
        action()
        self.before = self.tree()

    def save_by_stock(self, writer: StorageWriter, number: int = 1) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({1: self.old, 2: self.new}[number], storage_writer=writer, no_dist=True)

    def record(
        self, action: Callable[[str, dict[str, str]], object], *, protocol: str = "recorded"
    ) -> BaseException | None:
        """Go on with the story; what the save has raised."""
        error = None
        with self.new_recording() as recording:
            try:
                action(f"{protocol}://{self.path}", recording.options)
            except CheckpointException as exc:
                error = failure_of(exc)
        self.take(recording)
        return error

    def new_recording(self) -> Recording:
        self._num_recordings += 1
        return Recording(self._folder / f"recording{self._num_recordings}", self._disk)

    def take(self, recording: Recording) -> None:
        """Append what was recorded to the story."""
        self.operations = [*self.operations, *recording.operations()]
        assert self._played().tree() == self.tree(), "something was not recorded"

    def crash_at(self, operations: Sequence[Operation]) -> None:
        """Of the story only this has happened: then all processes were killed."""
        self.operations = list(operations)
        self._disk.rename(self._folder / f"disk{self._num_recordings}")
        self._disk.mkdir()
        put_on_disk(self._played().tree(), self._disk)

    def replay(self, *, power_loss: bool, ends: Collection[str] = ("new",)) -> Report:
        """Crash after every operation; by the end of the story `ends` have to load."""
        old = self.old if any(path.endswith(".metadata") for path in self.before) else None
        judge = Judge(self._folder / "loads", self.checkpoint, old=old, new=self.new)
        return replay(self.operations, self.before, judge, power_loss=power_loss, ends=ends)

    def _played(self) -> Disk:
        disk = Disk(self.before)
        for operation in self.operations:
            disk.apply(operation)
        return disk
