"""MPFsspecWriter: the StorageWriter that a trainer passes to torch.distributed.checkpoint.

Runs in: trainer.

It holds what is the same for every save; what belongs to one save is a `Save`, kept per thread
from `storage_meta()`, DCP's first call, to the end of that save.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future as StagingFuture
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from mpwriter._compat import (
    HAS_ASYNC_STAGING,
    SerializationFormat,
    StoragePrefix,
    StreamTransformExtension,
    can_be_storage_id,
)
from mpwriter._crossing import has_crossed
from mpwriter._filesystems import make_known, pickled_kind
from mpwriter._options import (
    DEFAULT_TIMEOUT_S,
    STOCK_NAMES,
    WriterOptions,
    at_least,
    check_storage_options,
    take_stock_name,
)
from mpwriter._planning import shard_rank
from mpwriter._pool import default_num_workers, get_pool
from mpwriter._report import EventHandler, SaveReport
from mpwriter._save import Save
from mpwriter._staged_state import Claim, StagedState, claim_of_this_thread
from mpwriter._state_staging import StateStaging
from mpwriter._storage import Location, locate
from mpwriter._writer_staging import StagingThread

__all__ = ["MPFsspecWriter"]

_OWN_NAMES = (
    "path",
    "single_file_per_rank",
    "sync_files",
    "num_workers",
    "per_worker_copy_ahead",
    "overwrite",
    "_extensions",
    "serialization_format",
    "staging_budget_bytes",
    "timeout_s",
    "retries",
    "progress",
    "event_handler",
    "async_staging",
    "cache_staged_state_dict",
    "background_priority",
    "worker_cores",
    *STOCK_NAMES.values(),
)


class _PerThread(threading.local):
    """The save under way on this thread, and the path it was last reset to."""

    save: Save | None = None
    path: str | os.PathLike[str] | None = None


class MPFsspecWriter(StorageWriter, AsyncStager):
    """Writes DCP checkpoints through worker processes to any fsspec filesystem.

    Takes the place of torch's `FsspecWriter`: same positional arguments, same files, readable by
    the same readers. Serialization, checksums and file operations run in worker processes, fed
    through shared memory.

    Args:
        path: directory or URL of the checkpoint; relative paths count from the working directory
            at the time of the save.
        single_file_per_rank: one file per worker (the default), or one per tensor.
        sync_files: make every file durable (fsync) before the checkpoint exists.
        num_workers: worker processes and files per rank; None: this rank's share of the cores,
            1 to 8. The stock name `thread_count` is taken too.
        per_worker_copy_ahead: bytes of shared memory that hold what is copied ahead of a file,
            per worker; a state of any size streams through. At least a page is used. The stock
            name `per_thread_copy_ahead` is taken too.
        overwrite: whether a checkpoint at `path` may be replaced.
        _extensions: stream transforms (experimental in torch), applied in the workers, which
            import torch for them.
        serialization_format: TORCH_SAVE, or SAFETENSORS: a safetensors file per worker, bytes
            items in a file of their own; to be read by `mpwriter.FsspecReader`.
        staging_budget_bytes: upper bound of shared memory in this process; None: a share of the
            available memory (see the README).
        timeout_s: the longest a worker may go without progress, in seconds; None: 600.
        retries: how often a file is written again after a transient error.
        progress: a line on stderr with bytes and rate, on the coordinator.
        event_handler: called with a `SaveEvent` in the thread that saves.
        async_staging: let `dcp.async_save` return before the tensors are copied; see `stage`.
        cache_staged_state_dict: accepted for stock's sake; the memory is kept warm in any case.
        background_priority: run the workers of an asynchronous save at lower CPU and I/O
            priority. A process cannot raise its priority again, so they stay there.
        worker_cores: cores to keep the workers to; None: those of the trainer.
        **storage_options: for the filesystem, as for `fsspec.open`.

    Raises:
        TypeError: a keyword that looks like one of these names misspelt.
        ValueError: a value out of range, or a path that no filesystem takes.

    Thread safety: any number of saves, also at the same time from several threads.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        num_workers: int | None = None,
        per_worker_copy_ahead: int = 64 * 2**20,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        *,
        staging_budget_bytes: int | None = None,
        timeout_s: float | None = None,
        retries: int = 3,
        progress: bool = False,
        event_handler: EventHandler | None = None,
        async_staging: bool = False,
        cache_staged_state_dict: bool = True,
        background_priority: bool = True,
        worker_cores: Iterable[int] | None = None,
        **storage_options: Any,
    ) -> None:
        super().__init__()
        num_workers = take_stock_name(storage_options, "num_workers", num_workers, None)
        per_worker_copy_ahead = take_stock_name(
            storage_options, "per_worker_copy_ahead", per_worker_copy_ahead, 64 * 2**20
        )
        safetensors = SerializationFormat(serialization_format) is SerializationFormat.SAFETENSORS
        if safetensors and _extensions:
            raise NotImplementedError("a transformed safetensors file would not be one")
        self._options = WriterOptions(
            single_file_per_rank=single_file_per_rank,
            sync_files=sync_files,
            num_workers=at_least(
                1, default_num_workers() if num_workers is None else num_workers, "num_workers"
            ),
            copy_ahead_bytes=at_least(0, per_worker_copy_ahead, "per_worker_copy_ahead"),
            overwrite=overwrite,
            extensions=tuple(_extensions or ()),
            safetensors=safetensors,
            budget_bytes=staging_budget_bytes,
            timeout_s=DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s,
            retries=at_least(0, retries, "retries"),
            progress=progress,
            background_priority=background_priority,
            worker_cores=None if worker_cores is None else tuple(worker_cores),
            event_handler=event_handler,
        )
        if async_staging and not HAS_ASYNC_STAGING:
            raise NotImplementedError("async_staging needs a torch that has AsyncSaveResponse")
        self._async_staging = async_staging
        self._staging_thread = StagingThread()
        self._storage_options = storage_options
        self._path: str | os.PathLike[str] = path
        location = locate(path, storage_options, writable=True)
        check_storage_options(storage_options, type(location.fs), _OWN_NAMES)
        self._kind = pickled_kind(location.fs)
        self._this_thread = _PerThread()
        self.last_report: SaveReport | None = None

    # -- StorageWriter -------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin afresh, at `checkpoint_id` if given; storage options stay."""
        if checkpoint_id is not None and os.fspath(checkpoint_id):
            locate(checkpoint_id, self._storage_options, writable=True)
            # For the save that this thread is about to make; other threads' saves are not moved.
            self._this_thread.path = checkpoint_id
            self._path = checkpoint_id
        self._this_thread.save = None

    def storage_meta(self) -> StorageMeta:
        """DCP's first call: a new save begins on this thread."""
        return self._begin().storage_meta()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take this rank's role; torch 2.8 up also passes `rank` and `use_collectives`."""
        save = self._current()
        save.is_coordinator = is_coordinator
        save.rank = kwargs.get("rank") or 0
        save.use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory; refuse an existing checkpoint where `overwrite` is false."""
        save = self._current()
        save.prepare()
        if not save.use_collectives:
            plan = dataclasses.replace(plan, storage_data=StoragePrefix(f"__{save.rank}_"))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell each rank its number within the save."""
        return [
            dataclasses.replace(plan, storage_data=StoragePrefix(f"__{rank}_"))
            if plan.storage_data is None
            else plan
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items through the workers.

        Returns:
            A completed future with one result per item.

        Raises:
            MPWriterError: what went wrong first; no file of this rank's save is left.
        """
        save = self._current()
        # With plan caching this is the plan of the first save: only the rank in it counts.
        save.rank = shard_rank(plan.storage_data.prefix)
        results = save.write(plan.items, planner)
        self.last_report = save.report
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: write the metadata file, after which the checkpoint exists."""
        save = self._current()
        save.commit(metadata, results)
        self.last_report = save.report
        self._this_thread.save = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether some fsspec filesystem takes this path."""
        return can_be_storage_id(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """Where the next save of this thread goes, without credentials."""
        save = self._this_thread.save
        return save.location.display if save is not None else self._locate().display

    # -- AsyncStager ---------------------------------------------------------------------

    _synchronize_after_execute = False

    def stage(  # type: ignore[override]
        self, state_dict: dict[str, Any], **kwargs: Any
    ) -> StagedState | StagingFuture[StagedState]:
        """Copy a state dict into shared memory; `dcp.async_save` calls this.

        The copy is the only one: the workers write from where it lies. Its memory goes back when
        that save is over, and later saves find it warm. A staged state serves one save.

        Returns:
            The staged state; training may go on. With `async_staging` a future of it: the
            tensors must not change before it is done (`AsyncSaveResponse.staging_completion`, or
            `synchronize_staging()`, just before `optimizer.step()`).

        Raises:
            StagingMemoryError: the budget cannot hold the state, or earlier saves did not free
                enough of it within `timeout_s`. Nothing was copied.
            StagingError, TypeError: a value cannot be copied; its key is named.
        """
        # What is over on this thread must not hold memory that this staging may have to wait for.
        claim_of_this_thread()
        self._this_thread.save = None
        options = self._options
        staging = StateStaging(path=self._where())
        staging.prepare(state_dict, budget_bytes=options.budget_bytes, timeout_s=options.timeout_s)
        try:
            # A save may outlive the main thread's code, and after that no process can be started.
            if not has_crossed():
                get_pool().prepare(options.num_workers)
            return self._staging_thread.copy(staging) if self._async_staging else staging.copy()
        except BaseException:
            staging.abandon()  # the exception may be kept, and with it this frame
            raise

    def synchronize_staging(self) -> None:
        """Wait until every staging of this writer is done and its tensors may change.

        Raises:
            StagingError: a tensor could not be copied.
        """
        self._staging_thread.wait()

    # -- the writer's own ----------------------------------------------------------------

    def close(self) -> None:
        """End the writer's staging thread, if it has one.

        Workers and memory belong to the process: see `mpwriter.shutdown`.
        """
        self._this_thread.save = None
        self._staging_thread.close()

    def __getstate__(self) -> dict[str, Any]:
        # Saves and threads belong to this process.
        own = ("_this_thread", "_staging_thread")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["_kind"] is not None:
            make_known(state["_kind"])
        vars(self).update(state)
        self._this_thread, self._staging_thread = _PerThread(), StagingThread()

    def _where(self, claim: Claim | None = None) -> str | os.PathLike[str]:
        """Where this thread points; a staged state remembers where the one that staged it did."""
        path = self._this_thread.path
        if path is None and claim is not None:
            path = claim.path
        return self._path if path is None else path

    def _locate(self, claim: Claim | None = None) -> Location:
        return locate(self._where(claim), self._storage_options, writable=True)

    def _begin(self) -> Save:
        claim = claim_of_this_thread()
        try:
            save = Save(self._locate(claim), self._options, claim=claim)
        except BaseException:
            if claim is not None:
                claim.end()  # the exception may be kept, and with it this frame
            raise
        self._this_thread.save = save
        return save

    def _current(self) -> Save:
        return self._this_thread.save or self._begin()
