"""Loading a checkpoint back and comparing it bit for bit.

Runs in: trainer.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import StorageReader

from mpwriter._compat import StockFsspecReader
from mpwriter.bench.places import Place
from mpwriter.bench.states import BenchState, local_part

__all__ = ["differences", "load_into", "verify_checkpoint"]


def verify_checkpoint(state: BenchState, place: Place, url: str) -> None:
    """Load `url` with the stock reader, whoever wrote it, and compare with `state`.

    Raises:
        RuntimeError: what was loaded is not what was saved; names the first keys.
    """
    loaded = _blank(state.state_dict)
    load_into(loaded, StockFsspecReader(url, **place.storage_options))
    different = differences(state.state_dict, loaded)
    if different:
        raise RuntimeError(f"{url} differs from what was saved: {', '.join(different[:5])}")


def load_into(state_dict: dict[str, Any], reader: StorageReader) -> None:
    """`dcp.load` without its warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_load(state_dict, storage_reader=reader)


def differences(expected: Any, found: Any, key: str = "") -> list[str]:
    """Keys under which the two differ: in type, shape, dtype, a bit of a tensor, or `==`."""
    if isinstance(expected, torch.Tensor):
        return [] if _same_bits(expected, found) else [key]
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or expected.keys() != found.keys():
            return [key]
        members = [(str(name), expected[name], found[name]) for name in expected]
    elif isinstance(expected, (list, tuple)):
        if type(expected) is not type(found) or len(expected) != len(found):
            return [key]
        members = [(str(i), *pair) for i, pair in enumerate(zip(expected, found))]
    else:
        return [] if type(expected) is type(found) and expected == found else [key]
    return [
        different
        for name, left, right in members
        for different in differences(left, right, f"{key}.{name}" if key else name)
    ]


def _same_bits(expected: torch.Tensor, found: Any) -> bool:
    """Equality of bytes: `torch.equal` takes -0.0 for 0.0, and NaN for nothing."""
    if not isinstance(found, torch.Tensor):
        return False
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return False
    return torch.equal(_raw(expected), _raw(found))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return local_part(tensor.detach()).cpu().contiguous().reshape(-1).view(torch.uint8)


def _blank(value: Any) -> Any:
    """The same tree with other values, to load into: what is not loaded then differs."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 77)
    if isinstance(value, Mapping):
        return {name: _blank(member) for name, member in value.items()}
    return value
