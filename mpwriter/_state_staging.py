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
import functools
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from mpwriter._arena import arena_unavailable_reason, get_arena
from mpwriter._collector import collector_paused
from mpwriter._compat import ShardedTensor, copy_each, inner_tensors, rewrap, with_shards
from mpwriter._staged_state import StagedLease, StagedState
from mpwriter._staged_views import views
from mpwriter._state_tensors import (
    PLAIN_TYPES,
    PRIVATE,
    StateTensors,
    inner_of,
    key_of_first_failure,
)
from mpwriter._streams import CopyStream, StreamFactory, accelerator_stream
from mpwriter._types import PAGE_BYTES
from mpwriter.errors import StagingError

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
        path: where the writer points; noted in the staged state.
    """

    def __init__(
        self,
        stream_for: StreamFactory | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        self._stream_for = stream_for
        self._path = path
        self._tensors = StateTensors()
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
            TypeError, StagingError: a value cannot be copied; names its key.
        """
        try:
            with collector_paused():
                self._tensors.collect(state)
        except ValueError as exc:
            raise _staging_error(key_of_first_failure(state), exc) from exc
        lease = self._lease(budget_bytes, timeout_s)
        try:
            with collector_paused():
                self._build_state(state, lease)
        except BaseException:
            lease.release()  # this frame lives as long as the exception is kept
            raise

    def _build_state(self, state: Mapping[str, Any], lease: StagedLease) -> None:
        self._met = iter(self._tensors.slots)
        self._state = StagedState(self._build_items(state.items(), None))
        self._state.lease, self._state.path = lease, self._path
        self._memo.clear()
        # Made here, so that they wait for what the caller's streams are at now.
        self._streams = self._open_streams()
        if self._streams:
            for segment in {extent.segment for extent in lease.extents}:
                lease.arena.pin(segment)

    def abandon(self) -> None:
        """Give the memory back: `copy` will not be called."""
        state, self._state = self._state, None
        if state is not None and state.lease is not None:
            state.lease.release()

    def _open_streams(self) -> list[CopyStream | None]:
        """One entry per source, None for the CPU's own copies; empty where all are such."""
        if self._stream_for is None and self._tensors.all_on_cpu:
            return []
        stream_for = self._stream_for or accelerator_stream()
        return [stream_for(source) for source in self._tensors.sources]

    @torch.no_grad()
    def copy(self) -> StagedState:
        """Copy every tensor.

        Raises:
            StagingError: a tensor cannot be copied; nothing stays leased.
        """
        state, self._state = self._state, None
        assert state is not None
        recorded: dict[int, CopyStream] = {}
        try:
            self._issue(recorded)
            _settle(recorded)
        except BaseException as exc:
            self._give_up(state, recorded)
            if isinstance(exc, Exception):
                raise _staging_error(None, exc) from exc
            raise
        self._tensors.sources.clear()
        return state

    def _give_up(self, state: StagedState, recorded: Mapping[int, CopyStream]) -> None:
        try:
            _settle(recorded)
        finally:
            assert state.lease is not None
            state.lease.release()

    def _issue(self, recorded: dict[int, CopyStream]) -> None:
        targets, sources = self._targets, self._tensors.sources
        if not self._streams:
            _copy_on_cpu(targets, sources)
            return
        on_cpu = []
        for index, stream in enumerate(self._streams):
            if stream is None:
                on_cpu.append(index)
                continue
            recorded[id(stream)] = stream
            stream.copy(targets[index], sources[index])
        _copy_on_cpu([targets[n] for n in on_cpu], [sources[n] for n in on_cpu])

    def _lease(self, budget_bytes: int | None, timeout_s: float | None) -> StagedLease:
        arena = get_arena()
        if arena_unavailable_reason() is not None:
            sources = self._tensors.sources
            self._targets = [torch.empty(s.shape, dtype=s.dtype, device="cpu") for s in sources]
            return StagedLease(arena, ())
        tensors = self._tensors
        sizes, packs, offsets = _pack(tuple(tensors.sizes))
        extents = arena.lease_many(sizes, budget_bytes=budget_bytes, timeout_s=timeout_s)
        lease = StagedLease(arena, extents)
        try:
            self._targets = views.on(arena, extents, packs, offsets, tensors.dtypes, tensors.shapes)
        except BaseException:
            lease.release()
            raise
        return lease

    # -- the second walk: the same structure around the staged tensors -------------------

    def _build(self, value: Any, key: str) -> Any:
        if type(value) in PLAIN_TYPES:
            return self._staged(value, key)
        if isinstance(value, torch.Tensor):
            inner = inner_of(value)
            if inner is not None:
                return _around(value, [self._build(part, key) for part in inner])
            return self._staged(value, key)
        if isinstance(value, _ATOMIC):
            return value
        if isinstance(value, Mapping):
            return _mapping_like(value, dict(self._build_items(value.items(), key)))
        if type(value) in (list, tuple):
            return type(value)(self._build(inner, f"{key}.{n}") for n, inner in enumerate(value))
        return _copied(value, key, self._memo)

    def _build_items(
        self, items: Iterable[tuple[Any, Any]], key: str | None
    ) -> Iterator[tuple[Any, Any]]:
        """`key`: of what holds them; None at the top level."""
        met, targets = self._met, self._targets
        for name, value in items:
            if type(value) in PLAIN_TYPES:  # most values of a large state: no call for each
                slot = next(met)
                if slot != PRIVATE:
                    yield name, targets[slot]
                    continue
                yield name, _private_copy(value, _join(key, name))
            else:
                yield name, self._build(value, _join(key, name))

    def _staged(self, tensor: torch.Tensor, key: str) -> torch.Tensor:
        slot = next(self._met)
        return _private_copy(tensor, key) if slot == PRIVATE else self._targets[slot]


