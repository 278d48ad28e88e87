"""Files whose writes do not wait for one another."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from mpwriter._sink_pipeline import PipelinedFile, pipelined


class Server:
    """What paramiko and the server do: a pipelined write is answered by nobody who listens.

    Attributes:
        refused: numbers of the writes that fail, from 0.
    """

    def __init__(self, *refused: int) -> None:
        self.content = bytearray()
        self.refused = refused
        self.num_writes = 0
        self.waits = 0
        self._pipelined = False
        self._position = 0
        self._errors: list[OSError] = []

    def set_pipelined(self, pipelined: bool = True) -> None:
        self._pipelined = pipelined

    def write(self, chunk: Any) -> None:
        if self.num_writes in self.refused:
            self._errors.append(OSError(errno.ENOSPC, "Failure"))
        else:
            self.content[self._position : self._position + len(chunk)] = chunk
        self.num_writes += 1
        self._position += len(chunk)
        if not self._pipelined:
            self.waits += 1
            if self._errors:
                raise self._errors.pop(0)

    def flush(self) -> None:
        pass

    def seek(self, position: int) -> None:
        self._position = position

    def tell(self) -> int:
        return self._position


def test_flush_waits_once_for_all_writes() -> None:
    server = Server()
    file = PipelinedFile(server)
    for chunk in (b"abc", memoryview(b"defg"), b"", b"h"):
        file.write(chunk)
    assert server.waits == 0
    file.flush()
    file.flush()
    assert server.waits == 1 and file.tell() == 8
    file.write(b"ij")
    assert server.waits == 1
    file.flush()
    assert server.waits == 2 and server.content == b"abcdefghij"


def test_flush_does_nothing_when_nothing_was_written() -> None:
    server = Server()
    PipelinedFile(server).flush()
    assert server.num_writes == 0


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_flush_raises_when_a_write_was_refused(refused: int) -> None:
    """A05: whichever it was."""
    file = PipelinedFile(Server(refused))
    for _ in range(3):
        file.write(b"abc")
    with pytest.raises(OSError) as caught:
        file.flush()
    assert caught.value.errno == errno.ENOSPC


def test_pipelined_leaves_other_files_alone() -> None:
    file = object()
    assert pipelined(file) is file
