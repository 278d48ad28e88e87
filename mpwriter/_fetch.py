"""All stored items of one load plan, from their files to the planner.

Runs in: trainer.

    _fetch_plan     which ranges of which files
    _fetch_source   files that threads can share: of a local disk, or behind an event loop
    _fetch_crew     worker processes that read the latter, for large loads; _fetch_gather finds them
    _fetch_ahead    their ranges, read ahead
    _fetch_file     ranges of one file, one after the other: of every other filesystem
    _fetch_place    large payloads, straight into their targets
    _fetch_landing  those of targets on accelerators, through page-locked memory
    _fetch_decode   from bytes to tensors, checked, into their targets
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem

from mpwriter._collector import collector_paused
from mpwriter._fetch_ahead import Ahead, Arrived
from mpwriter._fetch_decode import Delivery
from mpwriter._fetch_file import Buffer, ShardFile
from mpwriter._fetch_plan import MAX_RANGE_BYTES, ByteRange, plan_reads
from mpwriter._fetch_source import lane_for
from mpwriter._ranges import has_ranges
from mpwriter._report import LoadReport, ProgressLine
from mpwriter._storage import Location

__all__ = ["fetch"]

# As long as the writer waits for a worker without progress.
DEFAULT_TIMEOUT_S = 600.0


def fetch(
    location: Location,
    reads: Iterable[ReadItem],
    places: Mapping[MetadataIndex, Any],
    delivery: Delivery,
    *,
    retries: int,
    progress: bool,
    num_workers: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    rank: int = 0,
) -> LoadReport:
    """Read every item and deliver it. A file that holds none of them is not opened.

    Args:
        location: of the checkpoint.
        reads: the items of the plan.
        places: Metadata.storage_data.
        delivery: takes the items, in the order in which they lie in the files.
        retries: how often a read is tried again after an error that may pass.
        progress: draw a line on stderr.
        num_workers: threads that read a local disk, or processes that read a store, at most; None:
            as many as pay.
        timeout_s: the longest to wait for one read, where threads read.
        rank: of this process, for the report.

    Raises:
        IncompleteCheckpointError, CorruptCheckpointError, StorageError: see `ShardFile.read`.
        Exception: see `Delivery.deliver`.

    Not thread-safe: the planner is not.
    """
    began_s = time.monotonic()
    # Of a store `num_workers` means processes, and each has many requests on their way.
    lane = lane_for(location.fs, None if has_ranges(location.fs) else num_workers)
    with collector_paused():
        files = plan_reads(
            reads,
            places,
            delivery.entries,
            max_range_bytes=MAX_RANGE_BYTES if lane is None else lane.max_range_bytes,
            alone_bytes=None if lane is None else lane.place_bytes,
        )
    total_bytes = sum(span.stop - span.start for spans in files.values() for span in spans)
    num_processes = 0
    line = ProgressLine("loading", total_bytes, progress)
    try:
        if lane is None or not files:
            _fetch_in_turn(location, files, delivery, line, retries)
        else:
            lane = lane.with_crew(num_workers, total_bytes)
            num_processes = lane.num_processes
            with Ahead(location, lane, delivery, retries=retries, timeout_s=timeout_s) as ahead:
                for arrived in ahead.read(files):
                    _deliver(arrived, delivery)
                    line.advance(arrived.span.stop - arrived.span.start)
    finally:
        line.close()
    return LoadReport(
        checkpoint_id=location.display,
        rank=rank,
        items=delivery.num_items,
        unverified=delivery.num_unverified,
        nbytes=total_bytes,
        files=len(files),
        num_workers=num_processes,
        read_s=time.monotonic() - began_s,
    )


def _fetch_in_turn(
    location: Location,
    files: Mapping[str, Sequence[ByteRange]],
    delivery: Delivery,
    line: ProgressLine,
    retries: int,
) -> None:
    """One range after the other; what is held is one, or one item where that is larger."""
    buffer = Buffer()
    for name, spans in files.items():
        with ShardFile(location, name, buffer, retries=retries) as shard:
            for span in spans:
                _deliver(Arrived(shard.display, span, shard.read(span), None, None), delivery)
                line.advance(span.stop - span.start)


def _deliver(arrived: Arrived, delivery: Delivery) -> None:
    display, span, view, prepared, place = arrived
    if place is not None:
        delivery.finish(span.items[0], place, display)
        return
    assert view is not None
    with collector_paused():
        for item in span.items:
            begin = item.offset - span.start
            delivery.deliver(item, view[begin : begin + item.length], display, prepared)
