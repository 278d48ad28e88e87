"""What is compared in asynchronous saves: one way to call `async_save` each.

Runs in: trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsspec.core import url_to_fs
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.distributed.checkpoint.storage import StorageWriter

from mpwriter import MPFsspecWriter
from mpwriter._compat import HAS_ASYNC_STAGING, StockFsspecWriter
from mpwriter.bench.empty_writers import PlanningOnlyWriter
from mpwriter.bench.places import Place
from mpwriter.bench.states import BenchState
from mpwriter.bench.subjects import STOCK_FAMILIES, Subject

__all__ = ["AsyncSubject", "Saver", "Started", "choose_async_subjects"]


@dataclass(frozen=True)
class AsyncSubject:
    """One way to save in the background.

    Attributes:
        family: "ours", a stock family, or "planning": the floor, which writes nothing.
        checkpointer: "thread" or "process", DCP's AsyncCheckpointerType.
        parallelism: workers or threads; 0 for a family that has none.
        staging: "" for the writer's own; "kept": stock with a DefaultStager that is kept over all
            saves, so that it copies into warm memory; "async": beside the training loop, for
            stock with such a stager.
    """

    family: str
    checkpointer: str
    parallelism: int = 0
    staging: str = ""

    @property
    def label(self) -> str:
        """Its name in tables and JSON."""
        extra = {"": "", "async": ", async staging", "kept": ", stager kept"}[self.staging]
        return f"{Subject(self.family, self.parallelism).label} {self.checkpointer}{extra}"

    @property
    def is_stock(self) -> bool:
        return self.family in STOCK_FAMILIES

    @property
    def writes_checkpoint(self) -> bool:
        return Subject(self.family).writes_checkpoint


class Started(NamedTuple):
    """A save under way: `staged` is done once the tensors may change, `saved` at the end."""

    staged: Future[Any] | None  # None: when the call returned
    saved: Future[Any]


def choose_async_subjects(
    families: Sequence[str],
    checkpointers: Sequence[str],
    workers: Sequence[int],
    threads: Sequence[int],
    *,
    local: bool,
) -> list[AsyncSubject]:
    """The subjects of a run.

    Args:
        families: which to take; those without a meaning here are left out, and "filesystem"
            where the place is not local.
        checkpointers: which of `options.CHECKPOINTERS`.
        workers: numbers of workers for ours in thread mode; the other modes take the largest.
        threads: numbers of threads for the stock writers.
        local: whether the place is on a local filesystem.
    """
    chosen: list[AsyncSubject] = []
    for mode in checkpointers:
        if "ours" in families:
            numbers = workers if mode == "thread" else [max(workers)]
            chosen += [AsyncSubject("ours", mode, number) for number in numbers]
            if mode == "thread" and HAS_ASYNC_STAGING:
                chosen.append(AsyncSubject("ours", mode, max(workers), "async"))
        if "fsspec" in families:
            chosen += [AsyncSubject("fsspec", mode, number) for number in threads]
            if hasattr(staging, "DefaultStager"):  # torch 2.9 up
                chosen += [AsyncSubject("fsspec", mode, number, "kept") for number in threads]
                chosen.append(AsyncSubject("fsspec", mode, max(threads), "async"))
        if "filesystem" in families and local:
            chosen += [AsyncSubject("filesystem", mode, number) for number in threads]
        if "planning" in families:
            chosen.append(AsyncSubject("planning", mode))
    return chosen


class Saver:
    """Starts saves of one state, and keeps what a subject keeps over its saves.

    One thread owns it; `close` gives the kept memory back.
    """

    def __init__(self, state: BenchState, place: Place) -> None:
        self._state = state
        self._place = place
        self._on_cpu = all(tensor.is_cpu for tensor in state.tensors())
        self._stagers: dict[tuple[str, str], Any] = {}
        self._staging_ours: list[MPFsspecWriter] = []  # each has a thread of its own

    def start(self, subject: AsyncSubject, url: str) -> Started:
        """Call `async_save` with a writer made for this save.

        Raises:
            Whatever the call raises; what the save raises is in the future.
        """
        process = subject.checkpointer == "process"
        kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        options: dict[str, Any] = {}
        if subject.is_stock and subject.staging:
            options["async_stager"] = self._stager(subject)
        response: Any = async_save(
            self._state.state_dict,
            storage_writer=self._writer(subject, url),
            async_checkpointer_type=kind,
            **options,
        )
        if isinstance(response, Future):
            return Started(None, response)
        return Started(response.staging_completion, response.upload_completion)

    def close(self) -> None:
        """Give up what is kept; the next save makes it anew."""
        stagers, self._stagers = self._stagers, {}
        for stager in stagers.values():
            stager.close()
        self.close_writers()

    def close_writers(self) -> None:
        """End the staging threads of saves that are over."""
        writers, self._staging_ours = self._staging_ours, []
        for writer in writers:
            writer.close()

    def _writer(self, subject: AsyncSubject, url: str) -> StorageWriter:
        number, options = subject.parallelism, self._place.storage_options
        if subject.family == "planning":
            return PlanningOnlyWriter()
        if subject.family == "fsspec":
            return StockFsspecWriter(url, thread_count=number, **options)
        if subject.family == "filesystem":
            return FileSystemWriter(url_to_fs(url, **options)[1], thread_count=number)
        writer = MPFsspecWriter(
            url, num_workers=number, async_staging=subject.staging == "async", **options
        )
        if subject.staging == "async":
            self._staging_ours.append(writer)
        return writer

    def _stager(self, subject: AsyncSubject) -> AsyncStager:
        """Stock's stager with the options that its documentation recommends."""
        kind = (subject.checkpointer, subject.staging)
        if kind not in self._stagers:
            options = staging.StagingOptions(
                use_pinned_memory=not self._on_cpu,
                use_shared_memory=subject.checkpointer == "process",
                use_async_staging=subject.staging == "async",
                use_non_blocking_copy=not self._on_cpu,
            )
            self._stagers[kind] = staging.DefaultStager(options)
        stager: AsyncStager = self._stagers[kind]
        return stager
