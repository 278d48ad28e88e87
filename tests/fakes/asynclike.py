"""asynclike://, local files behind fsspec's event loop, as s3fs and gcsfs have it.

Every call is a coroutine that runs on the thread `fsspecIO` of its process. A file appears when
it is closed. Importable in a worker.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem, sync
from fsspec.spec import AbstractBufferedFile

__all__ = ["AsyncLikeFileSystem"]


class AsyncLikeFile(AbstractBufferedFile):
    def __init__(self, fs: AsyncLikeFileSystem, path: str, mode: str, **kwargs: Any) -> None:
        self._parts: list[bytes] = []
        super().__init__(fs, path, mode, **kwargs)

    def _upload_chunk(self, final: bool = False) -> bool:
        self._parts.append(self.buffer.getvalue())
        if final:
            sync(self.fs.loop, self.fs._pipe_file, self.path, b"".join(self._parts))
        return True

    def _fetch_range(self, start: int, end: int) -> bytes:
        content: bytes = self.fs.cat_file(self.path, start, end)
        return content


class AsyncLikeFileSystem(AsyncFileSystem):
    protocol = "asynclike"
    cachable = False  # an instance has its coroutines bound: one of before would miss a patch
    root_marker = "/"
    mpwriter_publishing = "close"

    async def _pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        await asyncio.sleep(0)
        await asyncio.to_thread(Path(self._strip_protocol(path)).write_bytes, value)

    async def _cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        content = await asyncio.to_thread(Path(self._strip_protocol(path)).read_bytes)
        return content[start:end]

    async def _info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        path = self._strip_protocol(path)
        kind = "directory" if os.path.isdir(path) else "file"
        return {"name": path, "size": os.stat(path).st_size, "type": kind}

    async def _ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        entries = [await self._info(f"{path}/{name}") for name in sorted(os.listdir(path))]
        return entries if detail else [entry["name"] for entry in entries]

    async def _rm_file(self, path: str, **kwargs: Any) -> None:
        os.remove(self._strip_protocol(path))

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(self._strip_protocol(path), exist_ok=exist_ok)

    def _open(
        self, path: str, mode: str = "rb", block_size: Any = None, **kwargs: Any
    ) -> AsyncLikeFile:
        return AsyncLikeFile(self, path, mode, block_size=block_size or 2**16, **kwargs)


fsspec.register_implementation(AsyncLikeFileSystem.protocol, AsyncLikeFileSystem, clobber=True)
