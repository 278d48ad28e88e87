"""One job: the items of one bucket become one file.

Runs in: both. In a worker the payloads lie in mapped shared memory; where no worker can serve,
the trainer runs the same code on its own memory.

    StartJob -> FileJob(...)        a file that nobody sees yet
    Put      -> FileJob.put(...)    container bytes go out as they arrive
    EndJob   -> FileJob.finish()    the file is complete and gets its name
    any error, AbortJob -> FileJob.discard()
"""

from __future__ import annotations

import contextlib
import io
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpwriter._checksum import crc32
from mpwriter._container import Frame, frame
from mpwriter._safetensors import dcp_metadata, safetensors_header
from mpwriter._sink import Sink, open_sink
from mpwriter._types import ItemSpec, JobDone, Put, StartJob

__all__ = ["FileJob", "JobParts"]

# Small items are gathered up to this many bytes for one write call; payloads of this size and
# more go out straight from the mapped segment. 256 KiB: past it the call's own cost (about 5 us
# for a local file object) is under 5 % of the copy.
_GATHER_BYTES = 256 * 1024

_BUFFERS = Mapping[int, memoryview]


class _Output(io.RawIOBase):
    """What an extension writes into: counts, and leaves the file open when it is closed."""

    def __init__(self, write: Callable[[memoryview], None]) -> None:
        self._write = write

    def writable(self) -> bool:
        return True

    def write(self, payload: Any) -> int:
        view = memoryview(payload).cast("B")
        self._write(view)
        return len(view)


