"""A stream transform that changes nothing and writes down how many threads torch would use.

Importable in a worker; imports torch.
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import IO, Any

import torch

from mpwriter._compat import StreamTransformExtension

__all__ = ["ThreadCountExtension"]


class _Through(io.RawIOBase):
    def __init__(self, output: IO[bytes]) -> None:
        self._output = output

    def writable(self) -> bool:
        return True

    def write(self, chunk: Any) -> int:
        self._output.write(chunk)
        return memoryview(chunk).nbytes


class ThreadCountExtension(StreamTransformExtension):
    """Leaves `{pid}.json` in `folder` where it is applied."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    @staticmethod
    def registry_name() -> str:
        return "stream.thread_count"

    @staticmethod
    def from_descriptor(version: str) -> ThreadCountExtension:
        return ThreadCountExtension("")

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        counts = {"pid": os.getpid(), "threads": torch.get_num_threads()}
        Path(self.folder, f"{os.getpid()}.json").write_text(json.dumps(counts))
        return _Through(output)  # type: ignore[return-value]

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return input
