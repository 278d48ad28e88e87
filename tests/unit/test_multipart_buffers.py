"""Memory for the parts of uploads."""

from __future__ import annotations

import mmap
import threading
import time

import pytest

from mpwriter import _multipart_buffers
from mpwriter._multipart_buffers import KEPT_BYTES, PartBuffers

MIB = 1 << 20


def test_take_gives_a_kept_buffer_when_one_fits() -> None:
    buffers = PartBuffers()
    first = buffers.take(8 * MIB)
    first[:3] = b"abc"
    buffers.give_back(first)
    assert buffers.take(4 * MIB) is not first
    assert buffers.take(8 * MIB) is first
    assert buffers.take(8 * MIB) is not first, "it is in use"


def test_no_more_is_kept_than_a_file_has_in_flight() -> None:
    buffers = PartBuffers()
    taken = [buffers.take(8 * MIB) for _ in range(20)]
    for buffer in taken:
        buffers.give_back(buffer)
    assert buffers.num_kept() == KEPT_BYTES // (8 * MIB)
    assert buffers.take(8 * MIB) is taken[-1], "the warmest first"
    buffers.give_back(buffers.take(KEPT_BYTES + MIB))
    assert buffers.num_kept() == 0, "one that is larger than all that may be kept"


@pytest.mark.parametrize("missing", ["MADV_FREE", "MADV_HUGEPAGE"])
def test_buffers_work_when_the_system_knows_no_such_advice(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(_multipart_buffers.mmap, missing)
    buffers = PartBuffers()
    first = buffers.take(MIB)
    first[-1:] = b"x"
    buffers.give_back(first)
    assert buffers.take(MIB) is first


def test_no_buffer_is_given_to_two_threads() -> None:
    buffers = PartBuffers()
    shared: list[mmap.mmap] = []
    meeting = threading.Barrier(4)

    def work() -> None:
        meeting.wait()
        for _ in range(200):
            buffer = buffers.take(4096)
            buffer[:8] = threading.get_ident().to_bytes(8, "little")
            time.sleep(0)
            if buffer[:8] != threading.get_ident().to_bytes(8, "little"):
                shared.append(buffer)
            buffers.give_back(buffer)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not shared
