"""A torch.save-compatible container for one tensor, built around bytes that are only passed by.

Runs in: both. No torch.

The container is a zip of stored records, as torch.save writes it:

    data.pkl  byteorder  version  data/0           descriptor   directory   end
    |---------- prefix ---------||--- payload ---||------------ suffix ------------|

Everything but the payload's CRC-32 is known before the payload, so the file can be streamed: the
CRC goes into the data descriptor behind the payload and into the central directory. The payload
starts at a multiple of 64 in the file, wherever the container itself starts.

Left out of what torch.save writes, because no loader needs it: `.format_version`,
`.storage_alignment` and `.data/serialization_id`. Padding is an extra field, as torch pads.

Source: APPNOTE.TXT of the zip format, 4.3 to 4.5; caffe2/serialize/inline_container.cc of torch.
"""

from __future__ import annotations

import struct
import sys
from functools import lru_cache
from typing import NamedTuple

from mpwriter._checksum import crc32
from mpwriter._tensor_pickle import ELEMENT_BYTES, dump_tensor, num_elements
from mpwriter._types import MIN_DIRECT_BYTES, PAGE_BYTES

__all__ = ["ALIGNMENT_BYTES", "ELEMENT_BYTES", "Frame", "frame", "frame_layout"]

ALIGNMENT_BYTES = 64
"""Payloads start at a multiple of this in the file; torch's own default for storages."""

_ZIP64_LIMIT = 0xFFFFFFFF  # a 32-bit field that holds this says: look into the zip64 record

