"""Messages and small records that cross between the trainer and its workers.

Runs in: both. Holds no torch types: a worker unpickles these without torch.

Trainer to worker, in the order of one job (one bucket, one file):

    MapSegment*  StartJob  Put*  EndJob      (or AbortJob at any point)

Worker to trainer:

    Ready   JobStarted   (Progress | Ack)*   JobDone | JobFailed | JobRefused

Of a load, where workers read ranges of files into shared memory:

    MapSegment  StartReads  ReadRange*  EndReads          to the worker
    JobStarted | JobRefused   (RangeRead | RangeFailed)*  from it, in any order

Tensors and bytes never travel in a message: `Put` and `ReadRange` name ranges of a shared-memory
segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Union

__all__ = [
    "MIN_DIRECT_BYTES",
    "PAGE_BYTES",
    "AbortJob",
    "Ack",
    "EndJob",
    "EndReads",
    "ErrorRecord",
    "Extent",
    "ItemSpec",
    "JobDone",
    "JobFailed",
    "JobRefused",
    "JobStarted",
    "MapSegment",
    "Message",
    "Progress",
    "Put",
    "RangeFailed",
    "RangeRead",
    "ReadRange",
    "Ready",
    "StartJob",
    "StartReads",
    "UnmapSegment",
]


# A payload of the first size or more begins at a multiple of the second, in shared memory and in
# the file, so that it can go to the disk past the page cache. 1 MiB: the padding is 0.2 % at most.
MIN_DIRECT_BYTES = 1 << 20
PAGE_BYTES = 4096


class Extent(NamedTuple):
    """A half-open byte range of one shared-memory segment."""

    segment: int
    offset: int
    nbytes: int


class ItemSpec(NamedTuple):
    """What one write item is, as far as the container must know.

    `dtype` is a torch dtype's name without the "torch." prefix; "" marks bytes that go into the
    file as they are (a DCP bytes item, or a tensor that was serialized in the trainer).
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    key: str = ""  # set only where the container stores names (safetensors)


@dataclass(frozen=True)
class MapSegment:
    """A segment's file descriptor travels beside this message (SCM_RIGHTS)."""

    segment: int
    nbytes: int
    writable: bool = False  # for loads: the worker reads files into it


@dataclass(frozen=True)
class UnmapSegment:
    segment: int


@dataclass(frozen=True)
class StartJob:
    """Open one file; `path` is as the filesystem names it.

    `filesystem` is a pickled fsspec filesystem and `extensions` a pickled sequence of
    StreamTransformExtension; a job that stays in the trainer has the objects themselves.
    """

    job: int
    filesystem: Any
    path: str
    token: str  # first letters of the save id; part of temporary names
    sync_files: bool
    cwd: str
    umask: int
    container: str  # "torch" or "safetensors"
    extensions: Any = None
    header: tuple[ItemSpec, ...] = ()  # safetensors: every item of the file, in file order
    offsets: tuple[tuple[int, ...], ...] = ()  # where each of them lies in its whole tensor
    sys_path: tuple[str, ...] = ()  # the trainer's, to import the filesystem's class from


@dataclass(frozen=True)
class Put:
    """The next pieces of a file: piece n is `sizes[n]` bytes at `offsets[n]` of the segment.

    `specs[n]` says which item begins with it, None that it goes on with the one before; an item
    without bytes has one piece of size 0. Three lists, not one of records: there is a piece a
    tensor, a record takes pickle 2 us, and 1,000 of them a message keep the trainer's garbage
    collector busy.
    """

    job: int
    sequence: int  # counts from 0 within a job; acknowledged in this order
    segment: int
    specs: list[ItemSpec | None]
    offsets: list[int]
    sizes: list[int]


@dataclass(frozen=True)
class EndJob:
    job: int


@dataclass(frozen=True)
class AbortJob:
    job: int


@dataclass(frozen=True)
class Ready:
    pid: int


@dataclass(frozen=True)
class JobStarted:
    job: int


@dataclass(frozen=True)
class Progress:
    """The file has taken bytes, though not yet all of a Put: the worker is slow, not stuck."""

    job: int


@dataclass(frozen=True)
class Ack:
    """The ranges of that Put (and of those before it) are no longer needed."""

    job: int
    sequence: int


@dataclass(frozen=True)
class JobDone:
    """The file is complete, durable if asked for, and under its final name.

    Item n of the file, in its order, lies at `offsets[n]` and is `lengths[n]` bytes long. Two lists
    of numbers, not one of tuples: 20,000 small objects more in the trainer are enough to set off a
    full collection of its garbage collector, a quarter of a second.
    """

    job: int
    offsets: list[int]
    lengths: list[int]
    nbytes: int
    write_s: float  # seconds inside the filesystem's write calls
    crc_s: float
    publish_s: float  # seconds from the last write to the final name
    cpu_s: float  # CPU seconds of the worker process for this job


@dataclass(frozen=True)
class ErrorRecord:
    """An exception as plain text: the original may not be picklable, or not importable."""

    type_name: str
    text: str
    errno: int | None
    path: str | None
    traceback: str
    transient: bool  # a further try may succeed
    absent: bool = False  # there is no such file


@dataclass(frozen=True)
class JobFailed:
    job: int
    error: ErrorRecord


@dataclass(frozen=True)
class JobRefused:
    """This worker cannot serve such a job at all (its filesystem cannot be imported there)."""

    job: int
    reason: str


@dataclass(frozen=True)
class StartReads:
    """The trainer will ask for ranges of files of this filesystem; fields as in `StartJob`."""

    job: int
    filesystem: bytes
    num_requests: int  # on their way at the same time
    cwd: str
    sys_path: tuple[str, ...]


@dataclass(frozen=True)
class ReadRange:
    """Read `nbytes` bytes at `start` of the file to `offset` of the segment."""

    job: int
    number: int
    path: str
    start: int
    segment: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class EndReads:
    job: int


@dataclass(frozen=True)
class RangeRead:
    job: int
    number: int
    nbytes: int  # fewer than asked for at the file's end only


@dataclass(frozen=True)
class RangeFailed:
    job: int
    number: int
    error: ErrorRecord


Message = Union[
    MapSegment,
    UnmapSegment,
    StartJob,
    Put,
    EndJob,
    AbortJob,
    StartReads,
    ReadRange,
    EndReads,
    Ready,
    JobStarted,
    Progress,
    Ack,
    JobDone,
    JobFailed,
    JobRefused,
    RangeRead,
    RangeFailed,
]
