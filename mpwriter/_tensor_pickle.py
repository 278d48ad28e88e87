"""The `data.pkl` record of a torch.save container, written without torch or pickle.

Runs in: both. Imports nothing of the package.

`dump_tensor` gives byte for byte what torch.save pickles for a contiguous, detached CPU tensor.

Source for the layout: `Tensor._reduce_ex_internal` (torch/_tensor.py) and `_save`
(torch/serialization.py), the same from torch 2.7 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = [
    "DTYPE_OF_STORAGE",
    "ELEMENT_BYTES",
    "HOOKS",
    "PROTOCOL_2",
    "REBUILD",
    "UNTYPED_STORAGE",
    "contiguous_stride",
    "dump_tensor",
    "num_elements",
]

# dtype -> (class of its typed storage, bytes per element): rebuilt by _rebuild_tensor_v2.
_TYPED = {
    "bfloat16": ("BFloat16Storage", 2),
    "bool": ("BoolStorage", 1),
    "complex128": ("ComplexDoubleStorage", 16),
    "complex64": ("ComplexFloatStorage", 8),
    "float16": ("HalfStorage", 2),
    "float32": ("FloatStorage", 4),
    "float64": ("DoubleStorage", 8),
    "int16": ("ShortStorage", 2),
    "int32": ("IntStorage", 4),
    "int64": ("LongStorage", 8),
    "int8": ("CharStorage", 1),
    "uint8": ("ByteStorage", 1),
}
# dtype -> bytes per element, for the dtypes without a typed storage: _rebuild_tensor_v3.
# Source: torch.storage._new_dtypes(). int1..int7 and uint1..uint7 are in neither table because
# torch.save refuses them, quantized dtypes because they are no plain tensors.
_UNTYPED = {
    "bits16": 2,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
    "bits8": 1,
    "complex32": 4,
    "float4_e2m1fn_x2": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
}

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType(
    {name: nbytes for name, (_, nbytes) in _TYPED.items()} | _UNTYPED
)
"""dtype name without "torch." -> bytes of one element: every dtype that has a container."""

DTYPE_OF_STORAGE = {f"torch {storage}": dtype for dtype, (storage, _) in _TYPED.items()}
"""Global that names a typed storage, as "module name" -> its dtype."""

PROTOCOL_2 = b"\x80\x02"
# Globals, as "module name"; the first is followed by "2" (typed storage) or "3" (untyped).
REBUILD = "torch._utils _rebuild_tensor_v"
UNTYPED_STORAGE = "torch.storage UntypedStorage"
HOOKS = "collections OrderedDict"


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, that torch gives a contiguous tensor of `shape`."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def num_elements(shape: tuple[int, ...]) -> int:
    """How many elements a tensor of `shape` has; 1 for a 0-d tensor."""
    count = 1
    for size in shape:
        count *= size
    return count


def _int(number: int) -> bytes:
    if number < 0x100:
        return b"K%c" % number
    if number < 0x10000:
        return b"M" + number.to_bytes(2, "little")
    if number < 0x80000000:
        return b"J" + number.to_bytes(4, "little")
    nbytes = number.bit_length() // 8 + 1
    return b"\x8a%c" % nbytes + number.to_bytes(nbytes, "little")


def _text(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode("ascii")


def _global(name: str) -> bytes:
    return b"c%s\n" % name.replace(" ", "\n").encode("ascii")


class _Pickle:
    """Bytes of a pickle, with the memo numbers that Python's pickler hands out."""

    def __init__(self) -> None:
        self.parts: list[bytes] = [PROTOCOL_2]
        self.num_memos = 0

    def put(self, *parts: bytes) -> None:
        self.parts.extend(parts)

    def put_memoized(self, *parts: bytes) -> None:
        self.parts.extend(parts)
        self.parts.append(b"q%c" % self.num_memos)
        self.num_memos += 1

    def put_ints(self, numbers: tuple[int, ...]) -> None:
        if not numbers:
            self.put(b")")  # the empty tuple is not memoized
        elif len(numbers) <= 3:
            self.put_memoized(*map(_int, numbers), b"%c" % (0x84 + len(numbers)))
        else:
            self.put_memoized(b"(", *map(_int, numbers), b"t")


def dump_tensor(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Pickle a contiguous tensor over storage "0" of exactly its size.

    Args:
        dtype: a key of ELEMENT_BYTES.
        shape: in elements.

    Raises:
        KeyError: the dtype has no container.

    Thread-safe.
    """
    typed = _TYPED.get(dtype)
    storage_class = f"torch {typed[0]}" if typed else UNTYPED_STORAGE
    storage_numel = num_elements(shape) * (1 if typed else _UNTYPED[dtype])
    pickle = _Pickle()
    pickle.put_memoized(_global(REBUILD + ("2" if typed else "3")))
    pickle.put(b"((")
    pickle.put_memoized(_text("storage"))
    pickle.put_memoized(_global(storage_class))
    pickle.put_memoized(_text("0"))
    pickle.put_memoized(_text("cpu"))
    pickle.put_memoized(_int(storage_numel), b"t")
    pickle.put(b"Q", _int(0))
    pickle.put_ints(shape)
    pickle.put_ints(contiguous_stride(shape))
    pickle.put(b"\x89")  # requires_grad
    pickle.put_memoized(_global(HOOKS))
    pickle.put_memoized(b")R")
    if not typed:
        pickle.put_memoized(_global(f"torch {dtype}"))
    pickle.put_memoized(b"t")
    pickle.put_memoized(b"R")
    pickle.put(b".")
    return b"".join(pickle.parts)
