"""The header of a safetensors file, held against the file's length and against the metadata.

Runs in: trainer. Thread-safe.

There is no checksum in the format. What can be told: whether the header can be read, whether its
tensors fill the file without gap or overlap, and whether they are those that the metadata names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

from mpwriter._inspect import StoredPart
from mpwriter._safetensors import SAFETENSORS_DTYPES
from mpwriter._tensor_pickle import ELEMENT_BYTES
from mpwriter._verify_item import ReadInto

__all__ = ["check_header"]

# Source: the safetensors package refuses to read a longer header.
_MAX_HEADER_BYTES = 100_000_000
_PAIRS = "F4"  # two elements a byte: torch counts pairs

_ELEMENT_BYTES = {name: ELEMENT_BYTES[dtype] for dtype, name in SAFETENSORS_DTYPES.items()}


def check_header(
    read_into: ReadInto, file_bytes: int, items: Iterable[tuple[str, StoredPart]]
) -> Iterator[tuple[str, str]]:
    """Check a file.

    Args:
        read_into: of the file; file_bytes: its size.
        items: key and place of what the metadata names in it.

    Yields:
        Key ("" for the file as a whole) and what is wrong.

    Raises:
        What `read_into` raises.
    """
    length = memoryview(bytearray(8))
    if file_bytes < len(length):
        yield "", f"expected a safetensors header, found {file_bytes} bytes"
        return
    read_into(0, length)
    header_bytes = int.from_bytes(length, "little")
    most = min(_MAX_HEADER_BYTES, file_bytes - len(length))
    if header_bytes > most:
        yield "", f"expected a header of {most} bytes at most, its length says {header_bytes}"
        return
    text = bytearray(header_bytes)
    read_into(len(length), memoryview(text))
    try:
        entries = _entries(json.loads(text.decode()))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        yield "", f"expected a safetensors header, found no such JSON: {type(error).__name__}"
        return
    begin = len(length) + header_bytes
    yield from _gaps(entries, file_bytes - begin)
    yield from _strangers({(begin + e[0], e[1] - e[0]): e for e in entries}, items)


_Entry = tuple[int, int, str, list[int], str]  # start, end, dtype, shape, key


def _entries(described: dict[str, Any]) -> list[_Entry]:
    found = []
    for key, entry in described.items():
        if key == "__metadata__":
            continue
        (start, end), dtype, shape = entry["data_offsets"], entry["dtype"], entry["shape"]
        if not all(type(number) is int and number >= 0 for number in (start, end, *shape)):
            raise ValueError(key)
        found.append((start, end, dtype, shape, key))
    return sorted(found)


def _gaps(entries: Iterable[_Entry], payload_bytes: int) -> Iterator[tuple[str, str]]:
    expected = 0
    for start, end, dtype, shape, key in entries:
        if start != expected or end < start:
            yield key, f"expected it at {expected} of the payload, its header says {start} to {end}"
        bits = math.prod(shape) * 8 * _ELEMENT_BYTES.get(dtype, 0) // (2 if dtype == _PAIRS else 1)
        if dtype not in _ELEMENT_BYTES or bits != 8 * (end - start):
            yield key, f"expected {bits // 8} bytes of {dtype} {shape}, found {end - start}"
        expected = max(end, expected)
    if expected != payload_bytes:
        yield "", f"expected {expected} bytes of payload, found {payload_bytes}"


def _strangers(
    places: dict[tuple[int, int], _Entry], items: Iterable[tuple[str, StoredPart]]
) -> Iterator[tuple[str, str]]:
    """What the metadata names and the header does not, or otherwise."""
    for key, part in items:
        entry = places.get((part.start, part.nbytes))
        if entry is None:
            if part.nbytes:  # several empty ones lie at one place
                yield key, f"expected {part.nbytes} bytes at {part.start}, not so in the header"
            continue
        if not part.nbytes or part.dtype is None:
            continue
        shape = list(part.sizes)
        dtype = SAFETENSORS_DTYPES.get(part.dtype)
        if dtype == _PAIRS:
            shape[-1] *= 2
        if (dtype, shape) != (entry[2], entry[3]):
            yield key, f"expected {dtype} {shape}, the header says {entry[2]} {entry[3]}"
