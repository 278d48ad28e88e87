"""Reads files in units, side by side, and checks what is in them.

Runs in: trainer. See `mpwriter._verify`.

    files --> units, in the order of files and offsets --> queue --> threads --> results
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from mpwriter._decode import ContainerError
from mpwriter._fetch_plan import SAFETENSORS_SUFFIX
from mpwriter._fetch_source import Lane, lane_for
from mpwriter._inspect import Finding, StoredPart
from mpwriter._storage import Location
from mpwriter._verify_files import OpenFiles
from mpwriter._verify_item import Window, check_large, check_small
from mpwriter._verify_safetensors import check_header
from mpwriter.errors import MPWriterError

__all__ = ["Item", "Result", "Unit", "check_units"]

# What is still in the cache when its checksum is taken, as in mpwriter._fetch_place; where each
# read is a request, what is worth one.
_PIECE_BYTES, _PIECE_BYTES_REMOTE = 2**19, 8 * 2**20
_UNIT_BYTES = 4 * 2**20
# Progress within a large item is told at these steps.
_STEP_BYTES = 64 * 2**20

Item = tuple[str, StoredPart]
"""A key, and where it is."""


class Unit(NamedTuple):
    """Items of one file that are read at once, or one that is read in pieces.

    Attributes:
        items: none: the file's own header.
    """

    file: str
    items: list[Item]

    @property
    def start(self) -> int:
        return self.items[0][1].start

    @property
    def stop(self) -> int:
        return max(part.stop for _, part in self.items)


class Result(NamedTuple):
    """What became of an item, or how many bytes of it were read so far."""

    nbytes: int
    num_verified: int = 0
    num_unverified: int = 0
    findings: tuple[Finding, ...] = ()


def check_units(
    location: Location,
    files: Mapping[str, Sequence[Item]],
    sizes: Mapping[str, int | None],
    num_workers: int | None,
) -> Iterator[Result]:
    """Check all items, in threads of this call.

    Args:
        location: of the checkpoint.
        files: by file, what it should hold, by offset; sizes: of these files.
        num_workers: threads at most; None: as many as pay.

    Yields:
        Results in any order. To stop before the last, close the generator: that waits for what
        each thread has begun.
    """
    lane = lane_for(location.fs, num_workers)
    units: queue.SimpleQueue[Unit] = queue.SimpleQueue()
    number = 0
    counts: dict[str, int] = {}
    for unit in _units(files):
        counts[unit.file] = counts.get(unit.file, 0) + 1
        units.put(unit)
        number += 1
    checker = _Checker(OpenFiles(location, lane, counts), lane, files, sizes)
    results: queue.SimpleQueue[Result | BaseException | None] = queue.SimpleQueue()
    stopped = threading.Event()

    def work() -> None:
        try:
            while not stopped.is_set():
                checker.check(units.get_nowait(), results.put)
        except queue.Empty:
            pass
        except BaseException as error:  # a fault of ours: it must not pass for a sound file
            results.put(error)
        finally:
            results.put(None)

    num_threads = max(1, min(number, 1 if lane is None else lane.num_threads))
    threads = [threading.Thread(target=work, name="mpwriter-verify") for _ in range(num_threads)]
    try:
        for thread in threads:
            thread.start()
        left = num_threads
        while left:
            result = results.get()
            if isinstance(result, BaseException):
                raise result
            if result is None:
                left -= 1
            else:
                yield result
    finally:
        stopped.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        checker.close()


def _units(files: Mapping[str, Sequence[Item]]) -> Iterator[Unit]:
    for name, items in files.items():
        if name.endswith(SAFETENSORS_SUFFIX):
            yield Unit(name, [])
        batch: list[Item] = []
        for item in items:
            part = item[1]
            start = batch[0][1].start if batch else part.start
            if batch and (part.stop - start > _UNIT_BYTES or _is_large(part)):
                yield Unit(name, batch)
                batch = []
            if _is_large(part):
                yield Unit(name, [item])
            else:
                batch.append(item)
        if batch:
            yield Unit(name, batch)


def _is_large(part: StoredPart) -> bool:
    return part.nbytes > _UNIT_BYTES


class _Checker:
    """Checks units. Thread-safe but for `close`."""

    def __init__(
        self,
        files: OpenFiles,
        lane: Lane | None,
        items: Mapping[str, Sequence[Item]],
        sizes: Mapping[str, int | None],
    ) -> None:
        self._files = files
        self._piece_bytes = _PIECE_BYTES if lane and lane.in_place else _PIECE_BYTES_REMOTE
        self._items = items
        self._sizes = sizes

    def check(self, unit: Unit, put: Callable[[Result], None]) -> None:
        """Check one unit and put what became of it."""
        try:
            if not unit.items:
                put(self._check_header(unit.file))
            elif _is_large(unit.items[0][1]):
                self._check_large(unit.file, *unit.items[0], put)
            else:
                for result in self._check_small(unit):
                    put(result)
        except (ContainerError, MPWriterError) as error:
            # Of several items the first stands for what cannot be read.
            key = unit.items[0][0] if unit.items else ""
            total = sum(part.nbytes for _, part in unit.items)
            put(Result(total, findings=(Finding(unit.file, key, str(error)),)))
        finally:
            self._files.done_with(unit.file)

    def _check_header(self, name: str) -> Result:
        size = self._sizes[name]
        if size is None:
            return Result(0)
        wrong = check_header(self._reader(name), size, self._items[name])
        return Result(0, findings=tuple(Finding(name, key, text) for key, text in wrong))

    def _check_small(self, unit: Unit) -> Iterator[Result]:
        start = unit.start
        stored = memoryview(bytearray(unit.stop - start))
        self._reader(unit.file)(start, stored)
        for key, part in unit.items:
            try:
                checked = _is_checkable(part) and check_small(
                    part, stored[part.start - start : part.stop - start]
                )
                yield Result(part.nbytes, int(checked), int(not checked))
            except ContainerError as error:
                finding = Finding(unit.file, key, f"damaged: {error}")
                yield Result(part.nbytes, findings=(finding,))

    def _check_large(
        self, name: str, key: str, part: StoredPart, put: Callable[[Result], None]
    ) -> None:
        told = seen = 0

        def tell(nbytes: int) -> None:
            nonlocal told, seen
            seen += nbytes
            if seen - told >= _STEP_BYTES and seen < part.nbytes:
                put(Result(seen - told))
                told = seen

        window = Window(self._reader(name), part.start, part.nbytes, self._piece_bytes, tell)
        findings: tuple[Finding, ...] = ()
        checked = False
        try:
            if _is_checkable(part):
                checked = check_large(part, window)
            else:
                window.crc(0, part.nbytes)
        except (ContainerError, MPWriterError) as error:
            what = "damaged: " if isinstance(error, ContainerError) else ""
            findings = (Finding(name, key, f"{what}{error}"),)
        counts = (0, 0) if findings else (int(checked), int(not checked))
        put(Result(part.nbytes - told, *counts, findings))

    def _reader(self, name: str) -> Callable[[int, memoryview], None]:
        return lambda offset, view: self._files.read_into(name, offset, view)

    def close(self) -> None:
        self._files.close()


def _is_checkable(part: StoredPart) -> bool:
    return not part.descriptors and not part.file.endswith(SAFETENSORS_SUFFIX)
