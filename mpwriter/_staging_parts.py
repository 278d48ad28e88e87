"""The parts that an item's bytes come in, and how each is copied into a slot.

Runs in: trainer.

    StagedPart   lies in the arena already: no copy
    BytesPart    a bytes item
    MemoryPart   a contiguous CPU tensor: by address, without the GIL
    FlatPart     a contiguous tensor on an accelerator: on its stream
    BlockPart    a tensor with strides: by torch, block after block
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mpwriter._streams import CopyStream
from mpwriter._types import Extent

__all__ = [
    "MIN_SLOT_BYTES",
    "BlockPart",
    "BytesPart",
    "FlatPart",
    "MemoryPart",
    "Part",
    "Slot",
    "StagedPart",
    "open_tensor",
]

# A slot holds at least a few elements of the largest item size.
MIN_SLOT_BYTES = 2048

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Slot:
    """A free range of a window: `tensor` (uint8), `buffer` and `address` are the same memory."""

    segment: int
    offset: int
    nbytes: int
    tensor: torch.Tensor
    buffer: memoryview
    address: int


class Part:
    """Bytes of an item that follow each other in memory or in a copy."""

    remaining: int
    stream: CopyStream | None = None

    def fits(self, room: int) -> int | None:
        """How many bytes to copy into `room` bytes; None for none (0 only for an empty item)."""
        if self.remaining == 0:
            return 0
        return min(self.remaining, room) if room > 0 else None

    def copy(self, slot: Slot, start: int, nbytes: int) -> None:
        raise NotImplementedError

    def held(self) -> Sequence[torch.Tensor]:
        return ()


class StagedPart(Part):
    """A tensor that lies in the arena already."""

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.remaining = extent.nbytes

    def take(self, room: int) -> tuple[int, int]:
        """The next range of the segment, at most `room` bytes: (offset, nbytes)."""
        nbytes = min(room, self.remaining)
        offset = self.extent.offset + self.extent.nbytes - self.remaining
        self.remaining -= nbytes
        return offset, nbytes


class BytesPart(Part):
    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._done = 0
        self.remaining = payload.nbytes

    def copy(self, slot: Slot, start: int, nbytes: int) -> None:
        slot.buffer[start : start + nbytes] = self._payload[self._done : self._done + nbytes]
        self._done += nbytes
        self.remaining -= nbytes


class MemoryPart(Part):
    """A contiguous CPU tensor: copied by address, without the GIL, one piece or many."""

    def __init__(self, tensor: torch.Tensor, nbytes: int) -> None:
        self._tensor = tensor
        self._address = tensor.data_ptr()
        self.remaining = nbytes

    def copy(self, slot: Slot, start: int, nbytes: int) -> None:
        if nbytes:
            ctypes.memmove(slot.address + start, self._address, nbytes)
        self._address += nbytes
        self.remaining -= nbytes


class FlatPart(Part):
    """A contiguous tensor on an accelerator, as bytes."""

    def __init__(self, tensor: torch.Tensor, stream: CopyStream) -> None:
        self._flat = tensor.reshape(-1).view(torch.uint8)
        self._done = 0
        self.stream = stream
        self.remaining = self._flat.numel()

    def copy(self, slot: Slot, start: int, nbytes: int) -> None:
        assert self.stream is not None
        source = self._flat[self._done : self._done + nbytes]
        self.stream.copy(slot.tensor[start : start + nbytes], source)
        self._done += nbytes
        self.remaining -= nbytes

    def held(self) -> Sequence[torch.Tensor]:
        return (self._flat,)


class BlockPart(Part):
    """Part of a tensor with strides: copied whole by torch, which puts it in row-major order."""

    def __init__(self, block: torch.Tensor, stream: CopyStream | None) -> None:
        self._block = block
        self.stream = stream
        self.remaining = block.nbytes

    def split(self, limit_bytes: int) -> Iterator[BlockPart]:
        return (BlockPart(block, self.stream) for block in blocks_of(self._block, limit_bytes))

    def fits(self, room: int) -> int | None:
        return self.remaining if self.remaining <= room else None

    def copy(self, slot: Slot, start: int, nbytes: int) -> None:
        target = slot.tensor[start : start + nbytes].view(self._block.dtype)
        target = target.view(self._block.shape)
        if self.stream is None:
            target.copy_(self._block)
        else:
            self.stream.copy(target, self._block)
        self.remaining = 0

    def held(self) -> Sequence[torch.Tensor]:
        return (self._block,)


def blocks_of(tensor: torch.Tensor, limit_bytes: int) -> Iterator[torch.Tensor]:
    """Cut a tensor into blocks of at most `limit_bytes` that follow each other in row-major order.

    Copying block by block needs no contiguous copy of the whole tensor.
    """
    if tensor.nbytes <= limit_bytes or tensor.dim() == 0:
        yield tensor
        return
    row_bytes = tensor.nbytes // tensor.shape[0]
    if row_bytes > limit_bytes:
        for row in tensor:
            yield from blocks_of(row, limit_bytes)
        return
    num_rows = limit_bytes // row_bytes
    for start in range(0, tensor.shape[0], num_rows):
        yield tensor[start : start + num_rows]


def open_tensor(tensor: torch.Tensor, stream: CopyStream | None, nbytes: int) -> Part:
    """The part for a plain tensor; `stream` is that of its device, None for the CPU."""
    flipped = tensor.is_conj() or tensor.is_neg()
    if tensor.is_contiguous() and not flipped:
        return MemoryPart(tensor, nbytes) if stream is None else FlatPart(tensor, stream)
    if not flipped and not tensor.is_complex():
        # Copying is not implemented for every dtype; moving integers of that size is.
        tensor = tensor.view(_INTEGER_OF_SIZE[tensor.itemsize])
    return BlockPart(tensor, stream)
