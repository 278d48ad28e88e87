"""Ranges of many files, read ahead by threads and handed over in order.

Runs in: trainer.

    main thread    |-- begin reads while there is room --|-- wait for the oldest --|-- deliver --|
    threads        read, check what is large: system calls and checksums, without the GIL

What is read ahead is bounded by bytes; one range is always let in. Planners are asked by the main
thread alone.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, NamedTuple

from mpwriter._fetch_decode import Delivery, Prepared
from mpwriter._fetch_file import Buffer, cut_off, missing, retried, timed_out
from mpwriter._fetch_place import MIN_PLACE_BYTES, Place
from mpwriter._fetch_plan import ByteRange
from mpwriter._fetch_source import Lane, Source
from mpwriter._storage import Location

__all__ = ["Ahead", "Arrived"]

# In buffers and landings, beside what goes straight into targets. Source: 10 requests of 8 MiB for
# a store that answers all at once, and as much again that waits for the planner.
_MAX_AHEAD_BYTES = 160 * 2**20

# At the end of a load that failed: for reads that are under way, whose memory is the user's.
_LEAVE_WITHIN_S = 60.0


class Arrived(NamedTuple):
    """One range that has been read.

    Attributes:
        view: its bytes, good until the next range is asked for; None where they are in place.
        prepared: of its one item, see Delivery.prepare.
        place: of its one item.
    """

    display: str
    span: ByteRange
    view: memoryview | None
    prepared: Prepared | None
    place: Place | None


class _Reading(NamedTuple):
    name: str
    display: str
    span: ByteRange
    source: Source
    buffer: Buffer | None
    view: memoryview | None
    place: Place | None
    parts: list[Future[Any]]
    nbytes: int  # of memory beside the target's


class _Wanted(NamedTuple):
    """A range to be read, and the place of its one item, where that can be read in place."""

    name: str
    span: ByteRange
    place: Place | None

    @property
    def nbytes(self) -> int:
        """Of memory beside the target's."""
        if self.place is not None and not self.place.needs_landing:
            return 0
        return self.span.stop - self.span.start


