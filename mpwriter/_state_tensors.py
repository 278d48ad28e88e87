"""The first walk over a state dict that is to be staged: note every tensor, once.

Runs in: trainer.

There may be 20,000 tensors, and the trainer waits: what is done for each is kept to a microsecond,
and noted in lists of numbers rather than in records, which the garbage collector would count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mpwriter._compat import ShardedTensor, inner_tensors
from mpwriter._staging_kinds import check_memory

__all__ = [
    "PLAIN_TYPES",
    "PRIVATE",
    "StateTensors",
    "inner_of",
    "key_of_first_failure",
]

# Marks a tensor that is no plain strided one: it is copied to ordinary memory.
PRIVATE = -1

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


class StateTensors:
    """The plain strided tensors of a state dict, each view of each storage once.

    Attributes:
        sources: the tensors.
        sizes, dtypes, shapes: of each of them; sizes in bytes.
        slots: of every tensor met, in walking order: its index in `sources`, or PRIVATE.
        all_on_cpu: whether all of `sources` are.
    """

    def __init__(self) -> None:
        self.sources: list[torch.Tensor] = []
        self.sizes: list[int] = []
        self.dtypes: list[torch.dtype] = []
        self.shapes: list[torch.Size] = []
        self.slots: list[int] = []
        self.all_on_cpu = True
        self._first_at: dict[int, int] = {}  # address -> index of the first tensor there
        self._other_views: dict[tuple[Any, ...], int] = {}  # of such an address -> index

    def collect(self, value: Any) -> None:
        """Note `value` if it is a tensor, or those in it.

        Raises:
            ValueError: a tensor's storage does not hold all of its elements.
        """
        if isinstance(value, torch.Tensor):
            self._collect_tensor(value)
        elif isinstance(value, Mapping):
            self._collect_all(value.values())
        elif type(value) in (list, tuple):
            self._collect_all(value)

    def _collect_all(self, values: Iterable[Any]) -> None:
        note = self._note
        for value in values:
            if type(value) in PLAIN_TYPES:
                note(value)
            else:
                self.collect(value)

    def _collect_tensor(self, tensor: torch.Tensor) -> None:
        inner = None if type(tensor) in PLAIN_TYPES else inner_of(tensor)
        if inner is not None:
            self._collect_all(inner)
            return
        plain = _detached(tensor)
        if type(plain) is torch.Tensor:
            self._note(plain)
        else:
            self.slots.append(PRIVATE)  # a subclass that is more than its values

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            self.slots.append(PRIVATE)
            return
        if not tensor.is_cpu:
            if tensor.is_meta:
                self.slots.append(PRIVATE)
                return
            self.all_on_cpu = False
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        if (
            not address
            or not tensor.is_contiguous()
            or tensor.storage_offset() * tensor.itemsize + nbytes
            > tensor.untyped_storage().nbytes()
        ):
            check_memory(tensor)  # the same, thoroughly
        index = len(self.sources)
        # The caller's state dict holds every storage while we look: equal addresses are equal
        # memory. Empty tensors share the address 0.
        first = self._first_at.setdefault(address, index)
        if first != index and nbytes:
            if not _same_view(tensor, self.sources[first]):
                first = self._other_views.setdefault(_view_of(tensor), index)
            if first != index:
                self.slots.append(first)
                return
        self.slots.append(index)
        self.sources.append(tensor)
        self.sizes.append(nbytes)
        self.dtypes.append(tensor.dtype)
        self.shapes.append(tensor.shape)


def key_of_first_failure(value: Any) -> str:
    """The key of the first tensor that has no memory to be read."""
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif type(value) in (list, tuple):
        items = enumerate(value)
    else:
        return ""
    for name, inner in items:
        try:
            StateTensors().collect(inner)
        except ValueError:
            return f"{name}.{key_of_first_failure(inner)}".rstrip(".")
    return ""


def _detached(tensor: torch.Tensor) -> torch.Tensor | None:
    """Without its history; None for a subclass that cannot, to be told where it is copied."""
    try:
        return tensor.detach()
    except Exception:
        return None


def inner_of(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """The tensors that a wrapper is made of; None for what is no wrapper."""
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    names = inner_tensors(tensor)
    return None if names is None else [getattr(tensor, name) for name in names]


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


def _view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same view of the same memory."""
    return (
        tensor.data_ptr(),
        tensor.device,
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )
