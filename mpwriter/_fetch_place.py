"""A large stored tensor, read straight into the memory of its target.

Runs in: trainer; `Place.fill` and the requests of `Place.ask` in any thread.

What a shard file of ours has around a payload is known beforehand, so the payload can be read to
where it belongs, and its CRC taken piece by piece while the piece is in the core's cache. That is
less than half of the work of reading, checking and copying one after the other.

    file    | prefix |  payload ....................  | suffix |
              compared   piece -> target, CRC so far    compared, with the CRC

A local file is read so by one thread (`fill`). Of a store, where a request takes long, the pieces
are asked for side by side (`ask`), and compared when all have come (`holds`). A target on an
accelerator has a `Landing` in between.

Where anything differs, the item is read again as any other is, and that tells what is wrong. So a
target can hold what was not written while an error is raised, but not without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from mpwriter._checksum import crc32
from mpwriter._container import Frame, frame
from mpwriter._fetch_landing import Landing, Landings
from mpwriter._fetch_plan import SAFETENSORS_SUFFIX, StoredItem, chunk_of, payload_of

__all__ = ["MIN_PLACE_BYTES", "Place", "place_for"]

# Below, one read and one copy of neighbours together cost less than reads of their own.
MIN_PLACE_BYTES = 2**20
# Half of the second-level cache of a core of today's servers, 1 to 2 MiB.
_PIECE_BYTES = 2**19

# Reads into a view from an offset of the file; gives how many bytes there were.
ReadInto = Callable[[int, memoryview], int]


class Place:
    """The memory of one target, and what has to be found around its payload.

    Attributes:
        target: the planner's tensor.
        checked: whether a CRC covers what is read.
        needs_landing: whether the target's memory is an accelerator's.
    """

    def __init__(
        self,
        target: torch.Tensor,
        start: int,
        around: Frame | None,
        *,
        verify: bool,
        landings: Landings | None = None,
    ) -> None:
        self.target = target
        self.checked = around is not None and verify
        self.needs_landing = landings is not None
        self._landings = landings
        self._landing: Landing | None = None
        self._memory = memoryview(b"")
        self._start = start
        self._around = around
        self._verify = verify
        self._ends = bytearray(), bytearray()

    def open(self) -> bool:
        """Make ready to be read into; False where there is no memory for that."""
        if self._landings is None:
            elements: Any = self.target.reshape(-1).view(torch.uint8).numpy()
            self._memory = memoryview(elements)
            return True
        self._landing = self._landings.open(self.target)
        if self._landing is None:
            return False
        self._memory = self._landing.memory
        return True

    def fill(self, read_into: ReadInto) -> bool:
        """Read the payload. Thread-safe with other places.

        Returns:
            False where the file does not hold what it should.

        Raises:
            Exception: as the filesystem has it.
        """
        around, memory, crc = self._around, self._memory, 0
        if around is not None and not _holds(read_into, self._start, around.prefix):
            return False
        begin = self._start + (len(around.prefix) if around is not None else 0)
        for at in range(0, len(memory), _PIECE_BYTES):
            piece = memory[at : at + _PIECE_BYTES]
            if read_into(begin + at, piece) < len(piece):
                return False
            if self.checked:
                crc = crc32(piece, crc)
        if around is None:
            return True
        end = begin + len(memory)
        suffix = bytearray(self._start + around.length - end)
        if read_into(end, memoryview(suffix)) < len(suffix):
            return False
        return self._is_suffix(suffix, crc)

    def ask(self, part_bytes: int) -> list[tuple[int, list[memoryview]]]:
        """What to read for it: offset in the file, and the views that its bytes go to.

        Args:
            part_bytes: of one request, at most.
        """
        around, memory = self._around, self._memory
        if around is not None:
            num_prefix = len(around.prefix)
            self._ends = (
                bytearray(num_prefix),
                bytearray(around.length - num_prefix - len(memory)),
            )
        views = [memoryview(self._ends[0]), memory, memoryview(self._ends[1])]
        total = sum(map(len, views))
        return [
            (self._start + begin, _cut_out(views, begin, min(begin + part_bytes, total)))
            for begin in range(0, total, part_bytes)
        ]

    def holds(self) -> bool:
        """Whether what `ask` was for is what it should be, once all of it has been read."""
        around = self._around
        if around is None:
            return True
        if self._ends[0] != around.prefix:
            return False
        return self._is_suffix(self._ends[1], crc32(self._memory) if self._verify else 0)

    def land(self) -> None:
        """Bring what has been read and compared to the target, if it is not there already.

        Raises:
            Exception: as torch has it.
        """
        if self._landing is not None:
            self._landing.land()

    def release(self) -> None:
        """Nobody reads into it any more. Again does nothing."""
        if self._landing is not None:
            self._landing.release()

    def _is_suffix(self, suffix: bytearray, crc: int) -> bool:
        assert self._around is not None
        # Unchecked, the file's own word for its CRC will do.
        stated = int.from_bytes(suffix[4:8], "little")
        return self._around.suffix(crc if self._verify else stated) == suffix


def _cut_out(views: Sequence[memoryview], begin: int, end: int) -> list[memoryview]:
    """The part of `views`, laid end to end, from `begin` to `end`."""
    found: list[memoryview] = []
    for view in views:
        piece = view[max(0, begin) : max(0, end)]
        if len(piece):
            found.append(piece)
        begin, end = begin - len(view), end - len(view)
    return found


def _holds(read_into: ReadInto, start: int, expected: bytes) -> bool:
    found = bytearray(len(expected))
    return read_into(start, memoryview(found)) == len(found) and found == expected


def place_for(
    name: str,
    item: StoredItem,
    entry: Any,
    resolve: Callable[[], torch.Tensor],
    landings: Landings,
    *,
    verify: bool,
) -> Place | None:
    """The place of an item with one read.

    Args:
        name: of the file.
        item: what is stored.
        entry: of its key in the metadata.
        resolve: asks the planner for the target; called where all else fits.
        landings: for a target on an accelerator.
        verify: compare CRCs.

    Returns:
        None where the payload's bytes are not exactly the target's memory.
    """
    chunk = chunk_of(entry, item.reads[0].storage_index)
    if item.length < MIN_PLACE_BYTES or chunk is None:
        return None
    dtype = entry.properties.dtype
    if item.elements is None:
        if not _is_whole(item, chunk) or payload_of(name, item, entry, chunk) is None:
            return None
        shape = tuple(chunk.sizes)
    else:
        shape = tuple(item.reads[0].lengths)
    target = resolve()
    if not _can_take(target, dtype, shape):
        return None
    needs_landing = landings.needs_one(target)
    if not needs_landing and not target.is_cpu:
        return None
    around = None
    if item.elements is None and not name.endswith(SAFETENSORS_SUFFIX):
        nbytes = target.numel() * target.itemsize
        around = frame(str(dtype).removeprefix("torch."), shape, nbytes, item.offset)
    return Place(
        *(target, item.offset, around), verify=verify, landings=landings if needs_landing else None
    )


def _is_whole(item: StoredItem, chunk: ChunkStorageMetadata) -> bool:
    read = item.reads[0]
    return tuple(read.lengths) == tuple(chunk.sizes) and not any(read.storage_offsets)


def _can_take(target: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Whether the payload's bytes are the target's, one after the other."""
    return (
        type(target) is torch.Tensor
        and target.layout == torch.strided
        and target.dtype == dtype
        and tuple(target.shape) == shape
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    )
