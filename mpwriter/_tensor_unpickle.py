"""The `data.pkl` record of a torch.save container, read without torch or pickle.

Runs in: both.

`load_tensor` understands what torch.save emits for one plain tensor (contiguous, a view, a
Parameter) and executes nothing: the interpreter knows only those opcodes, and builds a plain
record where pickle would call a function.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from mpwriter._tensor_pickle import (
    DTYPE_OF_STORAGE,
    ELEMENT_BYTES,
    HOOKS,
    PROTOCOL_2,
    REBUILD,
    UNTYPED_STORAGE,
    contiguous_stride,
    num_elements,
)

__all__ = ["PickledTensor", "load_tensor"]

_MAX_DIMENSIONS = 64  # Source: what torch's operators take (at::TensorIterator)
# That many sizes and strides at their longest come to about 1.5 KiB.
_MAX_PICKLE_BYTES = 4096
_INT64_MAX = 2**63 - 1


class PickledTensor(NamedTuple):
    """One plain strided tensor over one CPU storage.

    `shape`, `stride` and `storage_offset` count elements; `storage_key` names the zip record
    `data/{storage_key}`, which holds at least `storage_nbytes` bytes. No number is negative or
    over 2**63 - 1; whether the tensor fits its storage is not looked at here. `whole` says that it
    is contiguous over exactly its storage, as `dump_tensor` writes it.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    storage_key: str
    storage_nbytes: int
    whole: bool


def load_tensor(pickled: bytes | memoryview) -> PickledTensor | None:
    """Read what torch.save pickles for one plain strided CPU tensor or Parameter.

    Args:
        pickled: the whole pickle.

    Returns:
        None where it is anything else, or malformed. Nothing is imported or called, and
        neither time nor memory grows with a number that the pickle states.

    Thread-safe. Results are cached: a checkpoint holds the same few shapes again and again.
    """
    if len(pickled) > _MAX_PICKLE_BYTES:
        return None
    return _load_cached(bytes(pickled))


@lru_cache(maxsize=2048)
def _load_cached(pickled: bytes) -> PickledTensor | None:
    try:
        return _as_tensor(_evaluate(pickled))
    except (_Foreign, LookupError, ValueError, struct.error):
        return None


class _Foreign(Exception):
    """The pickle is not one of those that this module reads."""


class _Global(NamedTuple):
    name: str


class _Call(NamedTuple):
    function: str
    args: tuple[Any, ...]


class _Storage(NamedTuple):
    args: tuple[Any, ...]


def _evaluate(pickled: bytes) -> object:
    """Run the opcodes. Every step moves on by a byte or more, so it ends."""
    if not pickled.startswith(PROTOCOL_2):
        raise _Foreign
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    position = 2
    while (opcode := pickled[position : position + 1]) != b".":
        position += 1
        if opcode in _LITERALS:
            literal, position = _LITERALS[opcode](pickled, position)
            stack.append(literal)
        elif opcode == b"(":
            marks.append(len(stack))
        elif opcode == b"t":
            start = marks.pop()
            if start > len(stack):
                raise _Foreign
            stack[start:] = [tuple(stack[start:])]
        elif opcode in _REDUCERS:
            _REDUCERS[opcode](stack)
        elif opcode == b"q":
            memo[pickled[position]] = stack[-1]
            position += 1
        elif opcode == b"h":
            stack.append(memo[pickled[position]])
            position += 1
        else:  # also the end of a pickle without STOP
            raise _Foreign
    if len(stack) != 1 or marks or position + 1 != len(pickled):
        raise _Foreign
    return stack[0]


def _read_number(layout: str) -> Callable[[bytes, int], tuple[object, int]]:
    number = struct.Struct(layout)

    def read(pickled: bytes, position: int) -> tuple[object, int]:
        return number.unpack_from(pickled, position)[0], position + number.size

    return read


def _read_long(pickled: bytes, position: int) -> tuple[object, int]:
    start, end = position + 1, position + 1 + pickled[position]
    return int.from_bytes(pickled[start:end], "little", signed=True), end


def _read_text(pickled: bytes, position: int) -> tuple[object, int]:
    start = position + 4
    end = start + int.from_bytes(pickled[position:start], "little")
    if end > len(pickled):
        raise _Foreign
    return str(pickled[start:end], "utf-8"), end


