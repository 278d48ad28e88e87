"""Objects in parts that are uploaded side by side."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from typing import Any

import pytest

from mpwriter import _multipart
from mpwriter._multipart import MultipartSink, abort_uploads, sends_parts
from tests.fakes.s3 import S3FileSystem, subclass_that_opens_otherwise

MIB = 1 << 20
NAME = "__0_0.0123abcd.distcp"
PATH = f"bucket/run/{NAME}"
KEY = f"run/{NAME}"


def test_only_an_s3fs_that_opens_files_as_s3fs_does_sends_parts() -> None:
    import s3fs
    from fsspec.implementations.local import LocalFileSystem

    class Renamed(s3fs.S3FileSystem):  # type: ignore[misc]
        protocol = "mine"

    assert sends_parts(S3FileSystem())
    assert sends_parts(s3fs.S3FileSystem(anon=True, skip_instance_cache=True))
    assert sends_parts(Renamed(anon=True, skip_instance_cache=True))
    assert not sends_parts(subclass_that_opens_otherwise()())
    assert not sends_parts(LocalFileSystem())


def test_s3fs_files_serve_when_it_has_no_call_for_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(S3FileSystem, "_call_s3", None)
    assert not sends_parts(S3FileSystem())


@pytest.mark.parametrize("nbytes", [0, 1, 8 * MIB - 1])
def test_small_file_is_one_request(nbytes: int) -> None:
    fs, payload = S3FileSystem(), os.urandom(nbytes)
    sink = MultipartSink(fs, PATH)
    sink.write(payload)
    sink.publish()
    assert fs.objects == {KEY: payload}
    assert fs.calls == ["put_object"]


@pytest.mark.parametrize("chunk", [1000_003, 8 * MIB, 30 * MIB])
@pytest.mark.parametrize(
    "options", [{}, {"default_block_size": 5 * MIB}, {"block_size": 5_000_000}], ids=str
)
def test_large_file_goes_in_parts_side_by_side(chunk: int, options: dict[str, Any]) -> None:
    fs, payload = S3FileSystem(max_concurrency=3, **options), os.urandom(41 * MIB + 7)
    fs.meeting_s = 10
    sink = MultipartSink(fs, PATH)
    seen: list[int] = []
    sink.progressed = lambda: seen.append(len(fs.calls))
    for start in range(0, len(payload), chunk):
        sink.write(memoryview(payload)[start : start + chunk])
    assert sink.position == len(payload)
    assert fs.objects == {}, "nothing is visible before it is published"
    sink.publish()
    assert fs.objects == {KEY: payload}
    assert fs.uploads == {}
    assert fs.most_at_once == 3
    assert fs.calls[0] == "create_multipart_upload"
    assert fs.calls[-1] == "complete_multipart_upload"
    # Parts under 5 MiB are refused by S3, so that 5,000,000 bytes are rounded up.
    assert fs.calls.count("upload_part") == (6 if not options else 9)
    assert seen, "whoever waits is told that it goes on"


def test_last_part_does_not_wait_when_others_fill_the_memory() -> None:
    """It is in memory already; behind them it would cost a round trip of its own."""
    fs = S3FileSystem(max_concurrency=10)
    fs.meeting_s = 0.2
    sink = MultipartSink(fs, PATH)
    sink.write(bytes(64 * MIB))
    sink.write(b"rest")
    sink.publish()
    assert fs.most_at_once == 9
    assert len(fs.objects[KEY]) == 64 * MIB + 4


def test_write_goes_on_when_the_upload_is_still_being_created() -> None:
    """A round trip in which parts are filled; they leave when it is there."""
    fs, may_begin = S3FileSystem(), threading.Event()
    call = fs._call_s3

    async def late(method: str, **arguments: Any) -> Any:
        while method == "create_multipart_upload" and not may_begin.is_set():
            await asyncio.sleep(0.001)
        return await call(method, **arguments)

    fs._call_s3 = late  # type: ignore[method-assign]
    sink = MultipartSink(fs, PATH)
    sink.write(bytes(40 * MIB))
    assert fs.calls == []
    may_begin.set()
    sink.publish()
    assert fs.calls[0] == "create_multipart_upload"
    assert len(fs.objects[KEY]) == 40 * MIB


def test_upload_is_aborted_when_it_was_still_being_created() -> None:
    """Invariant 4: the parts are cancelled, the request for the upload is not."""
    fs, asked = S3FileSystem(), threading.Event()
    call = fs._call_s3

    async def slow(method: str, **arguments: Any) -> Any:
        answer = await call(method, **arguments)
        if method == "create_multipart_upload":
            asked.set()
            await asyncio.sleep(0.2)
        return answer

    fs._call_s3 = slow  # type: ignore[method-assign]
    sink = MultipartSink(fs, PATH)
    sink.write(bytes(20 * MIB))
    assert asked.wait(10)
    assert len(fs.uploads) == 1
    sink.discard()
    assert (fs.objects, fs.uploads) == ({}, {})
    assert "upload_part" not in fs.calls


def test_caller_s_memory_may_change_as_soon_as_write_returns() -> None:
    """A04: a slot of the window is used again."""
    fs, chunk = S3FileSystem(), bytearray(8 * MIB)
    sink = MultipartSink(fs, PATH)
    for number in range(3):
        chunk[:] = bytes([number]) * len(chunk)
        sink.write(chunk)
    chunk[:] = b"x" * len(chunk)
    sink.publish()
    assert fs.objects[KEY] == b"".join(bytes([n]) * (8 * MIB) for n in range(3))


@pytest.mark.parametrize("part", [1, 3, 6])
def test_error_of_a_part_is_raised_and_the_upload_aborted(part: int) -> None:
    """A05: at the next write or when it is published; no object, no upload."""
    fs = S3FileSystem(max_concurrency=2)

    def refuse(method: str, arguments: dict[str, Any]) -> None:
        if arguments.get("PartNumber") == part:
            raise PermissionError(errno.EACCES, "Access Denied")

    fs.refuse = refuse
    sink = MultipartSink(fs, PATH)
    with pytest.raises(PermissionError):
        for _ in range(41):
            sink.write(bytes(MIB))
        sink.publish()
    sink.discard()
    sink.discard()
    assert (fs.objects, fs.uploads) == ({}, {})
    assert fs.calls.count("abort_multipart_upload") == 1


@pytest.mark.parametrize("method", ["create_multipart_upload", "complete_multipart_upload"])
def test_error_at_either_end_leaves_no_upload(method: str) -> None:
    fs = S3FileSystem()

    def refuse(called: str, arguments: dict[str, Any]) -> None:
        if called == method:
            raise OSError(errno.EBUSY, "SlowDown")

    fs.refuse = refuse
    sink = MultipartSink(fs, PATH)
    with pytest.raises(OSError, match="SlowDown"):
        sink.write(bytes(20 * MIB))
        sink.publish()
    sink.discard()
    assert (fs.objects, fs.uploads) == ({}, {})


@pytest.mark.parametrize("nbytes", [10, 20 * MIB])
def test_object_is_removed_when_only_the_word_of_it_was_lost(nbytes: int) -> None:
    """Invariant 4: the store has completed it, the answer never came."""
    fs = S3FileSystem()
    sink = MultipartSink(fs, PATH)
    sink.write(bytes(nbytes))
    call = fs._call_s3

    async def lose(method: str, **arguments: Any) -> Any:
        answer = await call(method, **arguments)
        if method in ("put_object", "complete_multipart_upload"):
            raise TimeoutError("no answer")
        return answer

    fs._call_s3 = lose  # type: ignore[method-assign]
    with pytest.raises(TimeoutError):
        sink.publish()
    assert KEY in fs.objects
    sink.discard()
    assert fs.objects == {}


def test_metadata_is_never_removed_when_the_word_of_it_was_lost() -> None:
    """It may be the old checkpoint's: whoever commits looks which one is there."""
    fs = S3FileSystem()
    fs.objects["run/.metadata"] = b"old"

    def refuse(method: str, arguments: dict[str, Any]) -> None:
        if method == "put_object":
            raise TimeoutError("no answer")

    fs.refuse = refuse
    sink = MultipartSink(fs, "bucket/run/.metadata")
    sink.write(b"new")
    with pytest.raises(TimeoutError):
        sink.publish()
    sink.discard()
    assert fs.objects == {"run/.metadata": b"old"}


