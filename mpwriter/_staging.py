"""The stream loader: write items become bytes in shared memory, a slot at a time.

Runs in: trainer.

    planner.resolve_data(item)      lazily, in file order
        |  plain strided tensor     its bytes, row-major, whatever its strides
        |  any other tensor         torch.save'd here, as the stock writer would
        |  bytes item               as it is
        v
    slot of the copy-ahead window   one contiguous range of a shared-memory segment
        |
    Batch: pieces + events          handed to a worker once every event has completed

An item larger than a slot goes in pieces; small ones share a slot. Nothing else holds a copy.
"""

from __future__ import annotations

import ctypes
import functools
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from mpwriter._container import ELEMENT_BYTES
from mpwriter._streams import CopyEvent, CopyStream, StreamFactory
from mpwriter._types import Extent, ItemSpec, Piece
from mpwriter.errors import StagingError

__all__ = ["MIN_SLOT_BYTES", "Batch", "ItemStream", "Slot", "TieTable", "is_plain", "tensor_spec"]

# Every item starts at a multiple of this in a slot: typed views need their item size (16 at
# most), SIMD checksums and copies like a cache line.
_ALIGNMENT_BYTES = 64

# Items per batch at most, so that the worker starts on the first thousand of many small ones.
_MAX_BATCH_PIECES = 1024

# Staged bytes of one message: the worker acknowledges, and so shows progress, this often.
_STAGED_BATCH_BYTES = 8 << 20

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


@dataclass
class Batch:
    """Pieces whose bytes lie in one segment, in file order; valid once every event completed."""

    segment: int
    slot: Slot | None  # None: the pieces lie where the tensors were staged
    pieces: list[Piece]
    events: list[CopyEvent] = field(default_factory=list)
    held: list[torch.Tensor] = field(default_factory=list)  # sources of copies under way

    def ready(self) -> bool:
        return all(event.query() for event in self.events)

    def wait(self) -> None:
        for event in self.events:
            event.synchronize()
        self.settle()

    def settle(self) -> None:
        """Let go of the sources; call when ready."""
        self.events.clear()
        self.held.clear()


class TieTable:
    """Finds values that are the same view of the same storage, so that they are written once.

    Remembers addresses and positions only: no tensor that a planner made for the occasion is kept
    alive. An address alone proves nothing, it may recur; where it is met again, the earlier item
    is resolved once more and both tensors, now alive together, are compared. One table serves one
    save of one rank.
    """

    def __init__(self) -> None:
        self._positions_at: dict[int, tuple[int, ...]] = {}
        self.owner_of: dict[int, int] = {}  # position of a tied item -> position of the written one

    def tied(
        self, tensor: torch.Tensor, position: int, resolve: Callable[[int], torch.Tensor]
    ) -> bool:
        """Whether `tensor` equals the view of an earlier position; if not, remember it."""
        address = tensor.data_ptr()
        earlier = self._positions_at.setdefault(address, (position,))
        if earlier[0] == position:
            return False
        for other in earlier:
            if other != position and _same_view(tensor, resolve(other)):
                self.owner_of[position] = other
                return True
        if position not in earlier:
            self._positions_at[address] = (*earlier, position)
        return False


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.device == other.device
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


