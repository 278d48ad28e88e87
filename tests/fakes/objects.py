"""Object stores that follow a FaultPlan.

objectlike://   copies but does not rename; a file appears when it is closed
commitlike://   files appear at commit(), as s3fs and gcsfs have it
closelike://    ignores autocommit, files appear at close(), as adlfs has it

Importable in a worker, as fault:// is.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from tests.fakes.filesystems import Planned

__all__ = ["CloseLikeFileSystem", "CommitLikeFileSystem", "ObjectLikeFileSystem"]


class ObjectFile(AbstractBufferedFile):
    """An upload in parts. As with the real ones, closing it or losing it publishes it."""

    def __init__(self, fs: ObjectLikeFileSystem, path: str, mode: str, **kwargs: Any) -> None:
        self.parts: list[bytes] = []
        self._num_writes = 0
        kwargs["autocommit"] = kwargs.get("autocommit", True) or not fs.honours_autocommit
        super().__init__(fs, path, mode, **kwargs)

    def write(self, chunk: Any) -> int:
        self._num_writes += 1
        nbytes = memoryview(chunk).nbytes
        with self.fs.step(
            "write", self.path, nbytes=nbytes, nth=self._num_writes, position=self.loc
        ) as (kind, value):
            return int(super().write(chunk[:value] if kind == "short" else chunk))

    def _initiate_upload(self) -> None:
        with self.fs.step("create_upload", self.path):
            self.parts = []

    def _upload_chunk(self, final: bool = False) -> bool:
        part = self.buffer.getvalue()
        if part:
            number = len(self.parts) + 1
            with self.fs.step("upload_part", self.path, nbytes=len(part), nth=number):
                if number > self.fs.max_parts:
                    raise OSError(
                        errno.EINVAL,
                        f"Part number must be an integer between 1 and {self.fs.max_parts}",
                    )
                self.parts.append(part)
        if final and self.autocommit:
            self.commit()
        return True

    def commit(self) -> None:
        nbytes = sum(map(len, self.parts))
        with self.fs.step("commit", self.path, nbytes=nbytes):
            self.fs.put_object(self.path, b"".join(self.parts))

    def discard(self) -> None:
        with self.fs.step("discard", self.path):
            self.parts = []

    def close(self) -> None:
        if self.closed:
            return
        with self.fs.step("close" if "w" in self.mode else "close_read", self.path):
            super().close()

    def _fetch_range(self, start: int, end: int) -> bytes:
        with self.fs.step("read", self.path, nbytes=end - start), open(self.path, "rb") as file:
            file.seek(start)
            return file.read(end - start)


class ObjectLikeFileSystem(Planned, AbstractFileSystem):
    """Keys and objects, kept as local files; directories come and go with them.

    Args:
        plan: folder of the FaultPlan.
        block_size: bytes of a part.
        max_parts: parts that one object may have.
    """

    protocol = "objectlike"
    root_marker = "/"
    honours_autocommit = False

    def __init__(
        self,
        plan: str | None = None,
        block_size: int = 5 * 2**20,
        max_parts: int = 10_000,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.read_plan(plan)
        self.part_bytes = block_size
        self.max_parts = max_parts

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any
    ) -> ObjectFile:
        autocommit = kwargs.get("autocommit")
        with self.step("open_read" if "r" in mode else "open", path, autocommit=autocommit):
            return ObjectFile(self, path, mode, block_size=block_size or self.part_bytes, **kwargs)

    def put_object(self, path: str, payload: bytes) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        draft = f"{path}.{uuid.uuid4().hex}.draft"
        with open(draft, "wb") as file:
            file.write(payload)
        os.replace(draft, path)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        with self.step("cp", path2):
            source = self._strip_protocol(path1)
            with open(source, "rb") as file:
                self.put_object(self._strip_protocol(path2), file.read())

    def rm_file(self, path: str) -> None:
        with self.step("rm", path):
            os.remove(self._strip_protocol(path))

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        if recursive:
            shutil.rmtree(self._strip_protocol(path))
        else:
            self.rm_file(path)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        with self.step("info", path):
            status = os.stat(path)
        kind = "directory" if os.path.isdir(path) else "file"
        return {
            "name": path,
            "size": status.st_size,
            "type": kind,
            "mtime": status.st_mtime,
        }

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        with self.step("ls", path):
            names = sorted(os.listdir(path))
        entries = [self.info(f"{path}/{name}") for name in names]
        return entries if detail else [entry["name"] for entry in entries]


class CommitLikeFileSystem(ObjectLikeFileSystem):
    """Files appear at commit(); close() only sends the rest."""

    protocol = "commitlike"
    honours_autocommit = True
    mpwriter_publishing = "commit"


class CloseLikeFileSystem(ObjectLikeFileSystem):
    """Files appear at close(); autocommit is ignored."""

    protocol = "closelike"
    mpwriter_publishing = "close"


for _class in (ObjectLikeFileSystem, CommitLikeFileSystem, CloseLikeFileSystem):
    fsspec.register_implementation(_class.protocol, _class, clobber=True)
