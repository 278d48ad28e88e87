"""The bookkeeping of a zip of stored records, held against itself byte by byte.

Runs in: both. No torch. Imports nothing of the package.

Stricter than any zip reader has to be, as wide as what torch.save and mpwriter write: the records
lie back to back from the first byte to the directory, in the directory's order, and whatever the
format says twice has to agree. That finds every wrong offset and length, and no two records can
claim the same bytes (which would cost more time than the file has bytes).

Source: APPNOTE.TXT of the zip format, 4.3 to 4.5.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = [
    "END_BYTES",
    "ContainerError",
    "Record",
    "Span",
    "directory_span",
    "read_records",
    "spans",
]

_LOCAL = struct.Struct("<4s2xHH4xIIIHH")
_CENTRAL = struct.Struct("<4s4xHHIIIIHHHHHII")
_END = struct.Struct("<4sIHHIIH")
_END64 = struct.Struct("<4sQ4xQQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_DESCRIPTOR = struct.Struct("<4sIII")
_DESCRIPTOR64 = struct.Struct("<4sIQQ")

END_BYTES = _END64.size + _LOCATOR64.size + _END.size
"""What stands behind the directory has no more bytes."""

_CRC_FOLLOWS = 0x0008
_PLAIN_FLAGS = 0x0808  # the CRC follows the content; names are UTF-8
# Of the external attributes: torch's reader then takes a record for empty, whatever its size.
_DIRECTORY = 0x10
_LIMIT16, _LIMIT32 = 0xFFFF, 0xFFFFFFFF  # these values say: look into the zip64 record


class ContainerError(ValueError):
    """The container is damaged: the text says what was expected and what was found."""


class Record(NamedTuple):
    name: bytes
    start: int  # of the content, in the container
    nbytes: int
    crc: int
    stored: bool  # neither compressed nor encrypted


class Span(NamedTuple):
    """What the directory says of one record: where it begins, and the bytes of its content."""

    name: bytes
    offset: int
    nbytes: int


class _Entry(NamedTuple):
    """What the directory says of one record."""

    name: bytes
    flags: int
    method: int
    crc: int
    packed_bytes: int
    nbytes: int


def read_records(container: memoryview) -> list[Record]:
    """Read the directory against the records.

    The records lie back to back from the first byte to the directory, in the directory's order:
    so do torch's and ours. Holding the file to that finds every wrong offset and length, and no
    two records can claim the same bytes (which would cost more time than the file has bytes).
    """
    at, end, count = _find_directory(container)
    records: list[Record] = []
    names: set[bytes] = set()
    expected_offset, directory_offset = 0, at
    for index in range(count):
        entry, offset, at = _read_entry(container, at, end, index)
        if offset != expected_offset:
            raise ContainerError(f"expected record {index} at {expected_offset}, found {offset}")
        record, expected_offset = _read_record(container, entry, offset, directory_offset)
        if record.name in names:
            raise ContainerError(f"expected one record {record.name!r}, found two")
        names.add(record.name)
        records.append(record)
    if at != end:
        raise ContainerError(
            f"expected a directory of {count} records, found {end - at} bytes more"
        )
    if expected_offset != directory_offset:
        raise ContainerError(
            f"expected the records to end at {directory_offset}, found {expected_offset}"
        )
    return records


def directory_span(container: memoryview) -> tuple[int, int]:
    """Start and end of the directory. Looks at the last END_BYTES only.

    Raises:
        ContainerError: there is none.
    """
    start, end, _ = _find_directory(container)
    return start, end


def spans(container: memoryview) -> list[Span]:
    """The records by the directory alone. Looks at it and at what is behind it, at no record.

    Raises:
        ContainerError: the directory is damaged.
    """
    at, end, count = _find_directory(container)
    found = []
    for index in range(count):
        entry, offset, at = _read_entry(container, at, end, index)
        found.append(Span(entry.name, offset, entry.packed_bytes))
    return found


def _find_directory(container: memoryview) -> tuple[int, int, int]:
    """Start and end of the central directory, and how many entries it should have."""
    end_at = len(container) - _END.size
    if end_at < 0:
        raise ContainerError(f"expected {_END.size} bytes or more, found {len(container)}")
    signature, disks, count, total, nbytes, offset, comment_bytes = _END.unpack_from(
        container, end_at
    )
    if signature != b"PK\x05\x06":
        raise ContainerError(
            f"truncated, or no torch.save container: expected a zip end record at {end_at}, "
            f"found {signature!r}"
        )
    if disks or comment_bytes or count != total:
        raise ContainerError("expected one disk, no comment and equal counts in the end record")
    end = end_at
    locator_at = end_at - _LOCATOR64.size
    if locator_at >= _END64.size and bytes(container[locator_at : locator_at + 4]) == b"PK\x06\x07":
        shown = (count, nbytes, offset)
        end = locator_at - _END64.size
        count, nbytes, offset = _read_end64(container, end, locator_at)
        limits = (_LIMIT16, _LIMIT32, _LIMIT32)
        wide = (count, nbytes, offset)
        if any(s not in (w, limit) for s, w, limit in zip(shown, wide, limits, strict=True)):
            raise ContainerError(f"expected {wide} in the end record, found {shown}")
    if offset + nbytes != end:
        raise ContainerError(
            f"expected the directory to end at {end}, found {offset} + {nbytes} bytes"
        )
    return offset, end, count


def _read_end64(container: memoryview, end64_at: int, locator_at: int) -> tuple[int, int, int]:
    _, disk, offset64, num_disks = _LOCATOR64.unpack_from(container, locator_at)
    if disk or num_disks != 1 or offset64 != end64_at:
        raise ContainerError(f"expected a zip64 end record at {end64_at}, found {offset64}")
    signature, size, disks, count, total, nbytes, offset = _END64.unpack_from(container, end64_at)
    if signature != b"PK\x06\x06" or size != _END64.size - 12 or disks or count != total:
        raise ContainerError(f"expected a zip64 end record at {end64_at}, found {signature!r}")
    return count, nbytes, offset


def _read_entry(container: memoryview, at: int, end: int, index: int) -> tuple[_Entry, int, int]:
    """The directory's entry at `at`, the offset of its record, and where the next entry starts."""
    name_at = at + _CENTRAL.size
    if name_at > end:
        raise ContainerError(f"expected an entry for record {index}, found the directory's end")
    (
        signature, flags, method, _, crc, packed_bytes, nbytes,
        name_bytes, extra_bytes, comment_bytes, disk, _, attributes, offset,
    ) = _CENTRAL.unpack_from(container, at)  # fmt: skip
    extra_at = name_at + name_bytes
    next_at = extra_at + extra_bytes + comment_bytes
    if signature != b"PK\x01\x02" or disk or next_at > end:
        raise ContainerError(f"expected an entry for record {index} at {at}, found {signature!r}")
    if attributes & _DIRECTORY:
        raise ContainerError(f"expected a file as record {index}, found a directory")
    if _LIMIT32 in (nbytes, packed_bytes, offset):
        extra = container[extra_at : extra_at + extra_bytes]
        nbytes, packed_bytes, offset = _widen(extra, nbytes, packed_bytes, offset)
    if method == 0 and nbytes != packed_bytes:
        raise ContainerError(f"expected one size of record {index}, found {nbytes}, {packed_bytes}")
    name = bytes(container[name_at:extra_at])
    return _Entry(name, flags, method, crc, packed_bytes, nbytes), offset, next_at


