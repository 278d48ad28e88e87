"""Framed messages over a local socket pair, with file descriptors beside them.

Runs in: both.

A frame is a 4-byte little-endian length and a pickled message of `_types`. Both ends are
non-blocking: half a frame never stops the reader, and a peer that does not read never stops the
writer (its frames wait here). `multiprocessing.Connection` does block in both cases.

    send() -> outgoing bytes -> flush() ... socket ... receive() -> incoming bytes -> messages

One thread uses a channel at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar, cast

from mpwriter._types import Message

__all__ = ["Channel", "ChannelClosed", "Mailbox", "channel_pair"]

_LENGTH = struct.Struct("<I")

# A frame holds rows, never payloads: 20,000 result rows are 0.3 MB. Anything near this is garbage.
_MAX_FRAME_BYTES = 1 << 30

# One recvmsg takes at most this much; the kernel's default socket buffer is 208 KiB.
_RECEIVE_BYTES = 1 << 18

# SCM_MAX_FD of Linux is 253; a message carries one, so a few are plenty for one read.
_MAX_FDS_PER_READ = 64


class ChannelClosed(ConnectionError):
    """The peer has closed its end, or died."""


class Channel:
    """One end of a socket pair. Owns the socket and the descriptors that have arrived."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._incoming = bytearray()
        self._outgoing: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._arrived_fds: deque[int] = deque()

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether frames wait for the socket to become writable."""
        return bool(self._outgoing)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queue `message` and send what the socket takes now.

        `fds` must stay open until `wants_write` is false.

        Raises:
            ChannelClosed: the peer is gone.
        """
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        if len(body) > _MAX_FRAME_BYTES:
            raise ValueError(f"a message of {len(body)} bytes is over the frame limit")
        self._outgoing.append((memoryview(_LENGTH.pack(len(body)) + body), fds))
        self.flush()

    def flush(self) -> None:
        """Send queued frames as far as the socket takes them without blocking."""
        while self._outgoing:
            frame, fds = self._outgoing[0]
            try:
                if fds:
                    sent = socket.send_fds(self._sock, [frame], list(fds))
                else:
                    sent = self._sock.send(frame)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as exc:
                raise ChannelClosed(str(exc)) from exc
            if sent == len(frame):
                self._outgoing.popleft()
            else:  # the descriptors went with the first byte
                self._outgoing[0] = (frame[sent:], ())

    def receive(self) -> list[Message]:
        """Return the whole messages that have arrived; an empty list when there are none.

        Raises:
            ChannelClosed: the peer is gone and nothing whole is left to return.
        """
        closed = not self._read_available()
        messages = self._take_frames()
        if closed and not messages:
            raise ChannelClosed("the peer closed the channel")
        return messages

    def take_fd(self) -> int:
        """The descriptor that came with the oldest message not asked for yet; now the caller's."""
        return self._arrived_fds.popleft()

    def hang_up(self) -> None:
        """Close, and let the peer know even where a fork of this process has this end open, too."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """Close the socket and every descriptor nobody took. Safe to call twice."""
        self._outgoing.clear()
        while self._arrived_fds:
            os.close(self._arrived_fds.popleft())
        self._sock.close()

    def _read_available(self) -> bool:
        while True:
            try:
                chunk, fds, _, _ = socket.recv_fds(
                    self._sock, _RECEIVE_BYTES, _MAX_FDS_PER_READ, socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                return True
            except OSError:
                return False
            self._arrived_fds.extend(fds)
            if not chunk:
                return False
            self._incoming += chunk
            if len(chunk) < _RECEIVE_BYTES:
                return True

    def _take_frames(self) -> list[Message]:
        messages: list[Message] = []
        start = 0
        while len(self._incoming) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming, start)
            if length > _MAX_FRAME_BYTES:
                raise ChannelClosed(f"a frame of {length} bytes: the stream is damaged")
            end = start + _LENGTH.size + length
            if len(self._incoming) < end:
                break
            body = bytes(memoryview(self._incoming)[start + _LENGTH.size : end])
            messages.append(cast(Message, pickle.loads(body)))
            start = end
        if start:
            del self._incoming[:start]
        return messages


_T = TypeVar("_T")


class Mailbox(Generic[_T]):
    """What many threads have to say to one that sleeps in a poll."""

    def __init__(self) -> None:
        self._entries: deque[_T] = deque()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Readable when there is something to take."""
        return self._fd

    def put(self, entry: _T) -> None:
        """Thread-safe."""
        self._entries.append(entry)
        os.eventfd_write(self._fd, 1)

    def take(self) -> list[_T]:
        """All that has come, in order."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        return [self._entries.popleft() for _ in range(len(self._entries))]

    def close(self) -> None:
        os.close(self._fd)


def channel_pair() -> tuple[Channel, socket.socket]:
    """A channel for this process and a bare, inheritable socket for the process to be started."""
    ours, theirs = map(_unlike_a_standard_stream, socket.socketpair(socket.AF_UNIX))
    return Channel(ours), theirs


def _unlike_a_standard_stream(sock: socket.socket) -> socket.socket:
    """Where the trainer has closed its stderr, a new socket is given that very number."""
    if sock.fileno() > 2:
        return sock
    with sock:
        return socket.socket(fileno=fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))
