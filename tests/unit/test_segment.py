"""Shared memory itself: claimed or refused, and nothing left of it afterwards."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mpwriter import _segment
from mpwriter._memory import Headroom
from mpwriter._segment import ClaimError, Segment, memfd_unavailable_reason

MIB = 1 << 20


def plenty() -> Headroom:
    return Headroom(1 << 40, "a test")


def mapped_segments() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:mpwriter")


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def in_fork(check: Callable[[], str]) -> str:
    """Run `check` in a forked child, where limits can be set, and return its answer."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = "died"
        try:
            answer = check()
        except BaseException as exc:
            answer = f"{type(exc).__name__}: {exc}"
        finally:
            os.write(writing, answer.encode())
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return answer


@pytest.fixture
def segment() -> Iterator[Segment]:
    found = Segment(1, 3 * MIB + 100, "staged")
    found.open(plenty)
    yield found
    found.drop()


@pytest.fixture
def nothing_left() -> Iterator[None]:
    fds, segments = open_fds(), mapped_segments()
    yield
    assert open_fds() <= fds  # a client of another test may close a connection meanwhile
    assert mapped_segments() == segments


def test_open_claims_every_page_when_memory_is_there(segment: Segment) -> None:
    assert os.fstat(segment.fd).st_blocks * 512 >= segment.nbytes
    assert segment.tensor.is_shared()
    assert segment.tensor.dtype is torch.uint8
    assert segment.tensor.shape == (segment.nbytes,)
    assert segment.address == segment.tensor.data_ptr()
    assert not os.get_inheritable(segment.fd)


def test_buffer_and_tensor_are_the_same_memory_when_written(segment: Segment) -> None:
    segment.buffer[5:8] = b"abc"
    assert segment.tensor[5:8].tolist() == [97, 98, 99]
    segment.tensor[6] = 7
    assert bytes(segment.buffer[5:8]) == b"a\x07c"
    assert (segment.buffer.format, segment.buffer.readonly) == ("B", False)


def test_another_process_sees_the_bytes_when_it_maps_the_descriptor(segment: Segment) -> None:
    segment.buffer[1000:1005] = b"hello"
    code = (
        "import mmap, sys; fd, n = map(int, sys.argv[1:]);"
        "m = mmap.mmap(fd, n); sys.stdout.write(m[1000:1005].decode()); m[0:2] = b'ok'"
    )
    command = [sys.executable, "-c", code, str(segment.fd), str(segment.nbytes)]
    done = subprocess.run(command, pass_fds=[segment.fd], capture_output=True, check=True)
    assert done.stdout == b"hello"
    assert bytes(segment.buffer[:2]) == b"ok"


def test_size_is_fixed_when_somebody_tries_to_cut_it(segment: Segment) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 4096)


def test_segment_is_writable_when_it_was_opened_in_inference_mode() -> None:
    segment = Segment(1, MIB, "staged")
    with torch.inference_mode():
        segment.open(plenty)
    segment.tensor[:10].copy_(torch.arange(10, dtype=torch.uint8))
    segment.drop()


def test_segment_is_on_the_cpu_when_another_default_device_is_set() -> None:
    segment = Segment(1, MIB, "staged")
    with torch.device("meta"):
        segment.open(plenty)
    assert segment.tensor.is_cpu
    segment.drop()


@pytest.mark.usefixtures("nothing_left")
def test_drop_leaves_nothing_when_nobody_views_it() -> None:
    segment = Segment(1, 3 * MIB, "staged")
    segment.open(plenty)
    assert mapped_segments() >= 1
    segment.drop()
    segment.drop()
    with pytest.raises(ValueError, match="gone"):
        _ = segment.tensor
    with pytest.raises(ValueError, match="gone"):
        _ = segment.buffer


@pytest.mark.usefixtures("nothing_left")
def test_drop_keeps_the_mapping_when_a_view_lives_on() -> None:
    segment = Segment(1, MIB, "staged")
    segment.open(plenty)
    view, window = segment.tensor[100:200], segment.buffer[300:400]
    segment.drop()
    view.fill_(3)  # neither this nor the next line may be a SIGSEGV or a SIGBUS
    window[:3] = b"abc"
    assert view.sum().item() == 300


@pytest.mark.usefixtures("nothing_left")
def test_drop_frees_the_pages_when_another_process_still_maps_them() -> None:
    segment = Segment(1, MIB, "staged")
    segment.open(plenty)
    fd = os.dup(segment.fd)
    with mmap.mmap(fd, MIB) as mapping:
        segment.tensor.fill_(7)
        assert mapping[5] == 7
        segment.drop()
        assert os.fstat(fd).st_blocks == 0
        assert mapping[5] == 0
    os.close(fd)


@pytest.mark.usefixtures("nothing_left")
def test_drop_keeps_the_pages_when_an_extent_is_leased() -> None:
    segment = Segment(1, MIB, "staged")
    segment.open(plenty)
    segment.leased[0] = 64
    view = segment.tensor.fill_(7)[:64]
    segment.drop()
    assert view.sum().item() == 64 * 7


