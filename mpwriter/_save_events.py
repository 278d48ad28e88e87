"""What a save says: events to the user's handler, the report, and the last line of the log.

Runs in: trainer, in the thread that saves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mpwriter._report import EventHandler, RankReport, SaveEvent, SaveReport, WorkerReport
from mpwriter._types import JobDone

__all__ = ["SaveEvents", "Times"]

logger = logging.getLogger(__name__)


@dataclass
class Times:
    """Of one save, in seconds; `begin_s` on the clock of time.perf_counter."""

    begin_s: float = field(default_factory=time.perf_counter)
    plan_s: float = 0.0
    stage_s: float = 0.0
    write_s: float = 0.0
    commit_s: float = 0.0


class SaveEvents:
    """Speaks for one save.

    Args:
        where: the checkpoint, as it is shown to people.
        save_id: of the save.
        handler: the user's, or None.
        background: whether this is an asynchronous save, whose future nobody may ever look at:
            then its failure is logged as well.

    Attributes:
        report: from `summarize` on.
        rank: of this process in the save.
    """

    def __init__(
        self, where: str, save_id: str, handler: EventHandler | None, *, background: bool
    ) -> None:
        self.rank = 0
        self.report: SaveReport | None = None
        self.times = Times()
        self._where = where
        self._save_id = save_id
        self._handler = handler
        self._background = background
        self._last_words = self._given_up() if background else None

    def tell(self, name: str, path: str | None = None, error: BaseException | None = None) -> None:
        """Call the handler.

        Raises:
            Whatever it raises.
        """
        if self._handler is not None:
            self._handler(
                SaveEvent(name, self._where, self._save_id, self.rank, self.report, path, error)
            )

    def failed(self, error: BaseException) -> None:
        """Say so once: nobody may ever ask the future of an asynchronous save."""
        self.complain(error)
        try:
            self.tell("save_failed", error=error)
        except Exception:
            logger.exception("The event handler failed when it was told: %s", error)

    def complain(self, error: BaseException) -> None:
        """The log's part of `failed`."""
        self._last_words = None
        if self._background:
            logger.error("The save of %s failed: %s", self._where, error)

    def summarize(self, done: Sequence[JobDone], workers: tuple[WorkerReport, ...]) -> None:
        """Every shard of this rank is complete.

        Raises:
            Whatever the handler raises.
        """
        times = self.times
        self.report = SaveReport(
            checkpoint_id=self._where,
            save_id=self._save_id,
            rank=self.rank,
            nbytes=sum(job.nbytes for job in done),
            files=len(done),
            num_workers=sum(worker.worker is not None for worker in workers),
            plan_s=times.plan_s,
            stage_s=times.stage_s,
            write_s=times.write_s,
            commit_s=times.commit_s,
            total_s=time.perf_counter() - times.begin_s,
            workers=workers,
        )
        self.tell("shards_written")

    def concluded(
        self, *, committed: bool, aloud: bool = True, ranks: tuple[RankReport, ...] = ()
    ) -> None:
        """This rank is done.

        Args:
            committed: it has made the checkpoint exist.
            aloud: it speaks for all of them.
            ranks: what the others have told it.
        """
        assert self.report is not None
        self._last_words = None
        total_s = time.perf_counter() - self.times.begin_s
        commit_s = self.times.commit_s
        report = replace(self.report, commit_s=commit_s, total_s=total_s, ranks=ranks)
        self.report = report
        level = logging.INFO if aloud else logging.DEBUG
        if logger.isEnabledFor(level):
            logger.log(level, "Saved %s: %s", report.checkpoint_id, report.summary())
        if committed:
            try:
                self.tell("save_committed")
            except Exception:  # the checkpoint exists: a handler cannot take it back
                logger.exception("The event handler failed after %s was saved", self._where)

    def _given_up(self) -> logging.LogRecord:
        """What to say where DCP drops an asynchronous save: nothing else would tell.

        Made beforehand: the end of a thread, where it is said, is too late to ask for its name.
        """
        text = "The save of %s was given up: it could not be planned, or another rank failed"
        return logger.makeRecord(
            logger.name, logging.ERROR, __file__, 0, text, (self._where,), None
        )

    def __del__(self) -> None:
        record = getattr(self, "_last_words", None)
        if record is not None:
            record.created = time.time()
            logger.handle(record)
