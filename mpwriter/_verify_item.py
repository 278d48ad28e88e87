"""One stored item, held against its checksums and against what the metadata says of it.

Runs in: trainer. Thread-safe.

    small     all of it is in memory: `mpwriter._decode`, as in a load
    large     directory first, then every record once, from front to back, in pieces
                  header | content, piece by piece into the CRC | descriptor | header | ...
              Headers and directory are put where they belong in a mapping as long as the container
              whose other pages are never touched, and are then read as those of a small one.
"""

from __future__ import annotations

import io
import itertools
import mmap
import struct
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

from mpwriter._checksum import crc32
from mpwriter._decode import ContainerError, decode
from mpwriter._inspect import StoredPart
from mpwriter._tensor_unpickle import load_tensor
from mpwriter._zipread import END_BYTES, Record, Span, directory_span, read_records, spans

__all__ = ["ReadInto", "Window", "check_large", "check_small"]

ReadInto = Callable[[int, memoryview], None]
"""Fills a buffer with the bytes at an offset of a file.

Raises ContainerError where the file ends before, MPWriterError where it cannot be read.
"""

_ZIP_BEGIN, _ZIP_END, _ZIP_END_BYTES = b"PK\x03\x04", b"PK\x05\x06", 22
_LOCAL_BYTES, _LOCAL_LENGTHS = 30, struct.Struct("<HH")
_DESCRIPTOR_BYTES = 24
_PICKLE_NAME = b"/data.pkl"
# The pickle of one tensor has a few hundred bytes; that of an object may be anything.
_MAX_TENSOR_PICKLE_BYTES = 64 * 2**10
# Of the container's length only what is touched counts, also where memory is not overcommitted.
# Source: mmap.MAP_NORESERVE, which Python knows from 3.11; its value on Linux.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class Window:
    """A range of a file, held piece by piece. For one thread, which goes forward.

    Args:
        read_into: of the file.
        start, nbytes: of the range in it; offsets count from there.
        piece_bytes: what is held.
        on_bytes: told of every piece that was read.
    """

    def __init__(
        self,
        read_into: ReadInto,
        start: int,
        nbytes: int,
        piece_bytes: int,
        on_bytes: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self.nbytes = nbytes
        self.piece_bytes = piece_bytes
        self._read_into = read_into
        self._start = start
        self._on_bytes = on_bytes
        self._piece = memoryview(bytearray(min(piece_bytes, nbytes)))
        self._at = self._end = 0

    def some(self, offset: int, nbytes: int) -> memoryview:
        """What is there of a range, at least 1 byte; good until the next call."""
        if not 0 <= offset < offset + nbytes <= self.nbytes:
            raise ContainerError(f"expected {nbytes} bytes at {offset}, found {self.nbytes} in all")
        if not self._at <= offset < self._end:
            count = min(len(self._piece), self.nbytes - offset)
            self._read_into(self._start + offset, self._piece[:count])
            self._at, self._end = offset, offset + count
            self._on_bytes(count)
        return self._piece[offset - self._at : min(offset + nbytes, self._end) - self._at]

    def copy(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes at `offset`."""
        filled = 0
        while filled < len(target):
            piece = self.some(offset + filled, len(target) - filled)
            target[filled : filled + len(piece)] = piece
            filled += len(piece)

    def crc(self, offset: int, nbytes: int) -> int:
        """CRC-32 of a range."""
        crc = done = 0
        while done < nbytes:
            piece = self.some(offset + done, min(self.piece_bytes, nbytes - done))
            crc = crc32(piece, crc)
            done += len(piece)
        return crc

    def peek(self, offset: int, nbytes: int) -> memoryview:
        """A range, without moving the window."""
        found = memoryview(bytearray(nbytes))
        self._read_into(self._start + offset, found)
        return found


def check_small(part: StoredPart, stored: memoryview) -> bool:
    """Check an item that is in memory.

    Returns:
        Whether it has checksums, which then are right.

    Raises:
        ContainerError: it is damaged, or not what the metadata says.
    """
    if part.is_object and not _looks_like_zip(stored[:4], stored[-_ZIP_END_BYTES:]):
        return False  # a planner may store any bytes
    try:
        decoded = decode(stored, verify=True)
    except ContainerError:
        if part.is_object and _is_sound_zip(io.BytesIO(stored)):
            return True
        raise
    if decoded is None:
        return _has_crcs(stored)
    _compare_kind(part, decoded.dtype, decoded.shape)
    return decoded.checked


def check_large(part: StoredPart, window: Window) -> bool:
    """Check an item of any length; what is held is a piece, and the directory.

    Args:
        part: the item.
        window: over it, from its first byte.

    Returns, Raises:
        As `check_small`, and what the window raises.
    """
    ends = window.peek(0, 4), window.peek(window.nbytes - _ZIP_END_BYTES, _ZIP_END_BYTES)
    if not _looks_like_zip(*ends) and (part.is_object or _is_legacy(ends[0])):
        window.crc(0, window.nbytes)  # to see whether it can be read
        return False
    try:
        records, crcs, pickled = _walk(window)
        checked = _compare_crcs(records, crcs)
    except ContainerError:
        if part.is_object and _is_sound_zip(io.BufferedReader(_File(window))):
            return True
        raise
    tensor = load_tensor(pickled) if pickled is not None else None
    if tensor is not None:
        _compare_kind(part, tensor.dtype, tensor.shape)
    return checked


def _walk(window: Window) -> tuple[list[Record], list[int], bytes | None]:
    """Every record of a container, the CRC of its content, and the pickle if it is short."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    with mmap.mmap(-1, window.nbytes, flags=flags) as mapping, memoryview(mapping) as skeleton:
        found = _copy_directory(window, skeleton)
        crcs, pickled = [], None
        for span, limit in zip(found, _limits(window, skeleton, found), strict=True):
            start = _copy_header(window, skeleton, span, limit)
            if span.name.endswith(_PICKLE_NAME) and span.nbytes <= _MAX_TENSOR_PICKLE_BYTES:
                content = bytearray(span.nbytes)
                window.copy(start, memoryview(content))
                crcs.append(crc32(content))
                pickled = bytes(content)
            else:
                crcs.append(window.crc(start, span.nbytes))
            descriptor = skeleton[max(start + span.nbytes, limit - _DESCRIPTOR_BYTES) : limit]
            window.copy(limit - len(descriptor), descriptor)
            del descriptor
        return read_records(skeleton), crcs, pickled


def _copy_directory(window: Window, skeleton: memoryview) -> list[Span]:
    tail = max(0, window.nbytes - END_BYTES)
    skeleton[tail:] = window.peek(tail, window.nbytes - tail)
    start, end = directory_span(skeleton)
    for at in range(start, end, window.piece_bytes):
        stop = min(end, at + window.piece_bytes)
        skeleton[at:stop] = window.peek(at, stop - at)
    return spans(skeleton)


def _limits(window: Window, skeleton: memoryview, found: Sequence[Span]) -> list[int]:
    """Where each record ends: the next begins there, or the directory.

    Raises:
        ContainerError: they are not in order. Then none is read: two could be the same bytes.
    """
    starts = [span.offset for span in found] + [directory_span(skeleton)[0]]
    if found and (starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts))):
        raise ContainerError(f"expected records one behind the other, found them at {starts[:9]}")
    return starts[1:]


