"""Reads every stored byte of a checkpoint and compares it with its checksum.

Runs in: trainer, in threads where the filesystem lets several read.

Nothing of it is held: payloads are read piece by piece. What cannot be checked, because its file
has no checksums (safetensors, stock with CRCs switched off, raw bytes, transformed streams), is
read and counted as unverified.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mpwriter._checksum import crc32
from mpwriter._container import frame
from mpwriter._decode import ContainerError, decode
from mpwriter._faults import error_record
from mpwriter._fetch_plan import SAFETENSORS_SUFFIX, StoredItem, payload_of
from mpwriter._fetch_source import Lane, lane_for
from mpwriter._inspect import Checkpoint, StoredPart, inspect_checkpoint
from mpwriter._storage import Location
from mpwriter._zipread import Record, read_records

__all__ = ["Finding", "VerifyReport", "verify_checkpoint"]

_PIECE_BYTES = 2**19  # as in mpwriter._fetch_place
_PIECE_BYTES_REMOTE = 8 * 2**20
# A container up to here is read at once; of a larger one, this much of both ends.
_WHOLE_BYTES = 4 * 2**20
_END_BYTES = 64 * 2**10

_ZIP_BEGIN, _ZIP_END = b"PK\x03\x04", b"PK\x05\x06"


class Finding(NamedTuple):
    """What is wrong with one item or file; `key` is "" for a file."""

    file: str
    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}: {self.key}: {self.text}" if self.key else f"{self.file}: {self.text}"


@dataclass(frozen=True)
class VerifyReport:
    """What `verify_checkpoint` found.

    Attributes:
        checkpoint: as `inspect_checkpoint` gives it.
        num_verified, num_unverified: items whose checksum was right; that have none.
        nbytes: read.
        damage: everything that is wrong, missing files included.
    """

    checkpoint: Checkpoint
    num_verified: int
    num_unverified: int
    nbytes: int
    damage: tuple[Finding, ...]

    @property
    def is_sound(self) -> bool:
        return not self.damage


def verify_checkpoint(
    url: str | os.PathLike[str],
    *,
    num_workers: int | None = None,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
    **storage_options: Any,
) -> VerifyReport:
    """Read all of a checkpoint and compare checksums.

    Args:
        url: its directory, any fsspec URL; ours or stock's.
        num_workers: reads at the same time; None: as FsspecReader.
        on_bytes: called, in this thread, with bytes read so far and in all.
        **storage_options: for the filesystem.

    Raises:
        As `inspect_checkpoint`: where nothing can be said about the checkpoint at all.
    """
    checkpoint = inspect_checkpoint(url, **storage_options)
    damage = [_finding(problem) for problem in checkpoint.problems]
    missing = {file.name for file in checkpoint.files if file.nbytes is None}
    by_file: dict[str, dict[tuple[int, int], tuple[str, StoredPart]]] = {}
    for key in checkpoint.keys:
        for part in key.parts:
            if part.file not in missing:  # tied tensors share one place
                spots = by_file.setdefault(part.file, {})
                spots.setdefault((part.start, part.nbytes), (key.key, part))
    files = {name: sorted(spots.values(), key=_start) for name, spots in by_file.items()}
    total = sum(part.nbytes for items in files.values() for _, part in items)
    done = verified = unverified = 0
    for result in _checked(checkpoint.location, files, num_workers):
        done += result.nbytes
        on_bytes(done, total)
        if result.finding is not None:
            damage.append(result.finding)
        elif result.is_verified:
            verified += 1
        else:
            unverified += 1
    return VerifyReport(checkpoint, verified, unverified, done, tuple(dict.fromkeys(damage)))


def _finding(problem: str) -> Finding:
    name, _, text = problem.partition(": ")
    return Finding(name, "", text) if text else Finding(problem, "", "the checkpoint is incomplete")


def _start(item: tuple[str, StoredPart]) -> int:
    return item[1].start


class _Result(NamedTuple):
    nbytes: int
    is_verified: bool
    finding: Finding | None


def _checked(
    location: Location,
    files: dict[str, list[tuple[str, StoredPart]]],
    num_workers: int | None,
) -> Iterator[_Result]:
    """The results of all items, from threads that take one file after the other."""
    lane = lane_for(location.fs, num_workers)
    pending: queue.SimpleQueue[str] = queue.SimpleQueue()
    # The longest first, so that none is left to the end.
    for name in sorted(files, key=lambda name: -sum(part.nbytes for _, part in files[name])):
        pending.put(name)
    results: queue.SimpleQueue[_Result | None] = queue.SimpleQueue()
    stopped = threading.Event()

    def work() -> None:
        try:
            while not stopped.is_set():
                name = pending.get_nowait()
                for result in _check_file(location, name, files[name], lane):
                    results.put(result)
                    if stopped.is_set():
                        return
        except queue.Empty:
            pass
        finally:
            results.put(None)

    number = max(1, min(len(files), 1 if lane is None else lane.num_threads))
    threads = [threading.Thread(target=work, daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        left = number
        while left:
            result = results.get()
            if result is None:
                left -= 1
            else:
                yield result
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


class _StreamSource:
    """A file object of a filesystem that one thread reads."""

    def __init__(self, fs: Any, path: str) -> None:
        self._file = fs.open(path, "rb")

    def read_into(self, offset: int, view: memoryview) -> int:
        self._file.seek(offset)
        filled = 0
        while filled < len(view):
            chunk = self._file.read(len(view) - filled)
            if not chunk:
                break
            view[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        return filled

    def close(self) -> None:
        self._file.close()


def _check_file(
    location: Location,
    name: str,
    items: Sequence[tuple[str, StoredPart]],
    lane: Lane | None,
) -> Iterator[_Result]:
    path = location.child(name)
    try:
        source: Any = _StreamSource(location.fs, path) if lane is None else lane.open(path)
    except Exception as error:
        text = f"cannot be read: {error_record(error, path, fs=location.fs).text}"
        yield _Result(0, False, Finding(name, "", text))
        return
    try:
        for key, part in items:
            try:
                is_verified = _check_item(source, name, part)
                yield _Result(part.nbytes, is_verified, None)
            except ContainerError as error:
                yield _Result(part.nbytes, False, Finding(name, key, f"damaged: {error}"))
            except Exception as error:
                text = f"cannot be read: {error_record(error, path, fs=location.fs).text}"
                yield _Result(0, False, Finding(name, key, text))
    finally:
        source.close()


def _check_item(source: Any, name: str, part: StoredPart) -> bool:
    """Whether the item has a checksum, which then is right.

    Raises:
        ContainerError: damaged, or cut off.
    """
    if part.descriptors or name.endswith(SAFETENSORS_SUFFIX):
        _crc_of(source, part.start, part.nbytes)
        return False
    if part.nbytes <= _WHOLE_BYTES:
        stored = _read(source, part.start, part.nbytes)
        if part.sizes == () and part.entry is not None and not _looks_like_zip(stored):
            return False  # a planner may store any bytes
        decoded = decode(stored, verify=True)
        return decoded.checked if decoded is not None else _has_crcs(stored)
    around = _frame_of(name, part)
    if around is not None:
        begin, nbytes, frame_ = around
        head = _read(source, part.start, begin - part.start)
        if head == frame_.prefix:
            crc = _crc_of(source, begin, nbytes)
            end = begin + nbytes
            if _read(source, end, part.start + part.nbytes - end) == frame_.suffix(crc):
                return True
    return _check_records(source, part)


def _looks_like_zip(stored: memoryview) -> bool:
    return bytes(stored[:4]) == _ZIP_BEGIN or bytes(stored[-22:-18]) == _ZIP_END


def _frame_of(name: str, part: StoredPart) -> tuple[int, int, Any] | None:
    """Where the payload of a container of ours lies, and what is around it."""
    chunks = [c for c in getattr(part.entry, "chunks", ()) if tuple(c.offsets) == part.offsets]
    if not chunks:
        return None
    item = StoredItem(part.start, part.nbytes, part.descriptors, [])
    payload = payload_of(name, item, part.entry, chunks[0])
    if payload is None:
        return None
    dtype = str(part.entry.properties.dtype).removeprefix("torch.")
    return (*payload, frame(dtype, part.sizes, payload[1], part.start))


def _check_records(source: Any, part: StoredPart) -> bool:
    """A large container of any kind: its two ends say where its records are."""
    try:
        with mmap.mmap(-1, part.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as ends:
            view = memoryview(ends)
            try:
                # What lies between stays a hole: only headers and the directory are looked at.
                _read_into(source, part.start, view[:_END_BYTES])
                _read_into(source, part.start + part.nbytes - _END_BYTES, view[-_END_BYTES:])
                records = read_records(view)
            finally:
                view.release()
    except ContainerError:
        # Damaged, or with headers in the middle: then all of it has to be held.
        return _check_whole(_read(source, part.start, part.nbytes))
    if not any(record.crc for record in records):
        _crc_of(source, part.start, part.nbytes)
        return False
    for record in records:
        _compare(record, _crc_of(source, part.start + record.start, record.nbytes))
    return True


def _check_whole(stored: memoryview) -> bool:
    decoded = decode(stored, verify=True)
    return decoded.checked if decoded is not None else _has_crcs(stored)


def _compare(record: Record, found: int) -> None:
    if record.stored and found != record.crc:
        raise ContainerError(
            f"expected CRC {record.crc:#010x} of {record.name!r}, found {found:#010x}"
        )


def _has_crcs(stored: memoryview) -> bool:
    """Of a container that only torch.load understands; the legacy format has none."""
    try:
        return any(record.crc for record in read_records(stored))
    except ContainerError:
        return False


def _read(source: Any, offset: int, nbytes: int) -> memoryview:
    found = memoryview(bytearray(nbytes))
    _read_into(source, offset, found)
    return found


def _read_into(source: Any, offset: int, view: memoryview) -> None:
    count = source.read_into(offset, view)
    if count < len(view):
        raise ContainerError(f"cut off: expected {len(view)} bytes at {offset}, found {count}")


def _crc_of(source: Any, offset: int, nbytes: int) -> int:
    """Of a range, held piece by piece."""
    size = _PIECE_BYTES if hasattr(source, "_fd") else _PIECE_BYTES_REMOTE
    buffer, crc = memoryview(bytearray(min(size, nbytes))), 0
    for at in _steps(nbytes, size):
        piece = buffer[: min(size, nbytes - at)]
        _read_into(source, offset + at, piece)
        crc = crc32(piece, crc)
    return crc


def _steps(nbytes: int, size: int) -> Iterable[int]:
    return range(0, nbytes, size)
