"""The classes that a checkpoint's `.metadata` may name, for writing and for reading.

Runs in: trainer.

One list for both ways: what is written can be read, and nothing else is.
"""

from __future__ import annotations

import copyreg
import functools
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import metadata as _dcp
from torch.distributed.checkpoint.metadata import Metadata

from mpwriter._compat import METADATA_ENUMS, ShardedTensorProperties, StorageInfo
from mpwriter.errors import MPWriterError

__all__ = ["NAMES", "REDUCERS"]

# What object.__reduce_ex__ gives, too: pickled as NEWOBJ, by its name.
_NEW_OBJECT: Any = vars(copyreg)["__newobj__"]

_Reducer = Callable[[Any], Any]

# The records of a checkpoint: plain objects whose state is their __dict__.
# Source: torch/distributed/checkpoint/metadata.py, the same names from torch 2.3 to 2.13.
_RECORDS: tuple[type, ...] = (
    Metadata,
    _dcp.TensorStorageMetadata,
    _dcp.BytesStorageMetadata,
    _dcp.ChunkStorageMetadata,
    _dcp.MetadataIndex,
    _dcp.StorageMeta,
)
# Records with a __getstate__ of their own. The second pair is the older home of the first, which
# torch before 2.3 named for sharded tensors.
_STATEFUL_RECORDS: tuple[type, ...] = (
    _dcp.TensorProperties,
    ShardedTensorProperties,
    StorageInfo,
)
_PATHS: tuple[type[pathlib.PurePath], ...] = (
    pathlib.PurePosixPath,
    pathlib.PureWindowsPath,
    pathlib.PosixPath,
    pathlib.WindowsPath,
)


# ---- writing ----


class _Reducers(dict[type, _Reducer]):
    """For each class that may be written what Pickler.reducer_override gives for its objects.

    Plain values (str, int, tuple, dict...) never come here. Everything else does, classes and
    functions included; what has no place in this table is refused.
    """

    def __missing__(self, cls: type) -> NoReturn:
        raise _unwritable(cls)


def _unwritable(cls: Any) -> MPWriterError:
    return MPWriterError(
        f"a checkpoint's metadata cannot hold {cls.__module__}.{cls.__qualname__}: only str, "
        "numbers, containers and the classes of torch.distributed.checkpoint can be read "
        "everywhere (is it in the planner's planner_data?)"
    )


def _record_reducer(cls: type) -> _Reducer:
    arguments = (cls,)
    return lambda record: (_NEW_OBJECT, arguments, record.__dict__)


def _stateful_reducer(cls: type) -> _Reducer:
    arguments = (cls,)
    return lambda record: (_NEW_OBJECT, arguments, record.__getstate__())


def _reduce_named(value: Any) -> str:
    """A class or function that the reducers name: pickled by reference."""
    if value not in _NAMED:
        raise _unwritable(value)
    return str(value.__qualname__)


_reduce_layout = copyreg.dispatch_table[torch.layout]
_make_layout = _reduce_layout(torch.strided)[0]

_NAMED = frozenset(
    {*_RECORDS, *_STATEFUL_RECORDS, *METADATA_ENUMS, *_PATHS, torch.Size, OrderedDict, _make_layout}
)


def _all_reducers() -> _Reducers:
    reducers = _Reducers(
        {
            torch.Size: lambda size: (torch.Size, (tuple(size),)),
            torch.dtype: lambda dtype: dtype.__reduce__(),
            torch.layout: _reduce_layout,
            OrderedDict: lambda pairs: (OrderedDict, (), None, None, iter(pairs.items())),
            type: _reduce_named,
            type(_make_layout): _reduce_named,
        }
    )
    for cls in _RECORDS:
        reducers[cls] = _record_reducer(cls)
    for cls in _STATEFUL_RECORDS:
        reducers[cls] = _stateful_reducer(cls)
    for cls in METADATA_ENUMS:
        # By value: early releases of Python 3.11 write a call of getattr.
        reducers[cls] = lambda member: (type(member), (member.value,))
        reducers[type(cls)] = _reduce_named
    for cls in _PATHS:
        reducers[cls] = lambda path: (type(path), path.parts)
    return reducers


REDUCERS = _all_reducers()


# ---- reading ----


def _stand_in(cls: type) -> type:
    """A throw-away class whose instances are those of `cls`.

    A pickle can set attributes on whatever is on its stack. On this class that changes nothing
    for the rest of the process; on `cls` itself it would.
    """
    return type(cls.__name__, (cls,), {"__new__": lambda _stand_in, *_: object.__new__(cls)})


def _native_path(cls: type[pathlib.PurePath], pure: type[pathlib.PurePath]) -> type:
    """The path class of another operating system can be named here, but not be used."""
    return cls if issubclass(cls, type(pathlib.Path())) else pure


def _always(found: Any) -> Callable[[], Any]:
    return lambda: found


def _fixed_names() -> dict[tuple[str, str], Callable[[], Any]]:
    """(module, name) in a pickle, and what makes the object that stands for it in one load.

    Callables are given as new partials and bound methods, for the reason that `_stand_in` gives.
    """
    names: dict[tuple[str, str], Callable[[], Any]] = {}
    for cls in _RECORDS + _STATEFUL_RECORDS:
        names[cls.__module__, cls.__qualname__] = functools.partial(_stand_in, cls)
    for cls in METADATA_ENUMS:
        names[cls.__module__, cls.__qualname__] = _partial_of(cls)
    # Early releases of Python 3.11 pickled a member of an enum as getattr(its class, its name).
    names["builtins", "getattr"] = _partial_of(_enum_member)
    names["collections", "OrderedDict"] = _partial_of(OrderedDict)
    names.update(_torch_names())
    posix = _native_path(pathlib.PosixPath, pathlib.PurePosixPath)
    windows = _native_path(pathlib.WindowsPath, pathlib.PureWindowsPath)
    for module in ("pathlib", "pathlib._local"):  # the second one: Python 3.13
        names[module, "PosixPath"] = _partial_of(posix)
        names[module, "WindowsPath"] = _partial_of(windows)
        names[module, "PurePosixPath"] = _partial_of(pathlib.PurePosixPath)
        names[module, "PureWindowsPath"] = _partial_of(pathlib.PureWindowsPath)
    return names


def _torch_names() -> dict[tuple[str, str], Callable[[], Any]]:
    """Size, every dtype by all its names, and layouts by what makes them. All are immutable."""
    named = vars(torch).items()
    names = {("torch", n): _always(v) for n, v in named if isinstance(v, torch.dtype)}
    names["torch", "Size"] = _always(torch.Size)
    layouts = {str(value): value for _, value in named if isinstance(value, torch.layout)}
    names["torch.serialization", "_get_layout"] = lambda: dict(layouts).__getitem__
    return names


def _partial_of(function: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: functools.partial(function)


def _enum_member(factory: Any, name: str) -> Any:
    """`getattr` for the two enums of a checkpoint's metadata, and for nothing else."""
    cls = factory.func if type(factory) is functools.partial else None
    if cls not in METADATA_ENUMS or name not in cls.__members__:
        raise pickle.UnpicklingError(f"getattr of {factory!r}")
    return cls.__members__[name]


NAMES = _fixed_names()
