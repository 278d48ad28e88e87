"""Staging of a whole state dict: one copy into the arena, after which training may go on.

Runs in: trainer.

    collect    walk the state dict and note its tensors
    lease      room for all of them at once, or an error before anything is copied
    build      the staged state: containers and objects copied, tensors as views on that room
    copy       CPU tensors by torch in one batch, accelerators on side streams; wait for them

`collect` to `build` run in the caller's thread; after them only the tensors' values must not change
until `copy` is done. Tensors that are the same view of the same storage are staged once. Wrapper
subclasses (DTensor) are rebuilt around staged inner tensors. What is no plain strided tensor is
copied to ordinary memory, as the stock stager does.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mpwriter._arena import arena_unavailable_reason, get_arena
from mpwriter._compat import ShardedTensor, copy_each, inner_tensors, rewrap, with_shards
from mpwriter._staged_state import StagedLease, StagedState
from mpwriter._staging import is_plain
from mpwriter._streams import CopyStream, StreamFactory
from mpwriter._types import Extent

__all__ = ["StateStaging"]

# Tensors up to the first size share extents of up to the second: leasing costs 2 us an extent,
# as much as copying 16 KiB. Packs stay small enough to fit between larger tensors.
_PACKED_BYTES = 1 << 20
_PACK_BYTES = 32 << 20

_ALIGNMENT_BYTES = 64

# Values that cannot change: no copy needed.
_ATOMIC = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class StateStaging:
    """One staging of one state dict: `prepare` in the caller's thread, then `copy` in any one.

    Args:
        stream_for: copy streams; each is ordered after the trainer's work as of `prepare`.
    """

    def __init__(self, stream_for: StreamFactory) -> None:
        self._stream_for = stream_for
        self._sources: list[torch.Tensor] = []
        self._first_at: dict[int, int] = {}  # address -> index of the first tensor there
        self._slots: list[int] = []  # index in `_sources` of each tensor met, in walking order
        self._targets: list[torch.Tensor] = []
        self._state: StagedState | None = None
        self._memo: dict[int, Any] = {}

    @torch.no_grad()
    def prepare(
        self, state: Mapping[str, Any], *, budget_bytes: int | None, timeout_s: float | None
    ) -> None:
        """Make room and build everything but the tensors' values.

        Raises:
            StagingMemoryError: the budget cannot hold the state, or not in time.
            TypeError: an object cannot be copied; names its key.
        """
        self._collect(state)
        lease = None
        if arena_unavailable_reason() is None:
            lease = self._lease(budget_bytes, timeout_s)
        else:
            self._targets = [torch.empty(like.shape, dtype=like.dtype) for like in self._sources]
        self._met = iter(self._slots)
        self._state = StagedState((key, self._build(value, key)) for key, value in state.items())
        self._state.lease = lease
        self._memo.clear()
        # Made here, so that they wait for what the caller's streams are at now.
        self._streams = [self._stream_for(source) for source in self._sources]
        if lease is not None and any(stream is not None for stream in self._streams):
            for segment in {extent.segment for extent in lease.extents}:
                lease.arena.pin(segment)

    @torch.no_grad()
    def copy(self) -> StagedState:
        """Copy every tensor.

        Raises:
            RuntimeError: a tensor cannot be copied; nothing stays leased.
        """
        state, self._state = self._state, None
        assert state is not None
        recorded: dict[int, CopyStream] = {}
        try:
            self._issue(recorded)
        except BaseException:
            _settle(recorded)
            if state.lease is not None:
                state.lease.release()
            raise
        _settle(recorded)
        self._sources.clear()
        return state

    def _issue(self, recorded: dict[int, CopyStream]) -> None:
        if any(stream is not None for stream in self._streams):
            on_cpu = []
            for index, stream in enumerate(self._streams):
                if stream is None:
                    on_cpu.append(index)
                    continue
                recorded[id(stream)] = stream
                stream.copy(self._targets[index], self._sources[index])
            _copy_on_cpu([self._targets[n] for n in on_cpu], [self._sources[n] for n in on_cpu])
        else:
            _copy_on_cpu(self._targets, self._sources)

    # -- memory --------------------------------------------------------------------------

    def _lease(self, budget_bytes: int | None, timeout_s: float | None) -> StagedLease:
        sizes, places = _pack([source.nbytes for source in self._sources])
        arena = get_arena()
        extents = arena.lease_many(sizes, budget_bytes=budget_bytes, timeout_s=timeout_s)
        lease = StagedLease(arena, extents)
        typed: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        strides_of: dict[torch.Size, list[int]] = {}
        for like, (pack, within) in zip(self._sources, places, strict=True):
            segment, offset, _ = extents[pack]
            dtype, shape = like.dtype, like.shape
            base = typed.get((segment, dtype))
            if base is None:
                whole = Extent(segment, 0, arena.segment_nbytes(segment))
                base = typed[(segment, dtype)] = arena.tensor(whole).view(dtype)
            strides = strides_of.get(shape)
            if strides is None:
                strides = strides_of[shape] = _row_major(shape)
            start = (offset + within) // dtype.itemsize
            self._targets.append(base.as_strided(shape, strides, start))
        return lease

    # -- the first walk ------------------------------------------------------------------

    def _collect(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._collect_tensor(value)
        elif isinstance(value, Mapping):
            for inner in value.values():
                self._collect(inner)
        elif type(value) in (list, tuple):
            for inner in value:
                self._collect(inner)

    def _collect_tensor(self, tensor: torch.Tensor) -> None:
        if type(tensor) is not torch.Tensor:
            if isinstance(tensor, ShardedTensor):
                for shard in tensor.local_shards():
                    self._collect_tensor(shard.tensor)
                return
            names = inner_tensors(tensor)
            if names is not None:
                for name in names:
                    self._collect_tensor(getattr(tensor, name))
                return
            tensor = tensor.detach()
        if not _can_be_staged(tensor):
            return
        sources = self._sources
        # The caller's state dict holds every storage while we look: equal addresses are equal
        # memory. Empty tensors share the address 0.
        first = self._first_at.setdefault(tensor.data_ptr(), len(sources))
        if first < len(sources) and _same_view(tensor, sources[first]):
            self._slots.append(first)
            return
        self._slots.append(len(sources))
        sources.append(tensor)

    # -- the second walk -----------------------------------------------------------------

    def _build(self, value: Any, key: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._build_tensor(value)
        if isinstance(value, _ATOMIC):
            return value
        if isinstance(value, Mapping):
            return {k: self._build(inner, f"{key}.{k}") for k, inner in value.items()}
        if type(value) in (list, tuple):
            inner = [self._build(item, f"{key}.{n}") for n, item in enumerate(value)]
            return inner if type(value) is list else tuple(inner)
        return _copied(value, key, self._memo)

    def _build_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor:
            if isinstance(tensor, ShardedTensor):
                shards = [self._build_tensor(shard.tensor) for shard in tensor.local_shards()]
                return with_shards(tensor, shards)
            names = inner_tensors(tensor)
            if names is not None:
                return rewrap(
                    tensor, {name: self._build_tensor(getattr(tensor, name)) for name in names}
                )
            tensor = tensor.detach()
        if not _can_be_staged(tensor):
            return _private_copy(tensor)
        return self._targets[next(self._met)]


def _settle(recorded: Mapping[int, CopyStream]) -> None:
    """Wait for every copy under way, also after an error: none may land in memory given back."""
    for stream in recorded.values():
        stream.record().synchronize()


def _can_be_staged(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and not tensor.is_meta


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.nbytes > 0
        and one.device == other.device
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


def _pack(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Put small tensors into packs.

    Returns:
        The sizes of the extents to lease, and for each tensor (its extent, its offset there).
    """
    packs: list[int] = []
    places: list[tuple[int, int]] = []
    open_pack, used = -1, _PACK_BYTES
    for size in sizes:
        if size > _PACKED_BYTES:
            places.append((len(packs), 0))
            packs.append(size)
            continue
        if used + size > _PACK_BYTES:
            open_pack, used = len(packs), 0
            packs.append(0)
        places.append((open_pack, used))
        packs[open_pack] = used + size
        used += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return packs, places


def _row_major(shape: torch.Size) -> list[int]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return strides


def _copy_on_cpu(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if not sources:
        return
    try:
        copy_each(targets, sources)
    except RuntimeError:
        # Copying is not implemented for every dtype; moving integers of that size is.
        for target, source in zip(targets, sources, strict=True):
            if source.dtype in _COPIED or source.is_neg():
                target.copy_(source)
            else:
                integer = _INTEGER_OF_SIZE[source.itemsize]
                target.view(integer).copy_(source.view(integer))


_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Those whose copies may have to resolve a conj or neg bit.
_COPIED = (torch.complex32, torch.complex64, torch.complex128)


def _private_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in ordinary memory; what has no values to copy stays as it is."""
    if tensor.device.type == "meta":
        return tensor
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


def _copied(value: Any, key: str, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception as exc:
        raise TypeError(
            f"{key!r} cannot be staged: a {type(value).__name__} cannot be copied: {exc}"
        ) from exc