def test_dropped_sink_leaves_no_upload() -> None:
    fs = S3FileSystem()
    sink = MultipartSink(fs, PATH)
    sink.write(bytes(20 * MIB))
    del sink
    assert (fs.objects, fs.uploads) == ({}, {})


def test_parts_on_their_way_are_over_before_the_upload_is_aborted() -> None:
    """One that arrived after the abort would be left, and charged for."""
    fs = S3FileSystem()
    sink = MultipartSink(fs, PATH)
    order: list[str] = []
    fs.refuse = lambda method, arguments: order.append(method)
    sink.write(bytes(40 * MIB))
    sink.discard()
    assert order[-1] == "abort_multipart_upload"
    assert fs.uploads == {}


def test_parts_grow_so_that_any_size_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """F03: as if parts grew after every third."""
    monkeypatch.setattr(_multipart, "_PARTS_OF_A_SIZE", 3)
    fs = S3FileSystem()
    sink = MultipartSink(fs, PATH)
    for _ in range(9):
        sink.write(bytes(8 * MIB))
    sink.publish()
    # Three of 8 MiB, and three of 16.
    assert fs.calls.count("upload_part") == 6
    assert len(fs.objects[KEY]) == 72 * MIB


@pytest.mark.parametrize("option", ["fixed_upload_size", "default_block_size"])
def test_error_names_the_option_when_parts_may_not_grow_and_run_out(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F03: 10,000 parts."""
    monkeypatch.setattr(_multipart, "_MAX_PARTS", 3)
    monkeypatch.setattr(_multipart, "_PARTS_OF_A_SIZE", 1)
    fs = S3FileSystem(**({"default_block_size": 8 * MIB} if option.startswith("d") else {}))
    fs.fixed_upload_size = option.startswith("f")
    sink = MultipartSink(fs, PATH)
    with pytest.raises(OSError, match="default_block_size") as caught:
        for _ in range(5):
            sink.write(bytes(8 * MIB))
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == PATH
    sink.discard()
    assert (fs.objects, fs.uploads) == ({}, {})


def test_sinks_of_several_threads_share_one_filesystem() -> None:
    fs = S3FileSystem()

    def upload(number: int) -> None:
        sink = MultipartSink(fs, f"bucket/run/__{number}_0.0123abcd.distcp")
        for _ in range(3):
            sink.write(bytes([number]) * (7 * MIB))
        sink.publish()

    threads = [threading.Thread(target=upload, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key: (payload[0], len(payload)) for key, payload in fs.objects.items()} == {
        f"run/__{n}_0.0123abcd.distcp": (n, 21 * MIB) for n in range(4)
    }


def _begin(fs: S3FileSystem, *keys: str) -> None:
    for key in keys:
        fs.call_s3("create_multipart_upload", Bucket="bucket", Key=key)


def test_uploads_of_killed_saves_are_aborted_and_no_others() -> None:
    fs = S3FileSystem()
    dead = [f"run/__{n}_1.0123abcd.distcp" for n in range(5)] + ["run/.metadata"]
    kept = ["run/model.bin", "run/deeper/__0_0.0123abcd.distcp", "runs/__0_0.0123abcd.distcp"]
    living = ["run/__0_0.feedbeef.distcp"]
    _begin(fs, *dead, *kept, *living)
    aborted = abort_uploads(fs, "bucket/run", {"feedbeef"})
    assert sorted(aborted) == sorted(key.removeprefix("run/") for key in dead)
    assert sorted(fs.keys[number] for number in fs.uploads) == sorted(kept + living)


def test_uploads_of_other_ranks_are_left_when_each_saves_on_its_own() -> None:
    fs = S3FileSystem()
    own = ["run/__1_0.0123abcd.distcp", "run/__1.metadata"]
    others = ["run/__0_0.0123abcd.distcp", "run/__11_0.0123abcd.distcp", "run/__0.metadata"]
    _begin(fs, *own, *others)
    abort_uploads(fs, "bucket/run", set(), rank=1)
    assert sorted(fs.keys[number] for number in fs.uploads) == sorted(others)


def test_nothing_is_aborted_when_listing_is_forbidden() -> None:
    fs = S3FileSystem()
    _begin(fs, "run/__1_0.0123abcd.distcp")

    def refuse(method: str, arguments: dict[str, Any]) -> None:
        if method == "list_multipart_uploads":
            raise PermissionError(errno.EACCES, "Access Denied")

    fs.refuse = refuse
    assert abort_uploads(fs, "bucket/run", set()) == []
    assert len(fs.uploads) == 1
