"""The guard that fails a test which leaves something behind."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading

import pytest

from tests import leaks


@pytest.fixture(autouse=True)
def _little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "GRACE_S", 0.02)


def test_left_behind_is_empty_when_all_was_closed() -> None:
    before = leaks.snapshot()
    with open(os.devnull):
        pass
    assert leaks.left_behind(before) == []


def test_left_behind_names_a_descriptor() -> None:
    before = leaks.snapshot()
    with socket.socket():
        (found,) = leaks.left_behind(before)
    assert "socket:" in found


def test_left_behind_names_a_thread() -> None:
    before = leaks.snapshot()
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, name="forgotten")
    thread.start()
    try:
        assert leaks.left_behind(before) == ["thread forgotten"]
    finally:
        go_on.set()
        thread.join()


def test_left_behind_names_a_child_when_nobody_waits_for_it() -> None:
    before = leaks.snapshot()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert any(f"child process {child.pid}" in line for line in leaks.left_behind(before))
    finally:
        child.communicate(b"\n")


def test_left_behind_names_a_mapping_when_strict() -> None:
    before = leaks.snapshot(mappings=True)
    fd = os.memfd_create("mpwriter-test")
    os.ftruncate(fd, mmap.PAGESIZE)
    mapping = mmap.mmap(fd, mmap.PAGESIZE)
    os.close(fd)
    try:
        assert leaks.left_behind(before) == []
        found = leaks.left_behind(before, strict=True)
    finally:
        mapping.close()
    assert any("mpwriter-test" in line for line in found)
    assert leaks.left_behind(before, strict=True) == []


def test_left_behind_lets_a_live_worker_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    before = leaks.snapshot()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=theirs)
        theirs.close()
        monkeypatch.setattr(leaks, "_worker_pids", lambda: [child.pid])
        try:
            assert leaks.left_behind(before) == []
            assert len(leaks.left_behind(before, strict=True)) == 2
            with socket.socket():
                assert len(leaks.left_behind(before)) == 1
        finally:
            ours.sendall(b"\n")
            child.wait()
