"""One part of an upload as the client of S3 takes it."""

from __future__ import annotations

import asyncio
import hashlib
import os
from functools import partial
from typing import Any

import pytest

from mpwriter._multipart_part import PartBody, _drop_expect

MIB = 1 << 20


async def _pieces(body: PartBody) -> list[bytes]:
    return [bytes(piece) async for piece in body]


@pytest.mark.parametrize("nbytes", [0, 1, 256 << 10, 3 * MIB + 7])
def test_part_is_the_same_by_every_way_when_it_is_read(nbytes: int) -> None:
    buffer = bytearray(os.urandom(4 * MIB))
    expected = bytes(buffer[:nbytes])
    body = PartBody(buffer, nbytes)
    assert len(body) == nbytes and bytes(body) == expected
    for _ in range(2):  # a request that is made again
        assert b"".join(iter(partial(body.read, MIB), b"")) == expected
        assert body.tell() == nbytes
        body.seek(0)
        assert b"".join(asyncio.run(_pieces(body))) == expected
    assert body.read() == expected
    assert body.seek(-1, 2) == max(0, nbytes - 1)
    assert body.read() == expected[-1:]


def test_part_makes_no_copy_when_it_is_sent() -> None:
    """F17: the pieces are views of the part's own memory."""
    buffer = bytearray(2 * MIB)

    async def case() -> None:
        async for piece in PartBody(buffer, len(buffer)):
            assert isinstance(piece, memoryview) and piece.obj is buffer
            assert len(piece) <= MIB

    asyncio.run(case())


def test_buffer_may_grow_again_when_the_part_is_released() -> None:
    buffer = bytearray(b"x" * 100)
    body = PartBody(buffer, 50)
    with pytest.raises(BufferError):
        buffer.extend(b"more")
    body.release()
    buffer.extend(b"more")
    assert len(body) == 0


def test_only_our_own_bodies_go_without_leave() -> None:
    def headers_of(body: Any) -> dict[str, str]:
        params = {"body": body, "headers": {"Expect": "100-continue", "other": "1"}}
        _drop_expect(params, model=None)
        return dict(params["headers"])

    assert headers_of(PartBody(bytearray(3), 3)) == {"other": "1"}
    assert headers_of(b"abc") == {"Expect": "100-continue", "other": "1"}


def test_client_signs_and_sends_the_part_at_once_when_it_is_real() -> None:
    """What botocore makes of it: the length, the signature, no leave to ask for."""
    import botocore.session

    from mpwriter._multipart_part import _ask_no_leave

    sent: list[Any] = []

    class Fs:
        s3 = botocore.session.Session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url="http://127.0.0.1:9",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
        )

    def keep(request: Any, **_: Any) -> None:
        sent.append(request)
        raise InterruptedError  # nothing is sent

    Fs.s3.meta.events.register("before-send.s3", keep)
    content = os.urandom(5 * MIB)
    for _ in range(2):
        _ask_no_leave(Fs)
    with pytest.raises(InterruptedError):
        Fs.s3.upload_part(
            Bucket="bucket",
            Key="key",
            UploadId="id",
            PartNumber=1,
            Body=PartBody(bytearray(content), len(content)),
            ChecksumCRC32="AAAAAA==",
        )
    headers = {name.lower(): value for name, value in sent[0].headers.items()}
    assert "expect" not in headers
    assert headers["content-length"] == str(len(content))
    assert headers["x-amz-content-sha256"] == hashlib.sha256(content).hexdigest().encode()
    Fs.s3.close()
