"""One save of one rank: where it goes, what it is called, how it is written and committed.

Runs in: trainer, in the thread that saves.

    begin (storage_meta)      save id, location as of now
    prepare (local plan)      the directory                     see `_commit`, which draws the
    write (write_data)        buckets -> jobs -> workers        states of a checkpoint
    commit (finish)           the coordinator's metadata
"""

from __future__ import annotations

import logging
import re
import time
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from mpwriter._arena import arena_unavailable_reason, get_arena
from mpwriter._collector import collector_paused
from mpwriter._commit import Commit, complete_metadata
from mpwriter._feed import FeedSettings, JobFeed
from mpwriter._filesystems import is_local
from mpwriter._lane import Job
from mpwriter._options import WriterOptions
from mpwriter._planning import item_nbytes
from mpwriter._pool import get_pool
from mpwriter._publish import temporary_name
from mpwriter._report import (
    ProgressLine,
    RankReport,
    SaveReport,
    WorkerReport,
    merge_workers,
)
from mpwriter._save_events import SaveEvents
from mpwriter._save_jobs import (
    Payload,
    job_starter,
    plan_jobs,
    ranks_of,
    results_of,
    with_report,
)
from mpwriter._staged_state import Claim
from mpwriter._staging import ItemStream
from mpwriter._staging_ties import TieTable
from mpwriter._storage import Location, refusal, remove_files
from mpwriter._streams import StreamFactory, accelerator_stream
from mpwriter._types import JobDone

__all__ = ["Save"]

logger = logging.getLogger(__name__)

_warned: set[str] = set()

# Saves of this process that are not over yet; one that is dropped is over.
_under_way: weakref.WeakSet[Save] = weakref.WeakSet()


def _warn_once(reason: str) -> None:
    kind = re.sub(r"\d+", "", reason)  # the numbers of workers and processes differ each time
    if kind not in _warned:
        _warned.add(kind)
        logger.warning("Checkpoint files are written in the trainer, without workers: %s", reason)


