"""An object of S3 in parts that are uploaded side by side, while the file is still being written.

Runs in: both. Torch-free; imports no s3fs, which whoever made the filesystem has done.

    write    fills a part; a full one is on its way at once, up to _IN_FLIGHT_BYTES of them
    publish  sends the rest, waits for all, completes the upload: now the object exists
    discard  ends what is on its way, aborts the upload: nothing is left, nothing is charged

A file that fits into one part is one PutObject. An s3fs file uploads its parts one after another,
so that it never gets more than one connection's speed.

What a killed process leaves is an upload that nobody completes. It is never visible, but its parts
are charged for: the next commit in that directory aborts it where the credentials may list uploads
(`abort_uploads`), and a lifecycle rule (AbortIncompleteMultipartUpload) does so everywhere.

s3fs has no public call for one part. `_call_s3`, which every file of s3fs goes through, is used
here and nowhere else; where it is missing the s3fs file serves, slower.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import mmap
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from mpwriter._leftovers import is_of_a_save, is_shard_of_save
from mpwriter._multipart_buffers import part_buffers
from mpwriter._multipart_part import PartBody, upload_part
from mpwriter._sink_base import Sink

__all__ = ["MultipartSink", "abort_uploads", "sends_parts"]

_logger = logging.getLogger(__name__)

# S3: at most 10,000 parts; each but the last at least 5 MiB, at most 5 GiB.
# Source: "Amazon S3 multipart upload limits".
_MAX_PARTS = 10_000
_MIN_PART_BYTES = 5 << 20

# 8 MiB: at 100 MB/s a connection is busy for 80 ms with it, twice a far store's round trip.
_PART_BYTES = 8 << 20
# Parts grow after as many, so that a file of any size fits (10,000 of them: 500 GB).
_PARTS_OF_A_SIZE = 2_000
# Copies of parts that a file holds at once, one more that is being filled not counted.
_IN_FLIGHT_BYTES = 64 << 20

# How long cancelled requests have to end before the upload is aborted.
_CANCEL_S = 10.0
# How long an upload has to come into being before it is given up; a later commit finds it.
_CREATE_S = 60.0


def sends_parts(fs: Any) -> bool:
    """Whether `fs` is an s3fs that this module knows how to use, and writes as s3fs does."""
    for base in type(fs).__mro__:
        if "_open" in vars(base):
            # The first class that says how files are opened: a subclass may have its reasons.
            known = base.__name__ == "S3FileSystem" and base.__module__.startswith("s3fs.")
            return known and callable(getattr(fs, "_call_s3", None)) and hasattr(fs, "loop")
    return False


class MultipartSink(Sink):
    """See above.

    Args:
        fs: s3fs. Its `default_block_size` (or `block_size`), where it was given, is the size of the
            parts; its `max_concurrency` how many are on their way at most; with
            `fixed_upload_size` all parts are of one size, as Cloudflare R2 wants them.
    """

    def __init__(self, fs: Any, path: str) -> None:
        super().__init__(fs, path, None)
        self._bucket, self._key, _ = fs.split_path(path)
        size = fs.storage_options.get("block_size") or fs.default_block_size
        own = size == type(fs).default_block_size
        self._part_bytes = _PART_BYTES if own else max(int(size), _MIN_PART_BYTES)
        self._grows = own and not getattr(fs, "fixed_upload_size", False)
        self._part: mmap.mmap | None = None
        self._filled = 0  # bytes of it that count
        self._upload: Future[dict[str, Any]] | None = None  # that there is one, and its id
        self._on_the_way: dict[Future[Any], tuple[int, mmap.mmap]] = {}  # -> number, buffer
        self._parts: dict[int, dict[str, Any]] = {}
        self._num_parts = 0
        self._completing = False
        self._file = ()  # there is something to be discarded

    def write(self, chunk: bytes | bytearray | memoryview) -> None:
        """Append all of `chunk`; it may be reused as soon as this returns. See `Sink.write`."""
        self._require_open()
        view = memoryview(chunk).cast("B") if len(chunk) else memoryview(b"")
        self._broken = True
        self._look()
        while view:
            taken = view[: self._part_bytes - self._filled]
            self._fill(taken)
            self.position += len(taken)
            view = view[len(taken) :]
            if self._filled == self._part_bytes:
                self._send_part()
        self._broken = False

    # -- parts ---------------------------------------------------------------------------

    def _fill(self, chunk: memoryview) -> None:
        if self._part is None:
            self._part = part_buffers.take(self._part_bytes)
        end = self._filled + len(chunk)
        self._part[self._filled : end] = chunk
        self._filled = end

    def _send_part(self, *, last: bool = False) -> None:
        if self._num_parts >= _MAX_PARTS:
            raise OSError(
                errno.EFBIG,
                f"S3 takes {_MAX_PARTS} parts a file, and those of this one have"
                f" {self._part_bytes} bytes: pass a larger default_block_size to s3fs",
                self.path,
            )
        if self._upload is None:
            # Not waited for: parts are filled meanwhile, and leave as soon as it is there.
            self._upload = self._start("create_multipart_upload")
        self._wait_for_room(last)
        part, self._part = self._part, None
        assert part is not None
        body = PartBody(part, self._filled)
        self._filled = 0
        self._num_parts += 1
        place = {"Bucket": self._bucket, "Key": self._key, "PartNumber": self._num_parts}
        sent = self._run(upload_part(self._fs, self._upload, body, place))
        self._on_the_way[sent] = self._num_parts, part
        if self._grows and self._num_parts % _PARTS_OF_A_SIZE == 0:
            self._part_bytes *= 2

    def _wait_for_room(self, last: bool) -> None:
        limit = max(1, self._fs.max_concurrency)
        if not last:  # which is in memory already, and would cost a round trip of its own
            limit = max(1, min(limit, _IN_FLIGHT_BYTES // self._part_bytes))
        while len(self._on_the_way) >= limit:
            self._wait()

    def _wait(self) -> None:
        wait(self._on_the_way, return_when=FIRST_COMPLETED)
        self._look()
        if self.progressed is not None:
            self.progressed()

    def _look(self) -> None:
        """Note the parts that have arrived.

        Raises:
            OSError: one was refused.
        """
        for sent in [future for future in self._on_the_way if future.done()]:
            number, buffer = self._on_the_way.pop(sent)
            answer = sent.result()
            part_buffers.give_back(buffer)
            named = {name: answer[name] for name in answer if name.startswith("Checksum")}
            named.pop("ChecksumType", None)  # of the whole object; refused as a part's
            self._parts[number] = {"PartNumber": number, "ETag": answer["ETag"], **named}

    # -- the end -------------------------------------------------------------------------

    def _publish(self) -> None:
        if self._upload is None:
            self._completing = True
            # A bytearray, no bytes: those the client wraps into a file, and for a file it asks the
            # server for leave before it sends it, which takes a round trip more.
            # Source: botocore.handlers.convert_body_to_file_like_object, add_expect_header.
            part, self._part = self._part, None
            self._call("put_object", Body=bytearray(part[: self._filled] if part else b""))
            if part is not None:
                part_buffers.give_back(part)
            return
        if self._filled:
            self._send_part(last=True)
        while self._on_the_way:
            self._wait()
        parts = [self._parts[number] for number in sorted(self._parts)]
        self._completing = True
        self._call(
            "complete_multipart_upload",
            UploadId=self._upload.result()["UploadId"],
            MultipartUpload={"Parts": parts},
        )

    def _discard(self, file: Any) -> None:
        for sent in self._on_the_way:
            sent.cancel()
        # One that still arrives after the abort would be left, and charged for.
        wait(self._on_the_way, timeout=_CANCEL_S)
        self._on_the_way.clear()
        try:
            if self._upload is not None:
                # Waited for, not cancelled: the store may have it by now.
                upload = self._upload.result(_CREATE_S)
                _abort(self._fs, self._bucket, self._key, upload["UploadId"])
        finally:
            if self._completing and is_shard_of_save(self._key.rpartition("/")[2]):
                # It has failed, or only the word of it was lost: the name is this save's own.
                with contextlib.suppress(FileNotFoundError):
                    self._call("delete_object")

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._start(method, **arguments).result()

    def _start(self, method: str, **arguments: Any) -> Future[Any]:
        return self._run(self._fs._call_s3(method, Bucket=self._bucket, Key=self._key, **arguments))

    def _run(self, calling: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(calling, self._fs.loop)


def abort_uploads(
    fs: Any, root: str, spared: Collection[str], *, rank: int | None = None
) -> list[str]:
    """Abort the uploads of shards below `root` that nobody completes any more.

    Args:
        fs: any filesystem; nothing is done for one that this module does not write to.
        root: a checkpoint's directory, none of whose saves is under way but those of `spared`.
        spared: the save ids, first letters, that are.
        rank: only this rank's: the others save at the same time, each on its own.

    Returns:
        The names of the files that the uploads were for.

    Raises:
        Nothing: without the permission to list uploads nothing is aborted.
    """
    if not sends_parts(fs):
        return []
    aborted = []
    bucket, prefix, _ = fs.split_path(f"{root}/")
    try:
        for upload in _uploads(fs.call_s3, bucket, prefix):
            name = upload["Key"][len(prefix) :]
            alive = any(f".{token}." in name for token in spared)
            foreign = rank is not None and not name.startswith((f"__{rank}_", f"__{rank}."))
            if is_of_a_save(name) and not alive and not foreign:
                _abort(fs, bucket, upload["Key"], upload["UploadId"])
                aborted.append(name)
    except Exception as exc:
        _logger.debug("unfinished uploads below %s cannot be listed or aborted: %s", root, exc)
    return aborted


def _uploads(call: Callable[..., Any], bucket: str, prefix: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    markers: dict[str, str] = {}
    while True:
        page = call("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **markers)
        found += page.get("Uploads") or []
        if not page.get("IsTruncated"):
            return found
        markers = {
            "KeyMarker": page["NextKeyMarker"],
            "UploadIdMarker": page.get("NextUploadIdMarker", ""),
        }


def _abort(fs: Any, bucket: str, key: str, upload_id: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # NoSuchUpload: it is gone already
        fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload_id)