@pytest.mark.usefixtures("nothing_left")
def test_open_is_refused_when_the_headroom_is_too_small() -> None:
    """D12."""
    segment = Segment(1, 64 * MIB, "staged")
    with pytest.raises(ClaimError, match="a small group leaves 5 bytes") as caught:
        segment.open(lambda: Headroom(5, "a small group"))
    assert caught.value.available_bytes == 5


@pytest.mark.usefixtures("nothing_left")
def test_open_stops_when_others_take_the_memory_meanwhile() -> None:
    looks = iter([1 << 40, 1 << 40, 1000])
    segment = Segment(1, 256 * MIB, "staged")
    with pytest.raises(ClaimError, match="leaves 1000 bytes"):
        segment.open(lambda: Headroom(next(looks), "a group"))
    assert segment.fd == -1


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("where", "code", "text"),
    [
        ("posix_fallocate", errno.ENOSPC, "refuses"),
        ("posix_fallocate", errno.ENOMEM, "refuses"),
        ("ftruncate", errno.EFBIG, "ulimit -f"),
        ("memfd_create", errno.EMFILE, "ulimit -n"),
        ("memfd_create", errno.EPERM, "refuses"),
    ],
)
def test_open_says_why_when_the_system_fails(
    monkeypatch: pytest.MonkeyPatch, where: str, code: int, text: str
) -> None:
    def fail(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(_segment.os, where, fail)
    with pytest.raises(ClaimError, match=text) as caught:
        Segment(1, MIB, "staged").open(plenty)
    assert os.strerror(code) in str(caught.value)


@pytest.mark.usefixtures("nothing_left")
def test_open_cleans_up_when_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_segment.os, "posix_fallocate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Segment(1, MIB, "staged").open(plenty)


def test_open_succeeds_when_signals_keep_coming() -> None:
    ticks = []
    previous = signal.signal(signal.SIGALRM, lambda *args: ticks.append(1))
    segment = Segment(1, 128 * MIB, "staged")
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        segment.open(plenty)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert os.fstat(segment.fd).st_blocks * 512 >= segment.nbytes
    segment.drop()


def test_open_says_why_when_the_file_size_is_limited() -> None:
    def check() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        with pytest.raises(ClaimError, match="ulimit -f") as caught:
            Segment(1, 2 * MIB, "staged").open(plenty)
        return f"available {caught.value.available_bytes}"

    assert in_fork(check) == f"available {MIB}"


def test_open_leaks_nothing_when_the_address_space_is_limited() -> None:
    def check() -> str:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 16 * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        before = open_fds()
        with pytest.raises(ClaimError, match="Cannot allocate memory"):
            Segment(1, 64 * MIB, "staged").open(plenty)
        return "clean" if open_fds() == before else "leak"

    assert in_fork(check) == "clean"


def test_open_says_why_when_no_descriptor_is_left() -> None:
    def check() -> str:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        with pytest.raises(ClaimError, match="ulimit -n"):
            Segment(1, MIB, "staged").open(plenty)
        return "told"

    assert in_fork(check) == "told"


def test_reason_is_given_when_memfd_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    assert memfd_unavailable_reason() is None
    monkeypatch.setattr(_segment.os, "memfd_create", fail)
    assert "Operation not permitted" in (memfd_unavailable_reason() or "")
    monkeypatch.delattr(_segment.os, "memfd_create")
    assert "no memfd_create" in (memfd_unavailable_reason() or "")


def test_memfd_is_made_when_the_kernel_knows_no_exec_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    make = os.memfd_create

    def old_kernel(name: str, flags: int) -> int:
        if flags & 8:
            raise OSError(errno.EINVAL, "Invalid argument")
        return make(name, flags)

    monkeypatch.setattr(_segment.os, "memfd_create", old_kernel)
    segment = Segment(1, MIB, "staged")
    segment.open(plenty)
    segment.drop()


class FakePinner:
    def __init__(self, answer: bool | None = True) -> None:
        self.answer = answer
        self.calls: list[tuple[str, int]] = []

    def register(self, address: int, nbytes: int) -> bool | None:
        self.calls.append(("register", address))
        return self.answer

    def unregister(self, address: int) -> None:
        assert mapped_segments() >= 1
        self.calls.append(("unregister", address))


def test_pin_locks_once_and_unlocks_before_unmapping_when_asked_twice() -> None:
    """D11, without an accelerator."""
    pinner = FakePinner()
    segment = Segment(1, MIB, "staged")
    segment.open(plenty)
    address = segment.address
    assert segment.pin(pinner)
    assert segment.pin(pinner)
    segment.drop()
    segment.drop()
    assert pinner.calls == [("register", address), ("unregister", address)]
    assert not segment.pin(pinner)


@pytest.mark.parametrize(("answer", "num_calls"), [(None, 2), (False, 1)])
def test_pin_is_tried_again_when_there_was_no_accelerator_yet(
    segment: Segment, answer: bool | None, num_calls: int
) -> None:
    pinner = FakePinner(answer)
    assert not segment.pin(pinner)
    assert not segment.pin(pinner)
    assert len(pinner.calls) == num_calls
