"""All stored items of one load plan, from their files to the planner.

Runs in: trainer.

    _fetch_plan    which ranges of which files
    _fetch_file    bytes of one range: the part that reading ahead, in parallel, will replace
    _fetch_decode  from bytes to tensors, checked, into their targets

One range after the other; what is held is one range, or one item where that is larger.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem

from mpwriter._fetch_decode import Delivery
from mpwriter._fetch_file import Buffer, ShardFile
from mpwriter._fetch_plan import ByteRange, plan_reads
from mpwriter._report import ProgressLine
from mpwriter._storage import Location

__all__ = ["fetch"]

_logger = logging.getLogger(__name__)
_GIB = 1 << 30


def fetch(
    location: Location,
    reads: Iterable[ReadItem],
    places: Mapping[MetadataIndex, Any],
    delivery: Delivery,
    *,
    retries: int,
    progress: bool,
) -> None:
    """Read every item and deliver it. A file that holds none of them is not opened.

    Args:
        location: of the checkpoint.
        reads: the items of the plan.
        places: Metadata.storage_data.
        delivery: takes the items, in the order in which they lie in the files.
        retries: how often a read is tried again after an error that may pass.
        progress: draw a line on stderr.

    Raises:
        IncompleteCheckpointError, CorruptCheckpointError, StorageError: see `ShardFile.read`.
        Exception: see `Delivery.deliver`.

    Not thread-safe: the planner is not.
    """
    began_s = time.monotonic()
    files = plan_reads(reads, places)
    total_bytes = sum(span.stop - span.start for spans in files.values() for span in spans)
    line = ProgressLine("loading", total_bytes, progress)
    buffer = Buffer()
    try:
        for name, spans in files.items():
            with ShardFile(location, name, buffer, retries=retries) as shard:
                for span in spans:
                    _fetch_range(shard, span, delivery)
                    line.advance(span.stop - span.start)
    finally:
        line.close()
    _log(location, delivery, len(files), total_bytes, time.monotonic() - began_s)


def _fetch_range(shard: ShardFile, span: ByteRange, delivery: Delivery) -> None:
    view = shard.read(span)
    for item in span.items:
        begin = item.offset - span.start
        delivery.deliver(item, view[begin : begin + item.length], shard.display)


def _log(
    location: Location, delivery: Delivery, num_files: int, nbytes: int, elapsed_s: float
) -> None:
    rate = nbytes / _GIB / elapsed_s if elapsed_s > 0 else 0.0
    _logger.info(
        "read %d items, %d bytes of %d files in %.3f s (%.2f GiB/s) from %s",
        delivery.num_items, nbytes, num_files, elapsed_s, rate, location.display,
    )  # fmt: skip
    if delivery.num_unverified:
        _logger.info(
            "%d of these items are unverified: their files hold no CRC", delivery.num_unverified
        )
