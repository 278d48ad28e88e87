"""What a save or a load has done: figures for the log, `last_report`, progress, event handlers.

Runs in: trainer. Imports no torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

__all__ = [
    "EventHandler",
    "LoadEvent",
    "LoadEventHandler",
    "LoadReport",
    "ProgressLine",
    "RankReport",
    "SaveEvent",
    "SaveReport",
    "WorkerReport",
    "merge_workers",
]

_GIB = 1 << 30

# A terminal need not be redrawn more often than it can be read.
_REDRAW_S = 0.2


@dataclass(frozen=True)
class WorkerReport:
    """What one worker did in one save.

    Attributes:
        worker: its number; None for files written in the trainer.
        files: files it wrote; nbytes: their bytes, containers included.
        write_s: seconds inside the filesystem's write calls; crc_s: in checksums;
        publish_s: from the last write of a file to its final name, fsync included.
        cpu_s: CPU seconds of the process.
    """

    worker: int | None
    files: int
    nbytes: int
    write_s: float
    crc_s: float
    publish_s: float
    cpu_s: float

    def __add__(self, other: WorkerReport) -> WorkerReport:
        return WorkerReport(
            self.worker,
            self.files + other.files,
            self.nbytes + other.nbytes,
            self.write_s + other.write_s,
            self.crc_s + other.crc_s,
            self.publish_s + other.publish_s,
            self.cpu_s + other.cpu_s,
        )


@dataclass(frozen=True)
class RankReport:
    """What one rank did in one save, as the coordinator hears of it.

    Attributes:
        rank, checkpoint_id, nbytes, files, num_workers, stage_s, write_s: as in the rank's own
            `SaveReport`.
    """

    rank: int
    checkpoint_id: str
    nbytes: int
    files: int
    num_workers: int
    stage_s: float
    write_s: float


@dataclass(frozen=True)
class SaveReport:
    """One save of one rank.

    Attributes:
        checkpoint_id: where, without credentials; save_id: of this save on this rank.
        rank: as DCP gave it.
        nbytes: bytes of the shard files; files: how many.
        num_workers: worker processes that took part; 0: written in the trainer.
        plan_s: from the start of the save to the first byte; stage_s: the trainer's copies into
            shared memory; write_s: `write_data` as a whole; commit_s: the metadata file, on the
            coordinator only; total_s: from the start of the save to now.
        workers: one entry per worker.
        ranks: on the coordinator, once the checkpoint exists: one entry for every rank that has
            written something. Elsewhere, and before, empty.
    """

    checkpoint_id: str
    save_id: str
    rank: int
    nbytes: int
    files: int
    num_workers: int
    plan_s: float
    stage_s: float
    write_s: float
    commit_s: float
    total_s: float
    workers: tuple[WorkerReport, ...] = ()
    ranks: tuple[RankReport, ...] = ()

    @property
    def gib_per_s(self) -> float:
        """GiB of shard files per second of `write_data`."""
        return self.nbytes / _GIB / self.write_s if self.write_s > 0 else 0.0

    @property
    def slowest_rank(self) -> RankReport | None:
        """Whose `write_data` took longest; None where `ranks` is empty."""
        return max(self.ranks, key=lambda rank: rank.write_s, default=None)

    @property
    def gib_per_s_of_all(self) -> float:
        """GiB of all ranks' shard files per second of the slowest rank's `write_data`."""
        slowest = self.slowest_rank
        if slowest is None or slowest.write_s <= 0:
            return 0.0
        return sum(rank.nbytes for rank in self.ranks) / _GIB / slowest.write_s

    def summary(self) -> str:
        """One line for the log: of all ranks where there are several, else of this one."""
        ranks, slowest = self.ranks, self.slowest_rank
        if slowest is None or len(ranks) == 1:
            return (
                f"{self.nbytes} bytes in {self.files} files by {self.num_workers} workers; "
                f"staged {self.stage_s:.3f} s, wrote {self.write_s:.3f} s, "
                f"total {self.total_s:.3f} s, {self.gib_per_s:.2f} GiB/s"
            )
        return (
            f"{sum(rank.nbytes for rank in ranks)} bytes in {sum(rank.files for rank in ranks)} "
            f"files by {sum(rank.num_workers for rank in ranks)} workers of {len(ranks)} ranks; "
            f"staged up to {max(rank.stage_s for rank in ranks):.3f} s, slowest rank "
            f"{slowest.rank} wrote {slowest.write_s:.3f} s, total {self.total_s:.3f} s, "
            f"{self.gib_per_s_of_all:.2f} GiB/s"
        )


@dataclass(frozen=True)
class SaveEvent:
    """Told to an event handler, in the thread that saves.

    Attributes:
        name: "save_started", "file_written", "shards_written", "save_committed", "save_failed".
        report: figures so far; None for the first event.
        error: of "save_failed".
    """

    name: str
    checkpoint_id: str
    save_id: str
    rank: int
    report: SaveReport | None = None
    path: str | None = None
    error: BaseException | None = None


EventHandler = Callable[[SaveEvent], None]


@dataclass(frozen=True)
class LoadReport:
    """One load of one rank.

    Attributes:
        checkpoint_id: from where, without credentials; rank: as DCP gave it, 0 where it did not.
        items: stored items that were read; unverified: those of them that no checksum covers.
        nbytes: bytes asked for; files: in how many files.
        num_workers: worker processes that were engaged; 0: read in the trainer alone.
        read_s: `read_data` as a whole.
    """

    checkpoint_id: str
    rank: int
    items: int
    unverified: int
    nbytes: int
    files: int
    num_workers: int
    read_s: float

    @property
    def gib_per_s(self) -> float:
        """GiB per second of `read_data`."""
        return self.nbytes / _GIB / self.read_s if self.read_s > 0 else 0.0

    def summary(self) -> str:
        """One line for the log."""
        return (
            f"read {self.items} items, {self.nbytes} bytes of {self.files} files in "
            f"{self.read_s:.3f} s ({self.gib_per_s:.2f} GiB/s)"
            + (f" by {self.num_workers} workers" if self.num_workers else "")
        )


@dataclass(frozen=True)
class LoadEvent:
    """Told to an event handler, in the thread that loads.

    Attributes:
        name: "load_started", "load_finished", "load_failed".
        report: of "load_finished". error: of "load_failed".
    """

    name: str
    checkpoint_id: str
    rank: int
    report: LoadReport | None = None
    error: BaseException | None = None


LoadEventHandler = Callable[[LoadEvent], None]


def merge_workers(reports: list[WorkerReport]) -> tuple[WorkerReport, ...]:
    """One entry per worker, in the order of their numbers."""
    merged: dict[int | None, WorkerReport] = {}
    for report in reports:
        known = merged.get(report.worker)
        merged[report.worker] = report if known is None else known + report
    return tuple(merged[number] for number in sorted(merged, key=lambda n: -1 if n is None else n))


@dataclass
class ProgressLine:
    """A line on stderr that follows the bytes of a save or load; none where not `enabled`."""

    label: str
    total_bytes: int
    enabled: bool
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    _written_bytes: int = 0
    _begin_s: float = field(default_factory=time.monotonic)
    _drawn_s: float = 0.0

    def advance(self, nbytes: int) -> None:
        self._written_bytes += nbytes
        now_s = time.monotonic()
        if self.enabled and now_s - self._drawn_s >= _REDRAW_S:
            self._drawn_s = now_s
            self._draw("\r")

    def close(self) -> None:
        if self.enabled:
            self._draw("\r")
            self.stream.write("\n")
            self.stream.flush()

    def _draw(self, start: str) -> None:
        elapsed_s = max(1e-9, time.monotonic() - self._begin_s)
        share = self._written_bytes / self.total_bytes if self.total_bytes else 1.0
        self.stream.write(
            f"{start}{self.label}: {min(1.0, share):4.0%} of {self.total_bytes / _GIB:.2f} GiB, "
            f"{self._written_bytes / _GIB / elapsed_s:.2f} GiB/s"
        )
        self.stream.flush()
