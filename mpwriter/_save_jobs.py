"""The jobs of one save: which files, what each begins with, what their ends mean for DCP.

Runs in: trainer. Functions of what they are given; `Save` has the state.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from mpwriter._compat import storage_info
from mpwriter._lane import Job
from mpwriter._options import WriterOptions
from mpwriter._planning import item_nbytes, shard_name, split_into_buckets
from mpwriter._process import current_directory, import_path
from mpwriter._report import RankReport, SaveReport
from mpwriter._staging_kinds import tensor_spec
from mpwriter._staging_ties import TieTable
from mpwriter._storage import pickled_filesystem
from mpwriter._types import JobDone, StartJob

__all__ = ["Payload", "job_starter", "plan_jobs", "ranks_of", "results_of", "with_report"]


def plan_jobs(
    items: Sequence[WriteItem],
    options: WriterOptions,
    *,
    rank: int,
    save_id: str,
    child: Callable[[str], str],
) -> list[Job]:
    """The files of one rank.

    Args:
        items: the write items of its plan.
        child: the filesystem's path of a name in the checkpoint.
    """
    jobs: list[Job] = []
    for positions, safetensors in _buckets(items, options):
        name = shard_name(rank, len(jobs), save_id, safetensors=safetensors)
        job = Job(len(jobs), child(name), name, positions)
        if safetensors:
            _plan_safetensors(job, items)
        jobs.append(job)
    return jobs


def _buckets(items: Sequence[WriteItem], options: WriterOptions) -> list[tuple[list[int], bool]]:
    """Positions of each file, and whether it is a safetensors file."""
    kinds: list[tuple[list[int], bool]] = [(list(range(len(items))), False)]
    if options.safetensors:
        is_bytes = [item.type == WriteItemType.BYTE_IO for item in items]
        kinds = [
            ([n for n, raw in enumerate(is_bytes) if raw], False),
            ([n for n, raw in enumerate(is_bytes) if not raw], True),
        ]
    buckets: list[tuple[list[int], bool]] = []
    for positions, safetensors in kinds:
        if not options.single_file_per_rank:
            buckets += [([position], safetensors) for position in positions]
            continue
        num = 1 if options.safetensors and not safetensors else options.num_workers
        chosen = [items[position] for position in positions]
        for bucket in split_into_buckets(chosen, num):
            buckets.append(([positions[n] for n in bucket], safetensors))
    return buckets


def _plan_safetensors(job: Job, items: Sequence[WriteItem]) -> None:
    """Fix the file's header, which comes before the first byte of any tensor.

    Tensors of larger elements first: the format allows no gaps, so that each is then aligned.
    """
    tensors = {}
    for position in job.positions:
        tensor = items[position].tensor_data
        assert tensor is not None
        tensors[position] = tensor
    job.container = "safetensors"
    job.positions.sort(key=lambda position: -tensors[position].properties.dtype.itemsize)
    taken: set[str] = set()
    specs = []
    for position in job.positions:
        tensor, item = tensors[position], items[position]
        key, chunk = item.index.fqn, tensor.chunk
        if key in taken:  # a further shard of the same tensor on this rank
            key += "@" + ",".join(map(str, chunk.offsets))
        taken.add(key)
        specs.append(tensor_spec(tensor.properties.dtype, chunk.sizes, item_nbytes(item), key))
    job.header = tuple(specs)
    job.offsets = tuple(tuple(tensors[position].chunk.offsets) for position in job.positions)


def job_starter(
    fs: Any, options: WriterOptions, *, token: str, in_trainer_only: bool, extended: bool
) -> Callable[[Job, int, bool], StartJob]:
    """Makes the first message of a job: (job, attempt, whether it stays in the trainer).

    Args:
        token: part of temporary names.
        in_trainer_only: no worker will be asked, so nothing need be picklable.
        extended: whether the writer's stream transforms apply.
    """
    own = (fs, options.extensions if extended else ())
    pickled: tuple[Any, Any] = (None, None)
    if not in_trainer_only:
        pickled = (pickled_filesystem(fs), options.pickled_extensions if extended else None)
    cwd, umask, paths = current_directory(), _current_umask(), import_path()

    def start(job: Job, attempt: int, in_trainer: bool) -> StartJob:
        filesystem, extensions = own if in_trainer else pickled
        return StartJob(
            job=attempt,
            filesystem=filesystem,
            path=job.path,
            token=token,
            sync_files=options.sync_files,
            cwd=cwd,
            umask=umask,
            container=job.container,
            extensions=extensions,
            header=job.header,
            offsets=job.offsets,
            sys_path=paths,
        )

    return start


def results_of(
    jobs: list[Job],
    items: Sequence[WriteItem],
    ties: TieTable,
    done: dict[int, JobDone],
    descriptors: list[str],
) -> list[WriteResult]:
    """One result per item, also for those that are tied to another one's bytes."""
    results: list[WriteResult] = []
    index_of: dict[int, int] = {}  # position -> place in `results`, for ties only
    for job in jobs:
        if job.number not in done:
            continue
        said = done[job.number]
        if ties.owner_of:
            start = len(results)
            index_of.update((n, start + i) for i, n in enumerate(job.written))
        for position, offset, length in zip(job.written, said.offsets, said.lengths, strict=True):
            place = storage_info(job.relative_path, offset, length, descriptors)
            results.append(WriteResult(items[position].index, length, place))
    for position, owner in ties.owner_of.items():
        stored = results[index_of[owner]]
        results.append(
            WriteResult(items[position].index, stored.size_in_bytes, stored.storage_data)
        )
    return results


@dataclass(frozen=True)
class _ReportingResult(WriteResult):
    """The first result of a rank, with what its coordinator is to know of the rank.

    DCP gathers the results anyway: no collective of our own is needed.
    """

    report: RankReport


def with_report(results: list[WriteResult], report: SaveReport) -> list[WriteResult]:
    """The same results; the first of them, if there is one, carries the figures of this rank."""
    if not results:
        return results
    first, rest = results[0], results[1:]
    of_rank = RankReport(
        rank=report.rank,
        checkpoint_id=report.checkpoint_id,
        nbytes=report.nbytes,
        files=report.files,
        num_workers=report.num_workers,
        stage_s=report.stage_s,
        write_s=report.write_s,
    )
    carrier = _ReportingResult(first.index, first.size_in_bytes, first.storage_data, of_rank)
    return [carrier, *rest]


def ranks_of(results: Iterable[Sequence[WriteResult]]) -> tuple[RankReport, ...]:
    """What the ranks have told with their results."""
    firsts = [of_rank[0] for of_rank in results if of_rank]
    return tuple(first.report for first in firsts if isinstance(first, _ReportingResult))


class Payload(SavePlanner):
    """Resolves the one item of a file that is written as it is."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def resolve_data(self, write_item: WriteItem) -> io.BytesIO:
        return io.BytesIO(self._payload)

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("there is nothing to plan")

    create_local_plan = create_global_plan = finish_plan = set_up_planner  # type: ignore[assignment]


def _current_umask() -> int:
    """The umask, without setting it: os.umask() would change it for other threads meanwhile."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("Umask:"):
                    return int(line.split()[1], 8)
    except OSError:
        pass
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