def tensor_spec(dtype: torch.dtype, shape: Sequence[int], nbytes: int, key: str = "") -> ItemSpec:
    """The spec of a plain tensor."""
    return ItemSpec(_name(dtype), tuple(shape), nbytes, key)


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class ItemStream:
    """The items of one bucket, in file order, as batches.

    Args:
        items: every write item of this rank's plan.
        positions: which of them go into this file, in file order.
        planner: resolves an item when its turn comes.
        ties: shared by the files of a save; None where tied values are written twice.
        stream_for: see `_streams`.
        find: the extent of a tensor that lies in the arena already, as a staged one does.
        specs: safetensors only: what the file's header says, item by item.

    Not thread-safe. `restart()` begins again from the first item.
    """

    def __init__(
        self,
        items: Sequence[WriteItem],
        positions: Sequence[int],
        planner: SavePlanner,
        ties: TieTable | None,
        stream_for: StreamFactory,
        specs: Sequence[ItemSpec] = (),
        find: Callable[[torch.Tensor], Extent | None] = lambda tensor: None,
    ) -> None:
        self._items = items
        self._positions = positions
        self._planner = planner
        self._ties = ties
        self._stream_for = stream_for
        self._header = specs
        self._find = find
        self._spec_cache: dict[tuple[torch.dtype, torch.Size], ItemSpec] = {}
        self.restart()

    def restart(self) -> None:
        """Begin again from the first item: the file has failed and is written anew."""
        self._next = 0
        self._spec: ItemSpec | None = None
        self._parts: Iterator[_Part] = iter(())
        self._part: _Part | None = None
        self.written: list[int] = []  # positions that went into the file, in file order
        self.exhausted = False

    def needs_slot(self) -> bool:
        """Look at what comes next: whether `fill` needs a slot for it.

        False at the end of the bucket, too (`exhausted` is set), and where the bytes lie in the
        arena already.

        Raises:
            StagingError: an item cannot be resolved; names its key.
        """
        if self._part is None and not self._advance():
            self.exhausted = True
            return False
        return not isinstance(self._part, _StagedPart)

    def fill(self, slot: Slot | None) -> Batch | None:
        """Make the next batch: copy what fits into `slot`, or refer to what is staged already.

        Args:
            slot: free memory, needed where `needs_slot` said so.

        Returns:
            None when no item is left.

        Raises:
            StagingError: an item cannot be resolved or copied; names its key.
        """
        if not self.needs_slot():
            return None if self.exhausted else self._staged_batch()
        assert slot is not None
        batch = Batch(slot.segment, slot, [])
        streams: dict[int, CopyStream] = {}
        cursor = 0
        while len(batch.pieces) < _MAX_BATCH_PIECES:
            if self._part is None and not self._advance():
                break
            assert self._part is not None
            if isinstance(self._part, _StagedPart):
                break
            start = -(-cursor // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            taken = self._take(self._part, slot, start, batch, streams)
            if taken is None:
                break
            cursor = start + taken
        batch.events.extend(stream.record() for stream in streams.values())
        return batch

    def _staged_batch(self) -> Batch:
        assert isinstance(self._part, _StagedPart)
        batch = Batch(self._part.extent.segment, None, [])
        room = _STAGED_BATCH_BYTES
        while isinstance(self._part, _StagedPart) and self._part.extent.segment == batch.segment:
            offset, nbytes = self._part.take(room)
            batch.pieces.append(Piece(self._spec, offset, nbytes))
            self._spec = None
            room -= nbytes
            if self._part.remaining == 0:
                self._part = None
            if room <= 0 or len(batch.pieces) >= _MAX_BATCH_PIECES:
                break
            if self._part is None and not self._advance():
                break
        return batch

    # -- items ---------------------------------------------------------------------------

    def _advance(self) -> bool:
        """Make the next part current; False at the end of the bucket."""
        self._part = next(self._parts, None)
        while self._part is None:
            if self._next >= len(self._positions):
                return False
            position = self._positions[self._next]
            self._next += 1
            self._open(position)
        return True

    def _open(self, position: int) -> None:
        item = self._items[position]
        try:
            self._open_resolved(item, self._planner.resolve_data(item), position)
        except (MemoryError, StagingError):
            raise
        except Exception as exc:
            raise _staging_error(item, exc) from exc

    def _open_resolved(self, item: WriteItem, resolved: Any, position: int) -> None:
        if item.type == WriteItemType.BYTE_IO:
            self._open_bytes(_bytes_of(resolved), position)
            return
        if not isinstance(resolved, torch.Tensor):
            raise TypeError(f"the planner resolved a tensor item to {type(resolved).__name__}")
        tensor = resolved.detach()
        if not is_plain(tensor) or _name(tensor.dtype) not in ELEMENT_BYTES:
            if self._header:
                raise TypeError("safetensors holds plain strided tensors only")
            self._open_bytes(_serialized(tensor), position)
            return
        check_memory(tensor)
        spec = self._spec_of(tensor, item)
        if (
            self._ties is not None
            and spec.nbytes
            and self._ties.tied(tensor, position, self._resolved)
        ):
            return
        self.written.append(position)
        self._spec = spec
        extent = self._find(tensor) if spec.nbytes else None
        if extent is not None:
            self._part = _StagedPart(extent)
        else:
            self._open_tensor(tensor, self._stream_for(tensor), spec.nbytes)

    def _open_bytes(self, payload: memoryview, position: int) -> None:
        self.written.append(position)
        self._spec = ItemSpec("", (), payload.nbytes)
        self._part = _BytesPart(payload)

    def _open_tensor(self, tensor: torch.Tensor, stream: CopyStream | None, nbytes: int) -> None:
        flipped = tensor.is_conj() or tensor.is_neg()
        if tensor.is_contiguous() and not flipped:
            self._part = (
                _MemoryPart(tensor, nbytes) if stream is None else _FlatPart(tensor, stream)
            )
            return
        if not flipped and not tensor.is_complex():
            # Copying is not implemented for every dtype; moving integers of that size is.
            tensor = tensor.view(_INTEGER_OF_SIZE[tensor.itemsize])
        self._part = _BlockPart(tensor, stream)

    def _resolved(self, position: int) -> torch.Tensor:
        tensor = self._planner.resolve_data(self._items[position])
        assert isinstance(tensor, torch.Tensor)  # it was one the first time
        return tensor.detach()

    def _spec_of(self, tensor: torch.Tensor, item: WriteItem) -> ItemSpec:
        if self._header:
            planned = self._header[len(self.written)]
            spec = tensor_spec(tensor.dtype, tensor.shape, tensor.nbytes, planned.key)
            if spec != planned:
                raise ValueError(f"planned as {planned}, but resolved to {spec}")
            return spec
        # One object for all tensors of a kind: it is pickled once a message.
        kind = (tensor.dtype, tensor.shape)
        cached = self._spec_cache.get(kind)
        if cached is None:
            cached = tensor_spec(tensor.dtype, tensor.shape, tensor.nbytes)
            self._spec_cache[kind] = cached
        return cached

    # -- copies --------------------------------------------------------------------------

    def _take(
        self, part: _Part, slot: Slot, start: int, batch: Batch, streams: dict[int, CopyStream]
    ) -> int | None:
        """Copy the next bytes of `part`; None when the slot has no room for any."""
        if isinstance(part, _BlockPart) and part.remaining > slot.nbytes // 4:
            # Block after block goes in, without a row-major copy of the whole tensor.
            blocks = part.split(slot.nbytes // 4)
            self._parts = itertools.chain(blocks, self._parts)
            part = self._part = next(self._parts)
        nbytes = part.fits(slot.nbytes - start)
        if nbytes is None:
            return None
        try:
            part.copy(slot, start, nbytes)
        except Exception as exc:
            raise _staging_error(self._items[self.written[-1]], exc) from exc
        if part.stream is not None and nbytes:
            streams[id(part.stream)] = part.stream
            batch.held.extend(part.held())
        batch.pieces.append(Piece(self._spec, slot.offset + start, nbytes))
        self._spec = None
        if part.remaining == 0:
            self._part = None
        return nbytes


class _Part:
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


class _StagedPart(_Part):
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


class _BytesPart(_Part):
    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._done = 0
        self.remaining = payload.nbytes

    def copy(self, slot: Slot, start: int, nbytes: int) -> None:
        slot.buffer[start : start + nbytes] = self._payload[self._done : self._done + nbytes]
        self._done += nbytes
        self.remaining -= nbytes


class _MemoryPart(_Part):
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


class _FlatPart(_Part):
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


class _BlockPart(_Part):
    """Part of a tensor with strides: copied whole by torch, which puts it in row-major order."""

    def __init__(self, block: torch.Tensor, stream: CopyStream | None) -> None:
        self._block = block
        self.stream = stream
        self.remaining = block.nbytes

    def split(self, limit_bytes: int) -> Iterator[_BlockPart]:
        return (_BlockPart(block, self.stream) for block in _blocks(self._block, limit_bytes))

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


def _blocks(tensor: torch.Tensor, limit_bytes: int) -> Iterator[torch.Tensor]:
    """Cut a tensor into blocks of at most `limit_bytes` that follow each other in row-major order.

    Copying block by block needs no contiguous copy of the whole tensor.
    """
    if tensor.nbytes <= limit_bytes or tensor.dim() == 0:
        yield tensor
        return
    row_bytes = tensor.nbytes // tensor.shape[0]
    if row_bytes > limit_bytes:
        for row in tensor:
            yield from _blocks(row, limit_bytes)
        return
    num_rows = limit_bytes // row_bytes
    for start in range(0, tensor.shape[0], num_rows):
        yield tensor[start : start + num_rows]


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether a Tensor or Parameter is a strided one with values."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_meta
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a detached tensor is a plain strided one: its bytes and a shape say it all."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def check_memory(tensor: torch.Tensor) -> None:
    """Look that every element is there: copying by address would end the process, or read on.

    Meta and zero tensors have no memory; FSDP frees the storage of a tensor that is still there.
    """
    extent = tensor.numel()
    if extent and not tensor.is_contiguous():
        extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    needed_bytes = (tensor.storage_offset() + extent) * tensor.itemsize
    held_bytes = tensor.untyped_storage().nbytes() if tensor.data_ptr() else 0
    if extent and held_bytes < needed_bytes:
        raise ValueError(
            f"its storage on {tensor.device} has {held_bytes} bytes, {needed_bytes} are needed"
        )


def _serialized(tensor: torch.Tensor) -> memoryview:
    """What the stock writer would put into the file for a tensor that is not plain.

    Raises:
        TypeError: it is sparse. Stock raises too; a load would leave its target as it was.
    """
    if tensor.layout not in (torch.strided, torch.jagged):
        raise TypeError(f"{tensor.layout} tensors cannot be loaded into place")
    tensor = tensor.cpu()
    if tensor.untyped_storage().size() != tensor.nbytes:
        tensor = tensor.clone()  # minimal storage
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getbuffer()


def _bytes_of(resolved: Any) -> memoryview:
    if isinstance(resolved, io.BytesIO):
        return resolved.getbuffer()
    return memoryview(resolved).cast("B")


def _staging_error(item: WriteItem, exc: Exception) -> StagingError:
    key = item.index.fqn
    name = type(exc).__name__
    return StagingError(f"cannot stage {key!r}: {name}: {exc}", key=key, original_type=name)
