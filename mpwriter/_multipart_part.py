"""One part of an upload on its way: how the client of S3 is given its bytes.

Runs in: both. Torch-free; imports no s3fs. For `mpwriter._multipart`.

Given as a bytearray, the client holds a part three times: as a slice of it, joined to the headers,
and in the buffer of the connection. So it is given as something to be read piece by piece, each
piece when there is room for it in the connection, straight from the part's own memory.
Source: aiohttp, BytesPayload.write_with_length and StreamWriter._writelines; asyncio's transport.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import mmap
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from typing import Any

from mpwriter._checksum import crc32

__all__ = ["PartBody", "upload_part"]

# Of one write to the connection: past it the call's own cost is lost in that of the copy.
_PIECE_BYTES = 256 << 10


class PartBody:
    """The first `nbytes` of a buffer, as a file and as an asynchronous sequence of pieces.

    No io.IOBase: of those every piece would be read in a thread of its own.
    Source: aiobotocore.httpsession, _IOBaseWrapper; aiohttp.payload.IOBasePayload.
    """

    def __init__(self, buffer: bytearray | mmap.mmap, nbytes: int) -> None:
        self._view = memoryview(buffer)[:nbytes]
        self._position = 0

    def __len__(self) -> int:
        return len(self._view)

    def __bytes__(self) -> bytes:
        return bytes(self._view)

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        for start in range(self._position, len(self._view), _PIECE_BYTES):
            yield self._view[start : start + _PIECE_BYTES]

    def read(self, size: int = -1) -> memoryview:
        """For signatures, and for the checksums that the client computes on the way.

        A view of as much as was asked for: what is hashed in small pieces waits for the
        interpreter's lock at each of them, while the file's thread fills the next part.
        """
        start = self._position
        stop = len(self._view) if size is None or size < 0 else start + size
        piece = self._view[start:stop]
        self._position += len(piece)
        return piece

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._position, len(self._view))[whence]
        self._position = max(0, base + offset)
        return self._position

    def checksum(self) -> str:
        """Its CRC-32, as S3 writes it."""
        return base64.b64encode(crc32(self._view).to_bytes(4, "big")).decode("ascii")

    def release(self) -> None:
        """Let go of the buffer, which may be filled with other bytes from now on."""
        self._view = memoryview(b"")


async def upload_part(
    fs: Any, creating: Future[dict[str, Any]], body: PartBody, place: Mapping[str, Any]
) -> Any:
    """Send a part once there is an upload. Knows no sink: one that is dropped is discarded.

    Args:
        fs: s3fs.
        creating: the answer to create_multipart_upload.
        body: the part; released at the end.
        place: its Bucket, Key and PartNumber.

    Raises:
        Exception: what s3fs raises for either request.
    """
    try:
        # Shielded: who cancels a part must not end up with an upload whose id nobody knows.
        upload = await asyncio.shield(asyncio.wrap_future(creating))
        # An upload means that there is a client to ask.
        _ask_no_leave(fs)
        sums = {"ChecksumCRC32": body.checksum()} if _wants_sums(fs) else {}
        options = {**place, **sums, "UploadId": upload["UploadId"], "Body": body}
        return await fs._call_s3("upload_part", **options)
    finally:
        body.release()


def _ask_no_leave(fs: Any) -> None:
    """Send parts without the server's leave, for which the client asks before it sends a file.

    That would take a round trip a part; of bytes it sends them at once.
    Source: botocore.handlers.add_expect_header.
    """
    with contextlib.suppress(AttributeError):
        events = fs.s3.meta.events
        # Once a client, whoever else uses it; the id makes it so. Of all calls, as that handler is:
        # those of one call come first.
        events.register_last("before-call.s3", _drop_expect, unique_id=__name__)


def _drop_expect(params: dict[str, Any], **_: Any) -> None:
    if isinstance(params.get("body"), PartBody):
        params["headers"].pop("Expect", None)


def _wants_sums(fs: Any) -> bool:
    """Whether the client would compute a CRC-32 of each part in Python, as it does by default.

    Only without TLS: over TLS the client leaves the signature of the payload out, but only where it
    has computed the checksum itself.
    Source: botocore, S3SigV4Auth._should_sha256_sign_payload and httpchecksum.
    """
    try:
        meta = fs.s3.meta
        wanted = meta.config.request_checksum_calculation == "when_supported"
        named = "ChecksumAlgorithm" in fs.s3_additional_kwargs
        return bool(wanted and not named and meta.endpoint_url.startswith("http://"))
    except AttributeError:  # a botocore from before it had checksums
        return False