def _read_global(pickled: bytes, position: int) -> tuple[object, int]:
    middle = pickled.index(b"\n", position)
    end = pickled.index(b"\n", middle + 1)
    module, name = pickled[position:middle], pickled[middle + 1 : end]
    return _Global(f"{module.decode('ascii')} {name.decode('ascii')}"), end + 1


_LITERALS: dict[bytes, Callable[[bytes, int], tuple[object, int]]] = {
    b"K": _read_number("<B"),
    b"M": _read_number("<H"),
    b"J": _read_number("<i"),
    b"\x8a": _read_long,
    b"X": _read_text,
    b"c": _read_global,
    b"\x88": lambda _, position: (True, position),
    b"\x89": lambda _, position: (False, position),
    b")": lambda _, position: ((), position),
}


def _collect(count: int) -> Callable[[list[Any]], None]:
    def collect(stack: list[Any]) -> None:
        if len(stack) < count:
            raise _Foreign
        stack[-count:] = [tuple(stack[-count:])]

    return collect


def _call(stack: list[Any]) -> None:
    args, function = stack.pop(), stack.pop()
    if type(function) is not _Global or type(args) is not tuple:
        raise _Foreign
    stack.append(_Call(function.name, args))


def _open_storage(stack: list[Any]) -> None:
    args = stack.pop()
    if type(args) is not tuple:
        raise _Foreign
    stack.append(_Storage(args))


_REDUCERS: dict[bytes, Callable[[list[Any]], None]] = {
    b"\x85": _collect(1),
    b"\x86": _collect(2),
    b"\x87": _collect(3),
    b"R": _call,
    b"Q": _open_storage,
}


# The checks below never compare or print a whole value: tuples may share parts through the memo
# so that a short pickle spells out to gigabytes.


def _as_tensor(value: object) -> PickledTensor:
    if type(value) is not _Call:
        raise _Foreign
    args = value.args
    if value.function == "torch._utils _rebuild_parameter":
        if len(args) != 3 or type(args[0]) is not _Call or type(args[1]) is not bool:
            raise _Foreign
        _check_hooks(args[2])
        value, args = args[0], args[0].args
    if value.function == REBUILD + "2" and len(args) == 6:
        dtype = None
    elif value.function == REBUILD + "3" and len(args) == 7 and type(args[6]) is _Global:
        dtype = args[6].name.removeprefix("torch ")
    else:  # one more argument holds a conj or neg bit
        raise _Foreign
    if type(args[4]) is not bool:
        raise _Foreign
    _check_hooks(args[5])
    dtype, key, storage_nbytes = _as_storage(args[0], dtype)
    shape, stride = _as_ints(args[2]), _as_ints(args[3])
    if len(shape) != len(stride) or len(shape) > _MAX_DIMENSIONS:
        raise _Foreign
    offset = _as_int(args[1])
    whole = (
        offset == 0
        and stride == contiguous_stride(shape)
        and num_elements(shape) * ELEMENT_BYTES[dtype] == storage_nbytes
    )
    return PickledTensor(dtype, shape, stride, offset, key, storage_nbytes, whole)


def _as_storage(storage: object, dtype: str | None) -> tuple[str, str, int]:
    if type(storage) is not _Storage or len(storage.args) != 5:
        raise _Foreign
    kind, storage_class, key, location, numel = storage.args
    if type(storage_class) is not _Global or not type(kind) is type(key) is type(location) is str:
        raise _Foreign
    if kind != "storage" or location != "cpu":
        raise _Foreign
    if dtype is None:
        dtype = DTYPE_OF_STORAGE[storage_class.name]
        return dtype, key, _as_int(_as_int(numel) * ELEMENT_BYTES[dtype])
    if storage_class.name != UNTYPED_STORAGE or dtype not in ELEMENT_BYTES:
        raise _Foreign
    return dtype, key, _as_int(numel)


def _as_ints(numbers: object) -> tuple[int, ...]:
    if type(numbers) is not tuple:
        raise _Foreign
    return tuple(map(_as_int, numbers))


def _as_int(number: object) -> int:
    if type(number) is not int or not 0 <= number <= _INT64_MAX:
        raise _Foreign
    return number


def _check_hooks(hooks: object) -> None:
    if type(hooks) is not _Call or hooks.function != HOOKS or len(hooks.args) != 0:
        raise _Foreign
