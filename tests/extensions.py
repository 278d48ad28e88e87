"""Stream transforms that a worker can import."""

from __future__ import annotations

import io
from typing import IO, Any, cast

from mpwriter._compat import ExtensionRegistry, StreamTransformExtension

__all__ = ["Mask", "Rotate", "Stubborn", "registry"]

_END = b"the end"


class _Transformed(io.RawIOBase):
    """Neither side can seek or tell; what it has gathered goes out in close()."""

    def __init__(self, extension: _ByteTransform, output: IO[bytes]) -> None:
        self._extension = extension
        self._output = output
        self._held = b""

    def writable(self) -> bool:
        return True

    def write(self, payload: Any) -> int:
        view = memoryview(payload).cast("B")
        self._output.write(self._extension.forth(self._held))
        self._held = bytes(view)
        return len(view)

    def close(self) -> None:
        if not self.closed:
            self._output.write(self._extension.forth(self._held) + _END)
            self._output.close()
            super().close()


class _Restored(io.RawIOBase):
    def __init__(self, extension: _ByteTransform, source: IO[bytes]) -> None:
        content = source.read(-1)
        if not content.endswith(_END):
            raise ValueError("the stream was not closed")
        self._content = io.BytesIO(extension.back(content[: -len(_END)]))

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self._content.read(size)


class _ByteTransform(StreamTransformExtension):
    """Changes every byte by itself."""

    name = ""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    @classmethod
    def registry_name(cls) -> str:
        return cls.name

    @classmethod
    def from_descriptor(cls, version: str) -> _ByteTransform:
        return cls(int(version))

    def get_descriptor(self) -> str:
        return f"{self.name}/{self.number}"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return cast(IO[bytes], _Transformed(self, output))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return cast(IO[bytes], _Restored(self, input))

    def forth(self, content: bytes) -> bytes:
        raise NotImplementedError

    def back(self, content: bytes) -> bytes:
        raise NotImplementedError


class Mask(_ByteTransform):
    """XOR with a number."""

    name = "stream.mask"

    def forth(self, content: bytes) -> bytes:
        return content.translate(bytes(value ^ self.number for value in range(256)))

    back = forth


class Rotate(_ByteTransform):
    """Adds a number; not the same before Mask as after it."""

    name = "stream.rotate"

    def forth(self, content: bytes) -> bytes:
        return content.translate(bytes((value + self.number) % 256 for value in range(256)))

    def back(self, content: bytes) -> bytes:
        return content.translate(bytes((value - self.number) % 256 for value in range(256)))


class Stubborn(Mask):
    """Fails in the middle of the second item it is given."""

    name = "stream.stubborn"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        self.number += 1
        return super().transform_to(output)

    def forth(self, content: bytes) -> bytes:
        if self.number > 1:
            raise ArithmeticError("this transform does not want to")
        return content


def registry() -> ExtensionRegistry:
    """One that knows them, and torch's own."""
    known = ExtensionRegistry()
    for kind in (Mask, Rotate):
        known.register(kind)
    return known
