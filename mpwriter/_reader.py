"""FsspecReader: the storage reader for `dcp.load`.

Runs in: trainer. Files are read by threads of this process, where its filesystem lets several read
at once, and by workers, where much of an object store is to be read; see `mpwriter._fetch`.

    read_metadata -> set_up_storage_reader -> prepare_local_plan -> prepare_global_plan -> read_data
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
import uuid
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from mpwriter import _metadata
from mpwriter._collector import collector_paused
from mpwriter._compat import ExtensionRegistry
from mpwriter._fetch import DEFAULT_TIMEOUT_S, fetch
from mpwriter._fetch_decode import Delivery
from mpwriter._fetch_file import check_sizes, retried
from mpwriter._fetch_plan import plan_reads
from mpwriter._options import check_storage_options
from mpwriter._reader_absence import UnreadableMetadata, explain_absence, renewed
from mpwriter._reader_agreement import RankView, check_agreement, with_view, without_views
from mpwriter._report import LoadEvent, LoadEventHandler, LoadReport
from mpwriter._storage import locate, read_file
from mpwriter.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    MPWriterError,
)

__all__ = ["FsspecReader"]

_logger = logging.getLogger(__name__)


class FsspecReader(StorageReader):
    """Loads checkpoints from any fsspec URL: ours, and those of the stock writers.

    Args:
        path: a local path or an fsspec URL of the checkpoint's directory.
        _extension_registry: makes the stream transforms that a checkpoint was saved with; None:
            those that torch knows.
        num_workers: at most so many threads read a local disk; None: the cores of this rank. An
            object store is read by the trainer's threads with 10 requests on their way, a large
            load (256 MiB for each) by worker processes with as many requests each; at most
            `num_workers` of them, None: this rank's share of the cores, 1 to 8. Other filesystems
            are read by one thread.
        verify: compare the CRC-32 of everything that is read. Checkpoints of the stock writers
            have CRCs too, unless torch.serialization.set_crc32_options(False) was in force.
        timeout_s: the longest to wait for one read, in seconds; None: 600.
        retries: how often a read is tried again after an error that may pass.
        progress: draw a line on stderr while reading, on the coordinator.
        event_handler: called with a `LoadEvent` in the thread that loads: at the start, at the end,
            on failure. What it raises at the start fails the load.
        **storage_options: for the filesystem; kept over `reset`.

    Raises:
        TypeError: a keyword looks like a misspelt option, or the path is none.
        ValueError: the path or an option makes no sense.
        ImportError: the package for its protocol is not installed.

    Attributes:
        last_report: of the last load that went well; None before.

    Thread safety: one load at a time. Any thread.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: ExtensionRegistry | None = None,
        *,
        num_workers: int | None = None,
        verify: bool = True,
        timeout_s: float | None = None,
        retries: int = 3,
        progress: bool = False,
        event_handler: LoadEventHandler | None = None,
        **storage_options: Any,
    ) -> None:
        super().__init__()
        self._extensions = (
            ExtensionRegistry() if _extension_registry is None else _extension_registry
        )
        _check_numbers(num_workers, timeout_s, retries)
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._event_handler = event_handler
        self.last_report: LoadReport | None = None
        self._verify = verify
        self._retries = retries
        self._progress = progress
        self._storage_options = storage_options
        self._metadata: Metadata | None = None
        # The last error of read_metadata(), and the thread that DCP will ask again on.
        self._failure: tuple[int, MPWriterError] | None = None
        self.rank: int | None = None
        self.use_collectives = True
        self._is_coordinator = True
        self._move_to(path)
        check_storage_options(storage_options, type(self._location.fs), _OPTIONS)

    def _move_to(self, path: str | os.PathLike[str]) -> None:
        self._location = locate(path, self._storage_options)
        self.path = path
        self.load_id = str(uuid.uuid4())

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The path as it was given to the constructor or to `reset`."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `checkpoint_id` is a URL or a path in a str, as the stock FsspecReader has it."""
        if isinstance(checkpoint_id, Path):
            return False
        try:
            url_to_fs(checkpoint_id)
        except ValueError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load: of `checkpoint_id`, or of the same place.

        Raises:
            TypeError, ValueError, ImportError: as the constructor.
        """
        self._metadata = None
        self._failure = None
        self._move_to(checkpoint_id or self.path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read what the checkpoint holds.

        Args:
            *args: ignored.
            **kwargs: `rank`: read the metadata that this rank saved with use_collectives=False.

        Returns:
            A new object at every call. To DCP's second question after a failure: a stand-in that
            raises the first error when it is used (see `_reader_absence`).

        Raises:
            IncompleteCheckpointError: there is no complete checkpoint; the text says why.
            CorruptCheckpointError: the metadata is damaged.
            StorageError: it cannot be read.
        """
        rank = kwargs.get("rank")
        failure, self._failure = self._failure, None
        if rank is None:
            try:
                return self._load_metadata(None)
            except MPWriterError as error:
                self._failure = threading.get_ident(), renewed(error)
                raise
        if failure is None or failure[0] != threading.get_ident():
            return self._load_metadata(rank)
        return self._load_second_metadata(rank, failure[1])

    def _load_second_metadata(self, rank: int, first: MPWriterError) -> Metadata:
        """The rank's own metadata, but only where it cannot hide a damaged checkpoint."""
        if not isinstance(first, IncompleteCheckpointError):
            return UnreadableMetadata(first)
        try:
            return self._load_metadata(rank)
        except IncompleteCheckpointError:
            return UnreadableMetadata(first)
        except MPWriterError as error:
            return UnreadableMetadata(error)

    def _load_metadata(self, rank: int | None) -> Metadata:
        location, name = self._location, _metadata.metadata_name(rank)
        path = f"{location.display}/{name}"
        try:
            raw = retried(
                lambda: read_file(location.fs, location.child(name)),
                path=path,
                fs=location.fs,
                retries=self._retries,
                missing=lambda: explain_absence(location, name),
            )
        except MPWriterError as error:
            if isinstance(error.__cause__, IsADirectoryError):
                raise explain_absence(location, name) from error.__cause__
            raise
        with collector_paused():
            metadata = _metadata.loads(raw, path)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the metadata that `read_data` will go by.

        Args:
            metadata: of `read_metadata`.
            is_coordinator: of all ranks only this one shows progress and logs a summary.
            *args: ignored.
            **kwargs: `rank` and `use_collectives`; torch 2.7 gives neither.

        Raises:
            IncompleteCheckpointError, CorruptCheckpointError, StorageError: what `read_metadata`
                could not raise, since DCP would have replaced it.
        """
        if isinstance(metadata, UnreadableMetadata):
            raise metadata.error()
        if metadata.storage_data is None:
            path = f"{self._location.display}/{_metadata.METADATA_NAME}"
            raise CorruptCheckpointError(
                f"the metadata does not say in which files the values are: {path}", path=path
            )
        self._failure = None
        self._metadata = metadata
        self._is_coordinator = is_coordinator
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)

    @property
    def storage_data(self) -> dict[Any, Any]:
        """Where in which file the values are; empty before `set_up_storage_reader`."""
        return {} if self._metadata is None else self._metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note for the coordinator what this rank reads from.

        Raises:
            IncompleteCheckpointError, CorruptCheckpointError, StorageError: without collectives, a
                file is missing or too short. Here DCP still tells all ranks of an error; in
                `read_data` the others would wait at a barrier.
        """
        if not self.use_collectives:
            check_sizes(self._location, plan_reads(plan.items, self.storage_data))
        stored = None if self._metadata is None else self._metadata.storage_meta
        save_id = None if stored is None else stored.save_id
        return with_view(plan, RankView(self._location.display, save_id, self.use_collectives))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Compare what the ranks read from.

        Raises:
            IncompleteCheckpointError: they do not see the same checkpoint.
        """
        check_agreement(plans)
        return without_views(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of `plan`.

        Returns:
            A future that is done.

        Raises:
            IncompleteCheckpointError: a shard file is missing.
            CorruptCheckpointError: one is cut off or damaged.
            ShapeMismatchError: a target has another shape than what is stored.
            StorageError: a file cannot be read.
        """
        self._tell("load_started")
        try:
            self.last_report = self._fetch(plan, planner)
        except BaseException as error:
            self._tell_quietly("load_failed", error)
            raise
        self._log(self.last_report)
        self._tell_quietly("load_finished")
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _fetch(self, plan: LoadPlan, planner: LoadPlanner) -> LoadReport:
        entries = {} if self._metadata is None else self._metadata.state_dict_metadata
        delivery = Delivery(planner, entries, verify=self._verify, extensions=self._extensions)
        return fetch(
            self._location,
            plan.items,
            self.storage_data,
            delivery,
            retries=self._retries,
            progress=self._progress and self._is_coordinator,
            num_workers=self._num_workers,
            timeout_s=self._timeout_s or DEFAULT_TIMEOUT_S,
            rank=self.rank or 0,
        )

    def _log(self, report: LoadReport) -> None:
        level = logging.INFO if self._is_coordinator else logging.DEBUG
        _logger.log(level, "%s: %s", report.checkpoint_id, report.summary())
        if report.unverified:
            _logger.log(
                level,
                "%d of these items are unverified: read in part, or their files hold no CRC",
                report.unverified,
            )

    def _tell(self, name: str, error: BaseException | None = None) -> None:
        if self._event_handler is not None:
            report = self.last_report if name == "load_finished" else None
            where, rank = self._location.display, self.rank or 0
            self._event_handler(LoadEvent(name, where, rank, report, error))

    def _tell_quietly(self, name: str, error: BaseException | None = None) -> None:
        """What has happened has happened: a handler cannot change it."""
        try:
            self._tell(name, error)
        except Exception:
            _logger.exception("The event handler failed at %s", name)


_OPTIONS = tuple(inspect.signature(FsspecReader.__init__).parameters)[1:-1]


def _check_numbers(num_workers: int | None, timeout_s: float | None, retries: int) -> None:
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"num_workers is {num_workers}, not 1 or more")
    if timeout_s is not None and timeout_s <= 0:
        raise ValueError(f"timeout_s is {timeout_s}, not more than 0")
    if retries < 0:
        raise ValueError(f"retries is {retries}, not 0 or more")
