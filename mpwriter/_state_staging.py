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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from mpwriter._arena import arena_unavailable_reason, get_arena
from mpwriter._compat import ShardedTensor, copy_each, inner_tensors, rewrap, with_shards
from mpwriter._staged_state import StagedLease, StagedState
from mpwriter._staged_views import views
from mpwriter._staging import has_plain_memory
from mpwriter._streams import CopyStream, StreamFactory, accelerator_stream

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
        stream_for: copy streams; None for side streams of the tensors' own devices. Each is
            ordered after the trainer's work as of `prepare`.
    """

    def __init__(self, stream_for: StreamFactory | None = None) -> None:
        self._stream_for = stream_for
        self._all_on_cpu = True
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
        self._streams = self._open_streams()
        if lease is not None and self._streams:
            for segment in {extent.segment for extent in lease.extents}:
                lease.arena.pin(segment)

    def _open_streams(self) -> list[CopyStream | None]:
        """One entry per source, None for the CPU's own copies; empty where all are such."""
        if self._stream_for is None and self._all_on_cpu:
            return []
        stream_for = self._stream_for or accelerator_stream()
        return [stream_for(source) for source in self._sources]

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
        if self._streams:
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

    def _lease(self, budget_bytes: int | None, timeout_s: float | None) -> StagedLease:
        sizes, packs, offsets = _pack([source.nbytes for source in self._sources])
        arena = get_arena()
        extents = arena.lease_many(sizes, budget_bytes=budget_bytes, timeout_s=timeout_s)
        lease = StagedLease(arena, extents)
        self._targets = views.on(arena, extents, packs, offsets, self._sources)
        return lease

    # -- the first walk: note every tensor -----------------------------------------------

    def _collect(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._collect_tensor(value)
        elif isinstance(value, Mapping):
            self._collect_all(value.values())
        elif type(value) in (list, tuple):
            self._collect_all(value)

    def _collect_all(self, values: Iterable[Any]) -> None:
        for value in values:
            if type(value) in _PLAIN_TYPES:
                self._note(value)
            else:
                self._collect(value)

    def _collect_tensor(self, tensor: torch.Tensor) -> None:
        inner = None if type(tensor) in _PLAIN_TYPES else _inner(tensor)
        if inner is not None:
            self._collect_all(inner)
        else:
            self._note(tensor.detach())

    def _note(self, tensor: torch.Tensor) -> None:
        if not has_plain_memory(tensor):
            self._slots.append(_PRIVATE)
            return
        sources = self._sources
        # The caller's state dict holds every storage while we look: equal addresses are equal
        # memory. Empty tensors share the address 0.
        first = self._first_at.setdefault(tensor.data_ptr(), len(sources))
        if first < len(sources) and _same_view(tensor, sources[first]):
            self._slots.append(first)
            return
        if not tensor.is_cpu:
            self._all_on_cpu = False
        self._slots.append(len(sources))
        sources.append(tensor)

    # -- the second walk: the same structure around the staged tensors -------------------

    def _build(self, value: Any, key: str) -> Any:
        if type(value) in _PLAIN_TYPES:
            return self._staged(value)
        if isinstance(value, torch.Tensor):
            inner = _inner(value)
            if inner is not None:
                return _around(value, [self._build(part, key) for part in inner])
            return self._staged(value)
        if isinstance(value, _ATOMIC):
            return value
        if isinstance(value, Mapping):
            return {k: self._build(inner, key) for k, inner in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._build(inner, key) for inner in value)
        return _copied(value, key, self._memo)

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        slot = next(self._met)
        return _private_copy(tensor.detach()) if slot == _PRIVATE else self._targets[slot]


# Marks a tensor that is no plain strided one: it is copied to ordinary memory.
_PRIVATE = -1

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def _inner(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """The tensors that a wrapper is made of; None for what is no wrapper."""
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    names = inner_tensors(tensor)
    return None if names is None else [getattr(tensor, name) for name in names]


def _around(tensor: torch.Tensor, inner: list[torch.Tensor]) -> torch.Tensor:
    """The same wrapper around other inner tensors, in the order of `_inner`."""
    if isinstance(tensor, ShardedTensor):
        return with_shards(tensor, inner)
    names = inner_tensors(tensor)
    assert names is not None
    return rewrap(tensor, dict(zip(names, inner, strict=True)))


def _settle(recorded: Mapping[int, CopyStream]) -> None:
    """Wait for every copy under way, also after an error: none may land in memory given back."""
    for stream in recorded.values():
        stream.record().synchronize()


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


def _pack(sizes: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Put small tensors into packs.

    Returns:
        The sizes of the extents to lease; of each tensor, which extent and where in it. Lists of
        numbers, not of tuples: the garbage collector counts objects that can hold others.
    """
    extents: list[int] = []
    packs: list[int] = []
    offsets: list[int] = []
    open_pack, used = -1, _PACK_BYTES
    for size in sizes:
        if size > _PACKED_BYTES:
            packs.append(len(extents))
            offsets.append(0)
            extents.append(size)
            continue
        if used + size > _PACK_BYTES:
            open_pack, used = len(extents), 0
            extents.append(0)
        packs.append(open_pack)
        offsets.append(used)
        extents[open_pack] = used + size
        used += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return extents, packs, offsets


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