class Save:
    """Belongs to the thread that began it.

    Args:
        location: the checkpoint's directory.
        options: of the writer.
        stream_for: makes the copy streams; None for those of the tensors' devices.
        claim: on the staged state, where this is an asynchronous save.
    """

    def __init__(
        self,
        location: Location,
        options: WriterOptions,
        stream_for: StreamFactory | None = None,
        claim: Claim | None = None,
    ) -> None:
        self.location = location
        self.save_id = str(uuid.uuid4())
        self.is_coordinator = True
        self.use_collectives = True
        self._options = options
        self._stream_for = stream_for or accelerator_stream()
        # Before the claim, so that the end of a save is told by the time its memory is free.
        self._events = SaveEvents(
            location.display, self.save_id, options.event_handler, background=claim is not None
        )
        self._claim = claim
        self._times = self._events.times
        self._workers: tuple[WorkerReport, ...] = ()
        _under_way.add(self)
        try:
            self._events.tell("save_started")
        except BaseException as exc:
            self._events.complain(exc)
            raise

    @property
    def rank(self) -> int:
        """Of this process in the save."""
        return self._events.rank

    @rank.setter
    def rank(self, rank: int) -> None:
        self._events.rank = rank

    @property
    def report(self) -> SaveReport | None:
        """From the end of `write` on."""
        return self._events.report

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.location.display, save_id=self.save_id)

    def prepare(self) -> None:
        """Make the directory.

        Raises:
            CheckpointExistsError: there is a checkpoint that may not be overwritten.
            StorageError: the directory cannot be made, or not be looked into.
        """
        try:
            self._new_commit().begin(sync_files=self._options.sync_files)
        except BaseException as exc:
            self._fail(exc)
            raise

    # -- write ---------------------------------------------------------------------------

    def write(self, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        """Write every item of this rank's plan.

        Raises:
            MPWriterError: the first error of any file; nothing of this rank is left.
        """
        begin_s = time.perf_counter()
        self._times.plan_s = begin_s - self._times.begin_s
        ties = TieTable()
        try:
            with collector_paused():
                jobs = plan_jobs(
                    items, self._options, rank=self.rank, save_id=self.save_id, child=self._child
                )
            done = self._run(jobs, items, planner, ties)
        except BaseException as exc:
            self._fail(exc)
            raise
        self._give_back()
        with collector_paused():
            results = results_of(jobs, items, ties, done, self._options.descriptors)
        self._times.write_s = time.perf_counter() - begin_s
        try:
            self._events.summarize(list(done.values()), self._workers)
        except BaseException as exc:  # the event handler gives up the save
            self._remove(*(job.relative_path for job in jobs if job.number in done))
            self._fail(exc)
            raise
        if not (self.is_coordinator or not self.use_collectives):
            self._events.concluded(committed=False, aloud=False)
        assert self.report is not None
        return with_report(results, self.report)

    def _run(
        self,
        jobs: list[Job],
        items: Sequence[WriteItem],
        planner: SavePlanner,
        ties: TieTable,
    ) -> dict[int, JobDone]:
        sizes = [item_nbytes(item) for item in items]
        largest = max((sum(sizes[n] for n in job.positions) for job in jobs), default=0)
        if any(item.type == WriteItemType.BYTE_IO for item in items):
            largest = max(largest, _BYTES_WINDOW_BYTES)
        progress = ProgressLine(
            self.location.display, sum(sizes), self._options.progress and self.is_coordinator
        )

        arena = get_arena()

        def stream(job: Job) -> ItemStream:
            tied = None if job.header else ties
            # Only a staged state's tensors lie in the arena already.
            find = arena.find if self._claim is not None else None
            return ItemStream(
                items, job.positions, planner, tied, self._stream_for, job.header, find
            )

        settings = self._settings(
            extended=True,
            stream=stream,
            remove=lambda job: self._remove(job.relative_path),
            sweep=self._sweep,
            on_bytes=progress.advance,
            on_file=lambda job: self._events.tell("file_written", path=job.path),
        )
        feed = JobFeed(settings, jobs, largest, get_pool(), arena)
        try:
            return feed.run()
        finally:
            progress.close()
            self._times.stage_s = feed.stage_s
            self._workers = merge_workers(feed.reports)

    def _settings(self, *, extended: bool, **callbacks: Any) -> FeedSettings:
        """`extended`: whether the writer's stream transforms apply."""
        options, reason = self._options, self._trainer_reason(extended)
        return FeedSettings(
            num_workers=options.num_workers,
            copy_ahead_bytes=options.copy_ahead_bytes,
            budget_bytes=options.budget_bytes,
            timeout_s=options.timeout_s,
            retries=options.retries,
            niceness=_NICENESS if self._claim and options.background_priority else 0,
            worker_cores=options.worker_cores,
            trainer_reason=reason,
            start=job_starter(
                self.location.fs,
                options,
                token=self.save_id[:8],
                in_trainer_only=reason is not None,
                extended=extended,
            ),
            warn=_warn_once,
            **callbacks,
        )

    def _trainer_reason(self, extended: bool) -> str | None:
        return (
            refusal(self.location.fs)
            or (self._options.extensions_refusal if extended else None)
            or arena_unavailable_reason()
        )

    # -- commit --------------------------------------------------------------------------

    def commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the checkpoint exist: write its metadata file, last and at once.

        Raises:
            MPWriterError: it could not be written; a previous checkpoint is as before, and
                nothing is left of this one.
        """
        begin_s = time.perf_counter()
        try:
            with collector_paused():
                complete_metadata(metadata, results, self.storage_meta())
                self._new_commit().run(metadata, self.rank)
        except BaseException as exc:
            self._fail(exc)
            raise
        self._times.commit_s = time.perf_counter() - begin_s
        ranks = ranks_of(results)
        self._warn_unless_together(ranks)
        self._events.concluded(committed=True, aloud=self.is_coordinator, ranks=ranks)

    def _warn_unless_together(self, ranks: Sequence[RankReport]) -> None:
        # A local directory was looked into, and may have another name on another node.
        for rank in [] if is_local(self.location.fs) else ranks:
            if rank.checkpoint_id != self.location.display:
                logger.warning(
                    "Rank %d has written its shards to %s, but the metadata is at %s: this "
                    "checkpoint cannot be loaded from there",
                    rank.rank,
                    rank.checkpoint_id,
                    self.location.display,
                )
                return

    def _new_commit(self) -> Commit:
        return Commit(
            self.location,
            None if self.use_collectives else self.rank,
            overwrite=self._options.overwrite,
            swap=self._write_whole,
            spared=lambda: {save.save_id[:8] for save in list(_under_way)},
        )

    def _write_whole(self, path: str, payload: bytes) -> None:
        """Write one small file through a worker: at the end of a program only workers can.

        The swap is the last step of its job, so the old file stays until the new one is durable.
        """
        name = path.rpartition("/")[2]
        items = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)]
        settings = self._settings(
            extended=False,
            stream=lambda job: ItemStream(items, [0], Payload(payload), None, self._stream_for),
            remove=lambda job: None,
            sweep=self._remove_temporary,
            on_bytes=lambda nbytes: None,
            on_file=lambda job: None,
        )
        JobFeed(settings, [Job(0, path, name, [0])], len(payload), get_pool(), get_arena()).run()

    # -- the rest ------------------------------------------------------------------------

    def _child(self, name: str) -> str:
        return self.location.child(name)

    def _remove(self, *names: str) -> None:
        self._new_commit().remove(*names)

    def _sweep(self, job: Job) -> None:
        """A killed worker may have left a temporary file, or have just published its shard."""
        self._remove_temporary(job)
        remove_files(self.location, [job.relative_path])

    def _remove_temporary(self, job: Job) -> None:
        remove_files(self.location, [temporary_name(job.relative_path, self.save_id[:8])])

    def _fail(self, error: BaseException) -> None:
        self._give_back()
        # It is over, however long somebody keeps the exception, and with it this object.
        _under_way.discard(self)
        self._events.failed(error)

    def _give_back(self) -> None:
        """The staged tensors have been written, or never will be."""
        if self._claim is not None:
            self._claim.end()


# Of workers while the trainer trains: at 10 they get a tenth of a core that both want.
# Source: sched_prio_to_weight of Linux, 110 against 1024.
# Not of DCP's checkpoint process: its planning is seconds of work with 20,000 tensors, and where
# the trainer wants every core, that took 67 s instead of 10 and cost three times as much training.
_NICENESS = 10

# The size of a bytes item is not known before it is resolved: room enough for most.
_BYTES_WINDOW_BYTES = 8 << 20
