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

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from mpwriter._container import ELEMENT_BYTES
from mpwriter._staging_kinds import (
    bytes_of,
    check_memory,
    dtype_name,
    is_plain,
    serialized,
    tensor_spec,
)
from mpwriter._staging_parts import BlockPart, BytesPart, Part, Slot, StagedPart, open_tensor
from mpwriter._staging_ties import TieTable
from mpwriter._streams import CopyEvent, CopyStream, StreamFactory
from mpwriter._types import MIN_DIRECT_BYTES, PAGE_BYTES, Extent, ItemSpec
from mpwriter.errors import StagingError

__all__ = ["Batch", "ItemStream"]

# Every item starts at a multiple of this in a slot: typed views need their item size (16 at
# most), SIMD checksums and copies like a cache line.
_ALIGNMENT_BYTES = 64

# Items per batch at most, so that the worker starts on the first thousand of many small ones.
_MAX_BATCH_PIECES = 1024

# Staged bytes of one message: the worker acknowledges, and so shows progress, this often.
_STAGED_BATCH_BYTES = 8 << 20


@dataclass
class Batch:
    """Pieces whose bytes lie in one segment, in file order; valid once every event completed."""

    segment: int
    slot: Slot | None  # None: the pieces lie where the tensors were staged
    specs: list[ItemSpec | None] = field(default_factory=list)  # these three: see `Put`
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
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


class ItemStream:
    """The items of one bucket, in file order, as batches.

    Args:
        items: every write item of this rank's plan.
        positions: which of them go into this file, in file order.
        planner: resolves an item when its turn comes.
        ties: shared by the files of a save; None where tied values are written twice.
        stream_for: see `_streams`.
        find: the extent of a tensor that lies in the arena already, as a staged one does; None
            where there are none.
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
        find: Callable[[torch.Tensor], Extent | None] | None = None,
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
        self._parts: Iterator[Part] = iter(())
        self._part: Part | None = None
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
        return not isinstance(self._part, StagedPart)

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
        batch = Batch(slot.segment, slot)
        streams: dict[int, CopyStream] = {}
        cursor = 0
        while len(batch.sizes) < _MAX_BATCH_PIECES:
            if self._part is None and not self._advance():
                break
            assert self._part is not None
            if isinstance(self._part, StagedPart):
                break
            large = self._part.remaining >= MIN_DIRECT_BYTES
            unit = PAGE_BYTES if large else _ALIGNMENT_BYTES
            start = -(-cursor // unit) * unit
            taken = self._take(self._part, slot, start, batch, streams)
            if taken is None:
                break
            cursor = start + taken
        batch.events.extend(stream.record() for stream in streams.values())
        return batch

    def _staged_batch(self) -> Batch:
        assert isinstance(self._part, StagedPart)
        batch = Batch(self._part.extent.segment, None)
        room = _STAGED_BATCH_BYTES
        while isinstance(self._part, StagedPart) and self._part.extent.segment == batch.segment:
            offset, nbytes = self._part.take(room)
            self._add_piece(batch, offset, nbytes)
            room -= nbytes
            if self._part.remaining == 0:
                self._part = None
            if room <= 0 or len(batch.sizes) >= _MAX_BATCH_PIECES:
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
            self._open_bytes(bytes_of(resolved), position)
            return
        if not isinstance(resolved, torch.Tensor):
            raise TypeError(f"the planner resolved a tensor item to {type(resolved).__name__}")
        tensor = resolved.detach()
        if not is_plain(tensor) or dtype_name(tensor.dtype) not in ELEMENT_BYTES:
            if self._header:
                raise TypeError("safetensors holds plain strided tensors only")
            self._open_bytes(serialized(tensor), position)
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
        extent = self._find(tensor) if self._find is not None and spec.nbytes else None
        if extent is not None:
            self._part = StagedPart(extent)
        else:
            self._part = open_tensor(tensor, self._stream_for(tensor), spec.nbytes)

    def _open_bytes(self, payload: memoryview, position: int) -> None:
        self.written.append(position)
        self._spec = ItemSpec("", (), payload.nbytes)
        self._part = BytesPart(payload)

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

    def _add_piece(self, batch: Batch, offset: int, nbytes: int) -> None:
        batch.specs.append(self._spec)
        batch.offsets.append(offset)
        batch.sizes.append(nbytes)
        self._spec = None  # what follows goes on with the same item

    # -- copies --------------------------------------------------------------------------

    def _take(
        self, part: Part, slot: Slot, start: int, batch: Batch, streams: dict[int, CopyStream]
    ) -> int | None:
        """Copy the next bytes of `part`; None when the slot has no room for any."""
        if isinstance(part, BlockPart) and part.remaining > slot.nbytes // 4:
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
        self._add_piece(batch, slot.offset + start, nbytes)
        if part.remaining == 0:
            self._part = None
        return nbytes


def _staging_error(item: WriteItem, exc: Exception) -> StagingError:
    key = item.index.fqn
    name = type(exc).__name__
    return StagingError(f"cannot stage {key!r}: {name}: {exc}", key=key, original_type=name)