_LOCAL = struct.Struct("<4sHHHIIIIHH")
_CENTRAL = struct.Struct("<4sHHHHIIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_DESCRIPTOR_SIGNATURE = b"PK\x07\x08"

_UTF8_NAMES = 0x0800  # as torch's writer flags every record
_CRC_FOLLOWS = 0x0008
_VERSION, _VERSION_ZIP64 = 20, 45
_FIRST_DAY = 0x00210000  # 1980-01-01 00:00:00; the zeros of torch's writer are no date
_PADDING_ID = b"FB"

_ROOT = b"archive/"
_PAYLOAD_NAME = _ROOT + b"data/0"
_PAYLOAD_HEADER_BYTES = _LOCAL.size + len(_PAYLOAD_NAME)
_NUM_RECORDS = 4

_PICKLE_NAME = _ROOT + b"data.pkl"
_PICKLE_OFFSET = _LOCAL.size + len(_PICKLE_NAME)
_MARKS = ((_ROOT + b"byteorder", sys.byteorder.encode()), (_ROOT + b"version", b"3\n"))
_MARKS_BYTES = sum(_LOCAL.size + len(name) + len(content) for name, content in _MARKS)


class Frame:
    """What surrounds `payload_nbytes` bytes of payload in one container. Immutable.

    Attributes:
        prefix: the bytes in front of the payload.
        length: bytes of the whole container.
    """

    __slots__ = ("_after_crc", "_before_crc", "length", "prefix")

    def __init__(self, prefix: bytes, nbytes: int, before_crc: bytes, after_crc: bytes) -> None:
        self.prefix = prefix
        self._before_crc = before_crc
        self._after_crc = after_crc
        crc_twice = len(_DESCRIPTOR_SIGNATURE) + 4 + 4
        self.length = len(prefix) + nbytes + crc_twice + len(before_crc) + len(after_crc)

    def suffix(self, crc: int) -> bytes:
        """The bytes behind the payload, whose CRC-32 is `crc`."""
        packed = crc.to_bytes(4, "little")
        return b"".join((_DESCRIPTOR_SIGNATURE, packed, self._before_crc, packed, self._after_crc))


def frame(dtype: str, shape: tuple[int, ...], nbytes: int, position: int) -> Frame:
    """Frame one contiguous CPU tensor as torch.save would.

    Args:
        dtype: a key of ELEMENT_BYTES.
        shape: in elements.
        nbytes: of the payload; said by the caller, checked against dtype and shape.
        position: in bytes, where the container starts in its file.

    Raises:
        ValueError: the dtype has no container, or nbytes is not that of dtype and shape.

    Thread-safe. Frames are cached: a miss costs about 10 times a hit.
    """
    return _frame(dtype, shape, nbytes, position % _alignment(nbytes))


def _alignment(nbytes: int) -> int:
    return PAGE_BYTES if nbytes >= MIN_DIRECT_BYTES else ALIGNMENT_BYTES


def frame_layout(container: memoryview) -> tuple[int, int, int]:
    """Where a container made by `frame` has its pickle (start and end) and its payload (start).

    Only a guess for other bytes: whoever asks compares the result of `frame`.

    Raises:
        struct.error: the container is too short.
    """
    (pickle_bytes,) = struct.unpack_from("<I", container, 22)
    pickle_end = _PICKLE_OFFSET + pickle_bytes
    header_at = pickle_end + _MARKS_BYTES
    (extra_bytes,) = struct.unpack_from("<H", container, header_at + 28)
    return _PICKLE_OFFSET, pickle_end, header_at + _PAYLOAD_HEADER_BYTES + extra_bytes


@lru_cache(maxsize=4096)
def _frame(dtype: str, shape: tuple[int, ...], nbytes: int, phase: int) -> Frame:
    template = _template(dtype, shape, nbytes)
    alignment = _alignment(nbytes)
    padding_bytes = -(phase + len(template.records) + template.header_bytes) % alignment
    if 0 < padding_bytes < 4:  # an extra field is at least its own id and size
        padding_bytes += alignment
    prefix = template.records + _payload_header(nbytes, padding_bytes)
    directory_offset = len(prefix) + nbytes + len(_DESCRIPTOR_SIGNATURE) + 4 + template.sizes_bytes
    return Frame(
        prefix,
        nbytes,
        template.before_crc,
        template.after_crc + _end_records(directory_offset, template.directory_bytes),
    )


class _Template(NamedTuple):
    """The parts of a frame that do not depend on where the container starts.

    `records`: all before the payload's local header, which has `header_bytes` without padding.
    `before_crc`: from the descriptor's sizes (`sizes_bytes`) to the directory's CRC field.
    `after_crc`: the rest of the directory, which has `directory_bytes` in all.
    """

    records: bytes
    header_bytes: int
    sizes_bytes: int
    before_crc: bytes
    after_crc: bytes
    directory_bytes: int


@lru_cache(maxsize=4096)
def _template(dtype: str, shape: tuple[int, ...], nbytes: int) -> _Template:
    if dtype not in ELEMENT_BYTES:
        raise ValueError(f"no torch.save container for dtype {dtype!r}")
    expected = num_elements(shape) * ELEMENT_BYTES[dtype]
    if nbytes != expected or any(size < 0 for size in shape):
        raise ValueError(f"{dtype} of shape {shape} has {expected} bytes, not {nbytes}")
    records, directory = b"", b""
    for name, content in ((_PICKLE_NAME, dump_tensor(dtype, shape)), *_MARKS):
        record, entry = _small_record(name, content, len(records))
        records += record
        directory += entry
    sizes = struct.pack("<QQ" if nbytes >= _ZIP64_LIMIT else "<II", nbytes, nbytes)
    entry_before_crc, entry_after_crc = _payload_entry(nbytes, len(records))
    return _Template(
        records=records,
        header_bytes=_PAYLOAD_HEADER_BYTES + len(_zip64_sizes(nbytes)),
        sizes_bytes=len(sizes),
        before_crc=sizes + directory + entry_before_crc,
        after_crc=entry_after_crc,
        directory_bytes=len(directory) + len(entry_before_crc) + 4 + len(entry_after_crc),
    )


def _small_record(name: bytes, content: bytes, offset: int) -> tuple[bytes, bytes]:
    """A complete record at `offset` of the container, and its directory entry."""
    common = (_VERSION, _UTF8_NAMES, 0, _FIRST_DAY, crc32(content), len(content), len(content))
    local = _LOCAL.pack(b"PK\x03\x04", *common, len(name), 0)
    entry = _CENTRAL.pack(b"PK\x01\x02", _VERSION, *common, len(name), 0, 0, 0, 0, 0, offset)
    return local + name + content, entry + name


def _zip64_sizes(nbytes: int) -> bytes:
    """The extra field with the sizes that the 32-bit fields cannot hold, or nothing."""
    return struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if nbytes >= _ZIP64_LIMIT else b""


def _payload_header(nbytes: int, padding_bytes: int) -> bytes:
    extra = _zip64_sizes(nbytes)
    # With bit 3 set the sizes are zero here, or in zip64 the limit, which makes the descriptor's
    # sizes 8 bytes wide (APPNOTE 4.3.9.2).
    version, shown = (_VERSION_ZIP64, _ZIP64_LIMIT) if extra else (_VERSION, 0)
    if padding_bytes:
        filler_bytes = padding_bytes - 4
        extra += _PADDING_ID + filler_bytes.to_bytes(2, "little") + bytes(filler_bytes)
    flags = _UTF8_NAMES | _CRC_FOLLOWS
    common = (version, flags, 0, _FIRST_DAY, 0, shown, shown)
    header = _LOCAL.pack(b"PK\x03\x04", *common, len(_PAYLOAD_NAME), len(extra))
    return header + _PAYLOAD_NAME + extra


def _payload_entry(nbytes: int, offset: int) -> tuple[bytes, bytes]:
    """The payload's directory entry: before and behind its CRC field."""
    extra = _zip64_sizes(nbytes)
    version = _VERSION_ZIP64 if extra else _VERSION
    shown = min(nbytes, _ZIP64_LIMIT)
    flags = _UTF8_NAMES | _CRC_FOLLOWS
    common = (version, version, flags, 0, _FIRST_DAY, 0, shown, shown)
    lengths = (len(_PAYLOAD_NAME), len(extra), 0, 0, 0, 0, offset)
    entry = _CENTRAL.pack(b"PK\x01\x02", *common, *lengths) + _PAYLOAD_NAME + extra
    return entry[:16], entry[20:]


def _end_records(directory_offset: int, directory_bytes: int) -> bytes:
    """What ends a container whose directory lies at `directory_offset`."""
    counts = (_NUM_RECORDS, _NUM_RECORDS)
    shown = min(directory_offset, _ZIP64_LIMIT)
    end = _END.pack(b"PK\x05\x06", 0, 0, *counts, directory_bytes, shown, 0)
    if directory_offset < _ZIP64_LIMIT:
        return end
    versions = (_VERSION_ZIP64, _VERSION_ZIP64)
    end64 = _END64.pack(
        b"PK\x06\x06", _END64.size - 12, *versions, 0, 0, *counts, directory_bytes, directory_offset
    )
    locator = _LOCATOR64.pack(b"PK\x06\x07", 0, directory_offset + directory_bytes, 1)
    return end64 + locator + end
