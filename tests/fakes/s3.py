"""A stand-in for s3fs: the few calls that mpwriter makes of it, on objects in memory."""

# ruff: noqa: N803 - the arguments are those of S3

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from fsspec.asyn import get_loop

__all__ = ["S3FileSystem", "subclass_that_opens_otherwise"]


class S3FileSystem:
    """Answers as S3 does. Not a real fsspec filesystem.

    Attributes:
        objects: by key.
        uploads: parts by upload id, of uploads that are neither completed nor aborted.
        calls: names of the methods, in the order in which they began.
        most_at_once: of upload_part.
        meeting_s: how long a part waits for others to be on their way at the same time.
        refuse: called with (method, arguments) before each call; may raise, or wait.
    """

    default_block_size: int | None = 50 << 20
    protocol = ("s3", "s3a")
    fixed_upload_size = False

    def __init__(self, max_concurrency: int = 10, **options: Any) -> None:
        self.storage_options = options
        if "default_block_size" in options:
            self.default_block_size = options["default_block_size"]
        self.max_concurrency = max_concurrency
        self.loop = get_loop()
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.keys: dict[str, str] = {}
        self.calls: list[str] = []
        self.most_at_once = 0
        self.meeting_s = 0.005
        self.refuse: Callable[[str, dict[str, Any]], None] = lambda method, arguments: None
        self._at_once = 0
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        raise AssertionError("the file objects of s3fs are not used here")

    def split_path(self, path: str) -> tuple[str, str, None]:
        bucket, _, key = path.partition("/")
        return bucket, key, None

    def invalidate_cache(self, path: str | None = None) -> None:
        """There is none."""

    def call_s3(self, method: str, **arguments: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(
            self._call_s3(method, **arguments), self.loop
        ).result()

    async def _call_s3(self, method: str, **arguments: Any) -> Any:
        self.calls.append(method)
        is_part = method == "upload_part"
        self._at_once += is_part
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await asyncio.sleep(0)
            if is_part:
                await self._meet()
            self.refuse(method, arguments)
            return getattr(self, f"_{method}")(**arguments)
        finally:
            self._at_once -= is_part

    async def _meet(self) -> None:
        """Wait for as many parts as may be on their way at once, as far as more come in time."""
        end_s = time.monotonic() + self.meeting_s
        while self.most_at_once < self.max_concurrency and time.monotonic() < end_s:
            await asyncio.sleep(0.001)

    def _create_multipart_upload(self, Bucket: str, Key: str) -> dict[str, Any]:
        number = f"upload{next(self._numbers)}"
        self.uploads[number] = {}
        self.keys[number] = Key
        return {"UploadId": number}

    def _upload_part(
        self, Bucket: str, Key: str, UploadId: str, PartNumber: int, Body: Any
    ) -> dict[str, Any]:
        self.uploads[UploadId][PartNumber] = bytes(Body)
        return {"ETag": f"tag{PartNumber}", "ChecksumCRC32": f"crc{PartNumber}"}

    def _complete_multipart_upload(
        self, Bucket: str, Key: str, UploadId: str, MultipartUpload: dict[str, Any]
    ) -> dict[str, Any]:
        held = self.uploads.pop(UploadId)
        parts = MultipartUpload["Parts"]
        assert [part["PartNumber"] for part in parts] == sorted(held)
        assert all(part["ETag"] == f"tag{part['PartNumber']}" for part in parts)
        assert all(len(held[n]) >= 5 << 20 for n in sorted(held)[:-1]), "EntityTooSmall"
        self.objects[Key] = b"".join(held[number] for number in sorted(held))
        return {}

    def _abort_multipart_upload(self, Bucket: str, Key: str, UploadId: str) -> dict[str, Any]:
        if self.uploads.pop(UploadId, None) is None:
            raise FileNotFoundError(UploadId)
        return {}

    def _put_object(self, Bucket: str, Key: str, Body: bytes) -> dict[str, Any]:
        self.objects[Key] = bytes(Body)
        return {}

    def _delete_object(self, Bucket: str, Key: str) -> dict[str, Any]:
        self.objects.pop(Key, None)
        return {}

    def _list_multipart_uploads(
        self, Bucket: str, Prefix: str, KeyMarker: str = "", UploadIdMarker: str = ""
    ) -> dict[str, Any]:
        """Two a page."""
        found = sorted(
            (self.keys[number], number)
            for number in self.uploads
            if self.keys[number].startswith(Prefix)
            and (self.keys[number], number) > (KeyMarker, UploadIdMarker)
        )
        page: dict[str, Any] = {
            "Uploads": [{"Key": key, "UploadId": number} for key, number in found[:2]]
        }
        if len(found) > 2:
            page |= {
                "IsTruncated": True,
                "NextKeyMarker": found[1][0],
                "NextUploadIdMarker": found[1][1],
            }
        return page


# Known by its name and its module, as the real one is.
S3FileSystem.__module__ = "s3fs.core"


def subclass_that_opens_otherwise() -> type[S3FileSystem]:
    """What somebody makes to encrypt, say."""

    class Encrypting(S3FileSystem):
        def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
            return super()._open(path, mode, **kwargs)

    return Encrypting
