"""Reading back one torch.save container: ours or stock's, without torch.

Runs in: both. No torch.

Three steps, each over bytes that the caller holds; nothing is copied but names and small records:

    read_records    the zip's own bookkeeping: every byte belongs to a record or the directory
    _verify         the CRC-32 of every record, the pickle's included
    _as_tensor      which tensor that is; None where torch.load has to say

torch.load itself checks no CRC. So a damaged file must not get past the second step, and None
is returned only behind it: what is handed on to torch.load is what was written.
"""

from __future__ import annotations

import struct
import sys
from typing import NamedTuple

from mpwriter._checksum import crc32
from mpwriter._container import frame, frame_layout
from mpwriter._tensor_pickle import ELEMENT_BYTES, num_elements
from mpwriter._tensor_unpickle import PickledTensor, load_tensor
from mpwriter._zipread import ContainerError, Record, read_records

__all__ = ["ContainerError", "DecodedTensor", "decode"]

# How torch.save without zip begins: the pickle of torch.serialization.MAGIC_NUMBER.
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."

_OPTIONAL_RECORDS = frozenset(
    {b"byteorder", b".format_version", b".storage_alignment", b".data/serialization_id"}
)


class DecodedTensor(NamedTuple):
    """One strided CPU tensor.

    `shape`, `stride` and `storage_offset` count elements of `dtype` (a torch dtype's name
    without "torch."). Every element lies inside `payload`, the bytes of the whole storage: a
    view of the caller's container. `checked` is False where no CRC was compared: the caller
    asked for that, or the file has none (torch.serialization.set_crc32_options(False)).
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    payload: memoryview
    checked: bool


def decode(container: memoryview, *, verify: bool) -> DecodedTensor | None:
    """Read the container of one plain strided CPU tensor (or Parameter).

    Args:
        container: exactly the bytes of one container. They may come from anywhere: time is linear
            in their number, and memory does not follow a number that they state.
        verify: compare the CRC-32 of every record.

    Returns:
        None where it is the container of something else (a subclass, sparse, conj bit, several
        storages, torch's legacy format): torch.load(weights_only=True) decides. With `verify`
        the CRCs of such a zip have been compared too; the legacy format has none.

    Raises:
        ContainerError: damaged or truncated.

    Thread-safe. Frees nothing: the payload is a view of `container`.
    """
    if bytes(container[: len(_LEGACY_MAGIC)]) == _LEGACY_MAGIC:
        return None
    if (ours := _decode_ours(container, verify)) is not None:
        return ours
    # Anything else, damage to one of ours included.
    records = read_records(container)
    checked = verify and _verify(container, records)
    return _as_tensor(container, records, checked)


def _decode_ours(container: memoryview, verify: bool) -> DecodedTensor | None:
    """Take a container that is, byte for byte, what `frame` makes; None for any other.

    A shortcut, several times as fast as the way round: it counts where tensors are small.
    """
    try:
        pickle_start, pickle_end, start = frame_layout(container)
    except struct.error:  # too short
        return None
    tensor = load_tensor(container[pickle_start:pickle_end])
    if tensor is None or not tensor.whole:
        return None
    dtype, shape, stride, storage_offset, _, nbytes, _ = tensor
    around = frame(dtype, shape, nbytes, -start)
    if around.length != len(container) or around.prefix != bytes(container[:start]):
        return None
    end = start + nbytes
    payload = container[start:end]
    crc = crc32(payload) if verify else int.from_bytes(container[end + 4 : end + 8], "little")
    if around.suffix(crc) != bytes(container[end:]):
        return None
    return DecodedTensor(dtype, shape, stride, storage_offset, payload, verify)


def _verify(container: memoryview, records: list[Record]) -> bool:
    """Compare every record's CRC; False where the file has none at all.

    One CRC of 0 among others is a CRC like any: damage cannot pass for a file without CRCs.
    """
    if not any(record.crc for record in records):
        return False
    for record in records:
        if not record.stored:  # its CRC is that of other bytes; torch compresses nothing
            continue
        found = crc32(container[record.start : record.start + record.nbytes])
        if found != record.crc:
            raise ContainerError(
                f"expected CRC {record.crc:#010x} of {record.name!r}, found {found:#010x}"
            )
    return True


def _as_tensor(container: memoryview, records: list[Record], checked: bool) -> DecodedTensor | None:
    """Which tensor the records hold; None where they hold something else."""
    root = records[0].name.partition(b"/")[0] + b"/" if records else b"/"
    contents: dict[bytes, memoryview] = {}
    for name, start, nbytes, _, stored in records:
        if not stored or not name.startswith(root):
            return None
        contents[name[len(root) :]] = container[start : start + nbytes]
    pickled = contents.pop(b"data.pkl", None)
    if pickled is None or contents.pop(b"version", None) is None:
        return None
    tensor = load_tensor(pickled)
    if tensor is None:
        return None
    payload = contents.pop(b"data/" + tensor.storage_key.encode(), None)
    # torch takes a file without this record as little-endian.
    if payload is None or contents.get(b"byteorder", b"little") != sys.byteorder.encode():
        return None
    if not contents.keys() <= _OPTIONAL_RECORDS:
        return None
    _check_sizes(tensor, len(payload))
    storage = payload[: tensor.storage_nbytes]
    return DecodedTensor(
        tensor.dtype, tensor.shape, tensor.stride, tensor.storage_offset, storage, checked
    )


def _check_sizes(tensor: PickledTensor, payload_bytes: int) -> None:
    """Hold the tensor against its storage, and the storage against its record."""
    element_bytes = ELEMENT_BYTES[tensor.dtype]
    # A storage may end in part of an element: torch pickles its size in whole elements.
    if not 0 <= payload_bytes - tensor.storage_nbytes < element_bytes:
        raise ContainerError(
            f"expected {tensor.storage_nbytes} bytes of storage, found {payload_bytes}"
        )
    # Also where a size is 0: torch multiplies from the left and may refuse.
    if num_elements(tuple(size or 1 for size in tensor.shape)) > sys.maxsize // element_bytes:
        raise ContainerError(f"expected a tensor that can be addressed, found {tensor.shape}")
    if 0 in tensor.shape:
        return
    spans = ((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
    needed_bytes = (tensor.storage_offset + sum(spans) + 1) * element_bytes
    if needed_bytes > tensor.storage_nbytes:
        raise ContainerError(
            f"expected {needed_bytes} bytes for shape {tensor.shape}, stride {tensor.stride}, "
            f"offset {tensor.storage_offset}; found {tensor.storage_nbytes}"
        )