class FileJob:
    """Writes one file, item after item.

    Args:
        start: what to write where.
        parts: its filesystem and extensions, as objects.
        buffers: the mapped segments by number; read at every `put`.
        progressed: called whenever the file has taken bytes.

    Not thread-safe. Whoever made it calls `finish` or `discard`.
    """

    def __init__(
        self,
        start: StartJob,
        parts: JobParts,
        buffers: _BUFFERS,
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        self._start = start
        self._progressed = progressed
        self._buffers = buffers
        self._gathered = bytearray()
        self._offsets: list[int] = []
        self._lengths: list[int] = []
        self._item: ItemSpec | None = None
        self._remaining_bytes = 0
        self._item_start = 0
        self._frame: Frame | None = None
        self._crc = 0
        self._write_s = 0.0
        self._crc_s = 0.0
        self._cpu_at_start_s = time.process_time()
        self._extensions = parts.extensions
        self._transform: Any = None
        self._safetensors = start.container == "safetensors"
        self._sink: Sink = open_sink(
            parts.filesystem, start.path, token=start.token, sync_files=start.sync_files
        )
        self._sink.progressed = progressed
        if self._safetensors:
            self._write_safetensors_header(start)

    def put(self, put: Put) -> None:
        """Write the pieces of one message; afterwards their extents are free."""
        buffer = self._buffers[put.segment]
        for spec, offset, nbytes in zip(put.specs, put.offsets, put.sizes, strict=True):
            if spec is not None:
                self._begin_item(spec)
            self._payload(buffer[offset : offset + nbytes], nbytes)
            if self._remaining_bytes == 0:
                self._end_item()

    def finish(self) -> JobDone:
        """Publish the file.

        Raises:
            ValueError: an item is not complete: the trainer ended the job too early.
            Exception: whatever the filesystem raises; the caller then discards.
        """
        if self._item is not None:
            raise ValueError(f"{self._remaining_bytes} bytes of an item are missing")
        self._flush_gathered()
        begin_s = time.perf_counter()
        nbytes = self._sink.position
        self._sink.publish()
        return JobDone(
            job=self._start.job,
            offsets=self._offsets,
            lengths=self._lengths,
            nbytes=nbytes,
            write_s=self._write_s,
            crc_s=self._crc_s,
            publish_s=time.perf_counter() - begin_s,
            cpu_s=time.process_time() - self._cpu_at_start_s,
        )

    def discard(self) -> None:
        """Leave nothing under the final name. Never raises."""
        if self._transform is not None:
            # Its buffered tail would only go into a file that is thrown away.
            with contextlib.suppress(Exception):
                self._transform.close()
        self._sink.discard()

    # -- items ---------------------------------------------------------------------------

    def _begin_item(self, spec: ItemSpec) -> None:
        if self._item is not None:
            raise ValueError(f"{self._remaining_bytes} bytes of an item are missing")
        self._item = spec
        self._remaining_bytes = spec.nbytes
        self._crc = 0
        position = self._sink.position + len(self._gathered)
        if self._extensions:
            self._open_transform()
            position = 0  # a transformed stream has no place in the file
        if not self._safetensors:
            self._item_start = self._sink.position + len(self._gathered)
        if spec.dtype and not self._safetensors:
            self._frame = frame(spec.dtype, spec.shape, spec.nbytes, position)
            self._emit(self._frame.prefix)

    def _payload(self, view: memoryview, nbytes: int) -> None:
        if nbytes > self._remaining_bytes:
            raise ValueError(f"a piece of {nbytes} bytes where {self._remaining_bytes} are due")
        if self._frame is not None:
            begin_s = time.perf_counter()
            self._crc = crc32(view, self._crc)
            self._crc_s += time.perf_counter() - begin_s
        self._emit(view)
        self._remaining_bytes -= nbytes

    def _end_item(self) -> None:
        if self._frame is not None:
            self._emit(self._frame.suffix(self._crc))
            self._frame = None
        if self._transform is not None:
            self._transform.close()
            self._transform = None
        if not self._safetensors:
            end = self._sink.position + len(self._gathered)
            self._offsets.append(self._item_start)
            self._lengths.append(end - self._item_start)
        self._item = None

    def _write_safetensors_header(self, start: StartJob) -> None:
        keys = (spec.key for spec in start.header)
        metadata = dcp_metadata(dict(zip(keys, start.offsets, strict=True)))
        header, ranges = safetensors_header(start.header, metadata)
        self._offsets = [offset for offset, _ in ranges]
        self._lengths = [length for _, length in ranges]
        self._emit(header)

    # -- bytes ---------------------------------------------------------------------------

    def _emit(self, payload: bytes | memoryview) -> None:
        if self._transform is not None:
            self._transform.write(payload)
        else:
            self._emit_plain(payload)

    def _emit_plain(self, payload: bytes | memoryview) -> None:
        if len(payload) < _GATHER_BYTES:
            self._gathered += payload
            if len(self._gathered) >= _GATHER_BYTES:
                self._flush_gathered()
        else:
            self._flush_gathered()
            self._write(payload)

    def _flush_gathered(self) -> None:
        if self._gathered:
            # A new buffer each time: a file object may keep what it was given.
            gathered, self._gathered = self._gathered, bytearray()
            self._write(gathered)

    def _write(self, payload: bytes | bytearray | memoryview) -> None:
        begin_s = time.perf_counter()
        self._sink.write(payload)
        self._write_s += time.perf_counter() - begin_s
        self._progressed()

    def _open_transform(self) -> None:
        stream: Any = _Output(self._emit_plain)
        # The first in the list comes first to the bytes, so that a reader can undo them in the
        # order of the descriptors. Stock wraps them the other way round, and then neither it nor
        # anybody else can read what two of them have made of a file.
        for extension in reversed(self._extensions):
            stream = extension.transform_to(stream)
        self._transform = stream


@dataclass(frozen=True)
class JobParts:
    """What a job needs and what may be missing in this process."""

    filesystem: Any
    extensions: Sequence[Any]

    @classmethod
    def of(cls, start: StartJob) -> JobParts:
        """Unpickle them.

        Raises:
            Exception: a module is not to be had here, or a constructor refuses.
        """
        # Extensions are torch classes: the one case in which a worker imports torch.
        return cls(_unpickled(start.filesystem), _unpickled(start.extensions) or ())


def _unpickled(value: Any) -> Any:
    return pickle.loads(value) if isinstance(value, bytes) else value