def _around(tensor: torch.Tensor, inner: list[torch.Tensor]) -> torch.Tensor:
    """The same wrapper around other inner tensors, in the order of `_inner`."""
    if isinstance(tensor, ShardedTensor):
        return with_shards(tensor, inner)
    names = inner_tensors(tensor)
    assert names is not None
    return rewrap(tensor, dict(zip(names, inner, strict=True)))


def _mapping_like(original: Mapping[Any, Any], built: dict[Any, Any]) -> Mapping[Any, Any]:
    """`built` in a mapping of the original's type: a planner may pickle it as part of a tuple."""
    if type(original) is dict:
        return built
    if type(original) is OrderedDict:
        return OrderedDict(built)
    if isinstance(original, MutableMapping):
        try:
            like = copy.copy(original)
            for name, value in built.items():  # `update` of a Counter would add
                like[name] = value
            return like
        except Exception:
            return built
    return built


def _join(key: str | None, name: Any) -> str:
    return str(name) if key is None else f"{key}.{name}"


def _staging_error(key: str | None, exc: Exception) -> StagingError:
    what = "the state" if key is None else repr(key)
    name = type(exc).__name__
    return StagingError(f"cannot stage {what}: {name}: {exc}", key=key, original_type=name)


def _settle(recorded: Mapping[int, CopyStream]) -> None:
    """Wait for every copy under way, also after an error: none may land in memory given back."""
    for stream in recorded.values():
        stream.record().synchronize()


@functools.lru_cache(maxsize=4)  # a trainer saves the same state again and again
def _pack(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Put small tensors into packs.

    Returns:
        The sizes of the extents to lease; of each tensor, which extent and where in it. All of
        numbers, not of tuples: the garbage collector counts objects that can hold others.
    """
    extents: list[int] = []
    packs: list[int] = []
    offsets: list[int] = []
    open_pack, used = -1, 0
    for size in sizes:
        if size > _PACKED_BYTES:
            packs.append(len(extents))
            offsets.append(0)
            extents.append(size)
            continue
        if open_pack < 0 or used + size > _PACK_BYTES:
            open_pack, used = len(extents), 0
            extents.append(0)
        packs.append(open_pack)
        offsets.append(used)
        extents[open_pack] = used + size
        used += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    if len(extents) > 1:  # so that each begins at a page: see `mpwriter._direct`
        extents = [-(-nbytes // PAGE_BYTES) * PAGE_BYTES for nbytes in extents]
    return tuple(extents), tuple(packs), tuple(offsets)


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


def _private_copy(tensor: torch.Tensor, key: str) -> torch.Tensor:
    """A copy in ordinary memory; what has no values to copy stays as it is."""
    try:
        copied = tensor.detach()
        if copied.device.type != "meta":
            copied = copied.clone() if copied.device.type == "cpu" else copied.cpu()
    except Exception as exc:
        raise _staging_error(key, exc) from exc
    if type(tensor) not in PLAIN_TYPES:
        _keep_attributes(copied, tensor)
    return copied


def _keep_attributes(copied: torch.Tensor, original: torch.Tensor) -> None:
    """What a subclass knows about itself: `detach` drops it, but it may say how it is saved."""
    for name, value in vars(original).items():
        try:
            value = copy.deepcopy(value)
        except Exception:
            pass  # a process group, a lock: there is one only
        vars(copied).setdefault(name, value)


def _copied(value: Any, key: str, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception as exc:
        raise TypeError(
            f"{key!r} cannot be staged: a {type(value).__name__} cannot be copied: {exc}"
        ) from exc