class Ahead:
    """Reads the ranges of one load. Use as a context manager: its threads end with it.

    Args:
        location: of the checkpoint.
        lane: how its files are read.
        delivery: says what can be read in place, and checks large items.
        retries: how often a read is tried again after an error that may pass.
        timeout_s: the longest to wait for one read.
    """

    def __init__(
        self, location: Location, lane: Lane, delivery: Delivery, *, retries: int, timeout_s: float
    ) -> None:
        self._location = location
        self._lane = lane
        self._delivery = delivery
        self._retries = retries
        self._timeout_s = timeout_s
        self._buffers: list[Buffer] = []
        self._sources: dict[str, Source] = {}
        self._readings: deque[_Reading] = deque()
        self._ahead_bytes = 0
        self._threads = _Threads(lane.num_threads)

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._lane.close()
        if not self._threads.close(min(self._timeout_s, _LEAVE_WITHIN_S)):
            return  # a descriptor that a thread is stuck in must not become another file's
        for source in self._sources.values():
            source.close()
        for reading in self._readings:
            if reading.place is not None:
                reading.place.release()

    def read(self, files: Mapping[str, Sequence[ByteRange]]) -> Iterator[Arrived]:
        """Read every range, in order.

        Raises:
            IncompleteCheckpointError, CorruptCheckpointError, StorageError: as `ShardFile.read`.
        """
        pending = (self._wanted(name, span) for name, spans in files.items() for span in spans)
        left = {name: len(spans) for name, spans in files.items()}
        following = next(pending, None)
        while following is not None or self._readings:
            while following is not None and self._has_room(following):
                self._begin(following)
                following = next(pending, None)
            reading = self._readings[0]
            yield self._arrived(reading)
            self._readings.popleft()
            self._recycle(reading)
            left[reading.name] -= 1
            if not left[reading.name]:
                self._sources.pop(reading.name).close()

    def _wanted(self, name: str, span: ByteRange) -> _Wanted:
        alone = span.items[0] if len(span.items) == 1 else None
        if alone is None or alone.length < self._lane.place_bytes:
            return _Wanted(name, span, None)
        return _Wanted(name, span, self._delivery.place(name, alone))

    def _has_room(self, wanted: _Wanted) -> bool:
        if not self._readings:
            return True
        full = wanted.nbytes and self._ahead_bytes + wanted.nbytes > _MAX_AHEAD_BYTES
        return not full and len(self._readings) < 4 * self._lane.num_threads

    def _begin(self, wanted: _Wanted) -> None:
        name, span, place = wanted
        display = f"{self._location.display}/{name}"
        source = self._source(name, span, display)
        size = source.size_for(span.stop - span.start)
        if size is not None and size < span.stop:
            # Now: no memory is claimed for bytes that do not exist.
            raise cut_off(display, next(i for i in span.items if i.stop > size), size)
        if place is not None and place.open():
            reading = self._in_place(wanted, place, display, source)
        else:
            reading = self._in_buffer(name, span, display, source)
        self._ahead_bytes += reading.nbytes
        self._readings.append(reading)

    def _in_place(self, wanted: _Wanted, place: Place, display: str, source: Source) -> _Reading:
        """Begin to read a large payload straight into its target, or its landing."""
        name, span, _ = wanted
        calls = (
            [place_fill(place, source)]
            if self._lane.in_place
            else [part_of_place(source, *part) for part in place.ask(self._lane.part_bytes)]
        )
        parts = [self._threads.submit(self._retried(call, span, display, source)) for call in calls]
        return _Reading(name, display, span, source, None, None, place, parts, wanted.nbytes)

    def _in_buffer(self, name: str, span: ByteRange, display: str, source: Source) -> _Reading:
        nbytes = span.stop - span.start
        buffer = self._buffers.pop() if self._buffers else Buffer()
        view = buffer.room(span.start, nbytes)
        parts = [
            self._threads.submit(self._part(source, span, view, begin, display))
            for begin in range(0, nbytes or 1, self._lane.part_bytes)
        ]
        return _Reading(name, display, span, source, buffer, view, None, parts, nbytes)

    def _source(self, name: str, span: ByteRange, display: str) -> Source:
        if name not in self._sources:
            path = self._location.child(name)
            self._sources[name] = self._retried(lambda: self._lane.open(path), span, display)()
        return self._sources[name]

    def _part(
        self, source: Source, span: ByteRange, view: memoryview, begin: int, display: str
    ) -> Callable[[], Prepared | None]:
        """Read one part; the only part of a large item is also checked here, without the GIL."""
        piece = view[begin : begin + self._lane.part_bytes]
        fill = self._retried(
            lambda: source.read_into(span.start + begin, piece), span, display, source
        )

        def read() -> Prepared | None:
            count = fill()
            if count < len(piece):
                end = span.start + begin + count
                raise cut_off(display, next(i for i in span.items if i.stop > end), end)
            alone = len(piece) == len(view) and len(span.items) == 1
            if not alone or len(view) < MIN_PLACE_BYTES:
                return None
            return self._delivery.prepare(span.items[0], view, display)

        return read

    def _retried(
        self,
        operation: Callable[[], Any],
        span: ByteRange,
        display: str,
        source: Source | None = None,
    ) -> Callable[[], Any]:
        return lambda: retried(
            operation,
            path=display,
            fs=self._location.fs,
            retries=self._retries,
            missing=lambda: missing(display, span.items[0]),
            before_retry=None if source is None else source.renew,
        )

    def _arrived(self, reading: _Reading) -> Arrived:
        display, span = reading.display, reading.span
        try:
            found = [part.result(self._timeout_s) for part in reading.parts]
        except FutureTimeoutError as error:
            raise timed_out(display, span.items[0], self._timeout_s) from error
        if reading.place is None:
            return Arrived(display, span, reading.view, found[0], None)
        if all(found) and (self._lane.in_place or reading.place.holds()):
            return Arrived(display, span, None, None, reading.place)
        # Not what it should be: as a whole it tells what is wrong.
        view = Buffer().room(span.start, span.stop - span.start)
        for begin in range(0, len(view), self._lane.part_bytes):
            self._part(reading.source, span, view, begin, display)()
        return Arrived(display, span, view, None, None)

    def _recycle(self, reading: _Reading) -> None:
        self._ahead_bytes -= reading.nbytes
        if reading.place is not None:
            reading.place.release()
        if reading.buffer is not None:
            self._buffers.append(reading.buffer)


def place_fill(place: Place, source: Source) -> Callable[[], bool]:
    """Bound here: a loop's variable would be another one by the time a thread calls."""
    return lambda: place.fill(source.read_into)


def part_of_place(source: Source, offset: int, views: Sequence[memoryview]) -> Callable[[], bool]:
    """Reads one part of a large payload to where it belongs; False where the file is shorter."""
    return lambda: source.scatter(offset, views) == sum(map(len, views))


class _Threads:
    """A few daemon threads: one that a dead network filesystem holds does not hold the program."""

    def __init__(self, number: int) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"mpwriter-read-{n}", daemon=True)
            for n in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((call, future))
        return future

    def close(self, within_s: float) -> bool:
        """Begin no more calls, and wait for those that have begun; False: one is stuck."""
        self._closed = True
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(within_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        while (entry := self._calls.get()) is not None:
            call, future = entry
            if self._closed:
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del call, future, entry  # what they hold, a user's memory, is not theirs any more