def _widen(extra: memoryview, *shown: int) -> list[int]:
    """Replace each field that says so by its 8 bytes in the zip64 extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        at += 4
        if kind == 1 and at + nbytes <= len(extra):
            wide = iter(struct.unpack_from(f"<{nbytes // 8}Q", extra, at))
            return [next(wide, field) if field == _LIMIT32 else field for field in shown]
        at += nbytes
    raise ContainerError("expected a zip64 extra field, found none")


def _read_record(
    container: memoryview, entry: _Entry, offset: int, limit: int
) -> tuple[Record, int]:
    """The record at `offset`, held against its directory entry, and where the next one starts."""
    name, flags, method, crc, packed_bytes, nbytes = entry
    name_at = offset + _LOCAL.size
    if name_at > limit:
        raise ContainerError(f"expected record {name!r} at {offset}, found the directory")
    signature, *shown, shown_crc, shown_packed, shown_nbytes, name_bytes, extra_bytes = (
        _LOCAL.unpack_from(container, offset)
    )
    start = name_at + name_bytes + extra_bytes
    end = start + packed_bytes
    if signature != b"PK\x03\x04" or container[name_at : name_at + name_bytes] != name:
        raise ContainerError(f"expected record {name!r} at {offset}, found {signature!r}")
    if end > limit:
        raise ContainerError(f"expected {packed_bytes} bytes in {name!r}, found {limit - start}")
    if shown != [flags, method]:
        raise ContainerError(f"expected equal flags and method in both headers of {name!r}")
    if flags & _CRC_FOLLOWS:
        end += _descriptor_bytes(container, end, limit, entry)
    elif (
        shown_crc != crc
        or shown_packed not in (packed_bytes, _LIMIT32)
        or shown_nbytes not in (nbytes, _LIMIT32)
    ):
        raise ContainerError(f"expected equal CRC and sizes in both headers of {name!r}")
    stored = method == 0 and flags & ~_PLAIN_FLAGS == 0
    return Record(name, start, packed_bytes, crc, stored), end


def _descriptor_bytes(container: memoryview, at: int, limit: int, entry: _Entry) -> int:
    """Check the data descriptor at `at`; its sizes are 4 or 8 bytes wide."""
    expected = (b"PK\x07\x08", entry.crc, entry.packed_bytes, entry.nbytes)
    for descriptor in (_DESCRIPTOR, _DESCRIPTOR64):
        if at + descriptor.size <= limit and descriptor.unpack_from(container, at) == expected:
            return descriptor.size
    raise ContainerError(
        f"expected CRC {entry.crc:#010x} and {entry.nbytes} bytes behind {entry.name!r}, found "
        f"{bytes(container[at : min(at + _DESCRIPTOR64.size, limit)]).hex()}"
    )