def _copy_header(window: Window, skeleton: memoryview, span: Span, limit: int) -> int:
    """Copy a record's header; gives where the content begins."""
    end = span.offset + _LOCAL_BYTES
    if end > limit:
        raise ContainerError(f"expected record {span.name!r} at {span.offset}, found no room")
    window.copy(span.offset, skeleton[span.offset : end])
    start: int = end + sum(_LOCAL_LENGTHS.unpack_from(skeleton, end - _LOCAL_LENGTHS.size))
    if start + span.nbytes > limit:
        raise ContainerError(
            f"expected {span.nbytes} bytes in {span.name!r}, found {max(0, limit - start)}"
        )
    window.copy(end, skeleton[end:start])
    return start


def _compare_crcs(records: Sequence[Record], crcs: Sequence[int]) -> bool:
    if not any(record.crc for record in records):
        return False
    for record, found in zip(records, crcs, strict=True):
        if record.stored and record.crc != found:
            raise ContainerError(
                f"expected CRC {record.crc:#010x} of {record.name!r}, found {found:#010x}"
            )
    return True


def _compare_kind(part: StoredPart, dtype: str, shape: tuple[int, ...]) -> None:
    """A sound container may still be another one than the metadata means."""
    if part.dtype is not None and (dtype, shape) != (part.dtype, part.sizes):
        raise ContainerError(
            f"expected {part.dtype} {list(part.sizes)}, found {dtype} {list(shape)}"
        )


def _looks_like_zip(begin: memoryview, end: memoryview) -> bool:
    """Whether one end looks so: the other may be damaged."""
    return bytes(begin) == _ZIP_BEGIN or bytes(end[:4]) == _ZIP_END


def _is_legacy(begin: memoryview) -> bool:
    """How torch.save without zip begins."""
    return bytes(begin[:4]) == b"\x80\x02\x8a\n"


def _has_crcs(stored: memoryview) -> bool:
    """Of a container that only torch.load understands; the legacy format has none."""
    try:
        return any(record.crc for record in read_records(stored))
    except ContainerError:
        return False


def _is_sound_zip(stored: Any) -> bool:
    """A planner may store a zip that torch.save would not make: its content must be right.

    Of one that torch.save did make, zipfile passes over what is wrong in its end records.
    """
    try:
        with zipfile.ZipFile(stored) as archive:
            by_torch = any(name.endswith("/data.pkl") for name in archive.namelist())
            return not by_torch and archive.testzip() is None
    except Exception:
        return False


class _File(io.RawIOBase):
    """A window as a file."""

    def __init__(self, window: Window) -> None:
        super().__init__()
        self._window = window
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self._position, self._window.nbytes)[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self._window.nbytes - self._position)
        if count <= 0:
            return 0
        piece = self._window.some(self._position, count)
        memoryview(buffer)[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)
