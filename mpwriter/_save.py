"""One save of one rank: where it goes, what it is called, how it is written and committed.

Runs in: trainer, in the thread that saves.

    begin (storage_meta)      save id, location as of now
    prepare (local plan)      directory; overwrite=False refuses here, before anything is touched
    write (write_data)        buckets -> jobs -> workers; shards durable under names of this save
    commit (finish)           coordinator: metadata swapped in atomically, then the shards that
                              only the previous metadata named are removed
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from mpwriter import _metadata
from mpwriter._arena import arena_unavailable_reason, get_arena
from mpwriter._compat import DCP_VERSION
from mpwriter._faults import stale_shard_names
from mpwriter._feed import FeedSettings, JobFeed
from mpwriter._lane import Job
from mpwriter._options import WriterOptions
from mpwriter._planning import item_nbytes
from mpwriter._pool import get_pool
from mpwriter._publish import temporary_name
from mpwriter._report import ProgressLine, SaveEvent, SaveReport, WorkerReport, merge_workers
from mpwriter._save_jobs import Payload, job_starter, plan_jobs, results_of
from mpwriter._staged_state import Claim
from mpwriter._staging import ItemStream
from mpwriter._staging_ties import TieTable
from mpwriter._storage import (
    Location,
    as_storage_error,
    file_exists,
    make_directories,
    read_file,
    refusal,
    remove_files,
    warn_unless_atomic,
)
from mpwriter._streams import StreamFactory, accelerator_stream
from mpwriter._types import JobDone
from mpwriter.errors import CheckpointExistsError, MPWriterError

__all__ = ["Save"]

logger = logging.getLogger(__name__)

_warned: set[str] = set()


def _warn_once(reason: str) -> None:
    kind = re.sub(r"\d+", "", reason)  # the numbers of workers and processes differ each time
    if kind not in _warned:
        _warned.add(kind)
        logger.warning("Checkpoint files are written in the trainer, without workers: %s", reason)


@dataclass
class _Times:
    begin_s: float = field(default_factory=time.perf_counter)
    plan_s: float = 0.0
    stage_s: float = 0.0
    write_s: float = 0.0
    commit_s: float = 0.0


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
        self.rank = 0
        self.is_coordinator = True
        self.use_collectives = True
        self.report: SaveReport | None = None
        self._options = options
        self._stream_for = stream_for or accelerator_stream()
        self._claim = claim
        self._times = _Times()
        self._workers: tuple[WorkerReport, ...] = ()
        self._last_words = self._given_up()
        try:
            self._tell("save_started")
        except BaseException as exc:
            self._complain(exc)
            raise

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.location.display, save_id=self.save_id)

    # -- prepare -------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the directory.

        Raises:
            CheckpointExistsError: there is a checkpoint that may not be overwritten.
            StorageError: the directory cannot be made, or not be looked into.
        """
        fs = self.location.fs
        try:
            warn_unless_atomic(fs)
            self._refuse_existing()
            make_directories(self.location, sync_files=self._options.sync_files)
        except (MPWriterError, KeyboardInterrupt) as exc:
            self._fail(exc)
            raise
        except Exception as exc:
            # DCP sends it to the other ranks: what cannot be pickled would leave them waiting.
            error = as_storage_error(exc, "make the directory", self.location.root, fs)
            self._fail(error)
            raise error from exc

    def _refuse_existing(self) -> None:
        fs = self.location.fs
        if not self.use_collectives and file_exists(fs, self._child(_metadata.METADATA_NAME)):
            self._refuse(
                "it holds a checkpoint of all ranks, which would be loaded instead of one "
                "saved with use_collectives=False"
            )
        if not self._options.overwrite and file_exists(fs, self._metadata_path()):
            self._refuse("overwrite=False and it holds a checkpoint already")

    def _refuse(self, why: str) -> None:
        where = self.location.display
        raise CheckpointExistsError(f"Checkpoint already exists: {where}: {why}", path=where)

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
            jobs = plan_jobs(
                items, self._options, rank=self.rank, save_id=self.save_id, child=self._child
            )
            done = self._run(jobs, items, planner, ties)
        except BaseException as exc:
            self._fail(exc)
            raise
        self._give_back()
        results = results_of(jobs, items, ties, done, self._options.descriptors)
        self._times.write_s = time.perf_counter() - begin_s
        try:
            self._summarize(done)
        except BaseException as exc:  # the event handler gives up the save
            self._remove(*(job.relative_path for job in jobs if job.number in done))
            self._fail(exc)
            raise
        if not (self.is_coordinator or not self.use_collectives):
            self._conclude()
        return results

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
            on_file=lambda job: self._tell("file_written", path=job.path),
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
        metadata.version = DCP_VERSION
        metadata.storage_data = {
            result.index: result.storage_data for rank in results for result in rank
        }
        metadata.storage_meta = self.storage_meta()
        _metadata.share_equal_parts(metadata)
        path = self._metadata_path()
        stale = self._stale_names(path, metadata) if self._options.overwrite else []
        try:
            self._write_whole(path, _metadata.dumps(metadata))
        except BaseException as exc:
            self._remove_unnamed(path, metadata)
            self._fail(exc)
            raise
        # Only now: until the swap they belonged to the checkpoint that was loadable.
        self._remove(*stale)
        self._times.commit_s = time.perf_counter() - begin_s
        self._conclude()

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

    def _stale_names(self, path: str, metadata: Metadata) -> list[str]:
        try:
            before = read_file(self.location.fs, path)
        except Exception as exc:  # none, or not to be read: then there is nothing to clean up
            logger.debug("no earlier checkpoint at %s: %s", path, exc)
            return []
        named = {place.relative_path for place in metadata.storage_data.values()}
        return sorted(stale_shard_names(before) - named)

    def _remove_unnamed(self, path: str, metadata: Metadata) -> None:
        """The commit has failed: remove the shards of every rank, which nothing will name.

        Unless the new metadata did get its name and only the word of it was lost.
        """
        named = {place.relative_path for place in metadata.storage_data.values()}
        try:
            current = read_file(self.location.fs, path)
        except (FileNotFoundError, IsADirectoryError):
            current = b""
        except Exception as exc:
            logger.debug("cannot tell what %s holds: %s", path, exc)
            return
        if named.isdisjoint(stale_shard_names(current)):
            remove_files(self.location, named)

    # -- the rest ------------------------------------------------------------------------

    def _child(self, name: str) -> str:
        return self.location.child(name)

    def _metadata_path(self) -> str:
        return self._child(_metadata.metadata_name(None if self.use_collectives else self.rank))

    def _remove(self, *names: str) -> None:
        for name in remove_files(self.location, list(names)):
            logger.warning("%s is not needed any more and could not be removed", self._child(name))

    def _sweep(self, job: Job) -> None:
        """A killed worker may have left a temporary file, or have just published its shard."""
        self._remove_temporary(job)
        remove_files(self.location, [job.relative_path])

    def _remove_temporary(self, job: Job) -> None:
        remove_files(self.location, [temporary_name(job.relative_path, self.save_id[:8])])

    def _fail(self, error: BaseException) -> None:
        self._complain(error)
        self._give_back()
        try:
            self._tell("save_failed", error=error)
        except Exception:
            logger.exception("The event handler failed when it was told: %s", error)

    def _complain(self, error: BaseException) -> None:
        """Nobody may ever ask the future of an asynchronous save."""
        self._last_words = None
        if self._claim is not None:
            logger.error("The save of %s failed: %s", self.location.display, error)

    def _given_up(self) -> logging.LogRecord | None:
        """What to say where DCP drops an asynchronous save: nothing else would tell.

        Made beforehand: the end of a thread, where it is said, is too late to ask for its name.
        """
        if self._claim is None:
            return None
        text = "The save of %s was given up: it could not be planned, or another rank failed"
        where = (self.location.display,)
        return logger.makeRecord(logger.name, logging.ERROR, __file__, 0, text, where, None)

    def __del__(self) -> None:
        record = getattr(self, "_last_words", None)
        if record is not None:
            record.created = time.time()
            logger.handle(record)

    def _give_back(self) -> None:
        """The staged tensors have been written, or never will be."""
        if self._claim is not None:
            self._claim.end()

    def _summarize(self, done: dict[int, JobDone]) -> None:
        times = self._times
        self.report = SaveReport(
            checkpoint_id=self.location.display,
            save_id=self.save_id,
            rank=self.rank,
            nbytes=sum(job.nbytes for job in done.values()),
            files=len(done),
            num_workers=sum(worker.worker is not None for worker in self._workers),
            plan_s=times.plan_s,
            stage_s=times.stage_s,
            write_s=times.write_s,
            commit_s=times.commit_s,
            total_s=time.perf_counter() - times.begin_s,
            workers=self._workers,
        )
        self._tell("shards_written")

    def _conclude(self) -> None:
        assert self.report is not None
        self._last_words = None
        total_s = time.perf_counter() - self._times.begin_s
        report = replace(self.report, commit_s=self._times.commit_s, total_s=total_s)
        self.report = report
        where = report.checkpoint_id
        logger.info(
            "Saved %s: %d bytes in %d files by %d workers; staged %.3f s, wrote %.3f s, "
            "total %.3f s, %.2f GiB/s",
            report.checkpoint_id,
            report.nbytes,
            report.files,
            report.num_workers,
            report.stage_s,
            report.write_s,
            report.total_s,
            report.gib_per_s,
        )
        if self.is_coordinator or not self.use_collectives:
            try:
                self._tell("save_committed")
            except Exception:  # the checkpoint exists: a handler cannot take it back
                logger.exception("The event handler failed after %s was saved", where)

    def _tell(self, name: str, path: str | None = None, error: BaseException | None = None) -> None:
        handler = self._options.event_handler
        if handler is not None:
            handler(
                SaveEvent(
                    name,
                    self.location.display,
                    self.save_id,
                    self.rank,
                    self.report,
                    path,
                    error,
                )
            )


# Of workers while the trainer trains: at 10 they get a tenth of a core that both want.
# Source: sched_prio_to_weight of Linux, 110 against 1024.
_NICENESS = 10

# The size of a bytes item is not known before it is resolved: room enough for most.
_BYTES_WINDOW_BYTES = 8 << 20
