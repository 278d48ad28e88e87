#!/usr/bin/env python
"""A far store on one machine: a TCP proxy with a round-trip time and a bandwidth per connection.

    python scripts/wan_proxy.py --to 127.0.0.1:8333 --listen 9000 --rtt-ms 40 --mb-per-s 8

Every connection has its own bandwidth, the same in both directions, and its own queue: bytes are on
their way for half the round trip however many follow. Opening one takes a round trip. The kernel's
buffers on both sides are real, so that a client may have sent some bytes more than have arrived.

From Python, in a process of its own, so that it takes no share of the client's interpreter:

    with WanProxy("127.0.0.1:8333", rtt_ms=40, mb_per_s=8) as proxy:
        ... proxy.port ...
        proxy.cut(after_bytes=10_000_000)    # upstream from now on; then all is refused
        proxy.mend()

Lines on standard input do the same: `cut`, `cut 10000000`, `mend`; each is answered by `ok` and the
bytes that have gone upstream so far. The proxy ends with its standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_CHUNK_BYTES = 16 * 1024
# Beyond the bytes that the line itself holds: what a router would buffer.
_SLACK_BYTES = 256 * 1024


class WanProxy:
    """A proxy in a process of its own; use as a context manager.

    Args:
        to: host:port of the store.
        rtt_ms: round-trip time, milliseconds.
        mb_per_s: of each connection in each direction, 10**6 bytes a second; 0: no limit.
    """

    def __init__(self, to: str, *, rtt_ms: float = 0, mb_per_s: float = 0) -> None:
        self._command = [
            sys.executable, __file__, "--to", to, "--listen", "0",
            "--rtt-ms", str(rtt_ms), "--mb-per-s", str(mb_per_s),
        ]  # fmt: skip

    def __enter__(self) -> WanProxy:
        self._process: subprocess.Popen[str] = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.port = int(self._answer())
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def cut(self, *, after_bytes: int = 0) -> None:
        """Break every connection, and refuse new ones, when so much more has gone upstream."""
        self._ask(f"cut {after_bytes}")

    def mend(self) -> None:
        """Take connections again."""
        self._ask("mend")

    def upstream_bytes(self) -> int:
        """What has gone from clients to the store since the start."""
        return self._ask("count")

    def _ask(self, line: str) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the proxy has ended")
        return line.split()[-1]


# -- the proxy's process ------------------------------------------------------------------------


class _Line:
    """One direction of one connection: bytes arrive in order, later, and not too fast.

    Args:
        delay_s: on their way.
        bytes_per_s: 0 means no limit.
    """

    def __init__(self, delay_s: float, bytes_per_s: float) -> None:
        self._delay_s = delay_s
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        self._held_bytes = 0
        self._room = asyncio.Condition()
        self._chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._most_bytes = int(2 * delay_s * bytes_per_s) + _SLACK_BYTES

    async def put(self, chunk: bytes) -> None:
        """Send; waits while the line is full. b"" says that no more comes."""
        async with self._room:
            await self._room.wait_for(lambda: self._held_bytes < self._most_bytes)
            self._held_bytes += len(chunk)
        now_s = asyncio.get_running_loop().time()
        took_s = len(chunk) / self._bytes_per_s if self._bytes_per_s else 0.0
        self._free_at_s = max(now_s, self._free_at_s) + took_s
        self._chunks.put_nowait((self._free_at_s + self._delay_s, chunk))

    async def get(self) -> bytes:
        """Receive the next chunk when it has arrived."""
        due_s, chunk = await self._chunks.get()
        left_s = due_s - asyncio.get_running_loop().time()
        if left_s > 0:
            await asyncio.sleep(left_s)
        async with self._room:
            self._held_bytes -= len(chunk)
            self._room.notify_all()
        return chunk


class _Proxy:
    def __init__(self, host: str, port: int, rtt_s: float, bytes_per_s: float) -> None:
        self._to = host, port
        self._rtt_s = rtt_s
        self._bytes_per_s = bytes_per_s
        self._writers: set[asyncio.StreamWriter] = set()
        self._cut_at_bytes: int | None = None
        self.upstream_bytes = 0

    @property
    def _is_cut(self) -> bool:
        return self._cut_at_bytes is not None and self.upstream_bytes >= self._cut_at_bytes

    def cut(self, after_bytes: int) -> None:
        self._cut_at_bytes = self.upstream_bytes + after_bytes
        self._break_if_cut()

    def mend(self) -> None:
        self._cut_at_bytes = None

    def _break_if_cut(self) -> None:
        if self._is_cut:
            for writer in list(self._writers):
                writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a client, until both sides are done with it."""
        if self._is_cut:
            writer.transport.abort()
            return
        self._writers.add(writer)
        try:
            await asyncio.sleep(self._rtt_s)  # of the handshake
            there_reader, there_writer = await asyncio.open_connection(*self._to)
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(there_writer)
        pipes = [
            self._pipe(reader, there_writer, upstream=True),
            self._pipe(there_reader, writer, upstream=False),
        ]
        # Cancelled at the proxy's end, and nobody waits for this task to say so.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*pipes)
        for each in (writer, there_writer):
            self._writers.discard(each)
            each.close()

    async def _pipe(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, upstream: bool
    ) -> None:
        line = _Line(self._rtt_s / 2, self._bytes_per_s)
        taking = asyncio.create_task(_take(reader, line))
        with contextlib.suppress(OSError):
            while chunk := await line.get():
                if upstream:
                    self.upstream_bytes += len(chunk)
                    self._break_if_cut()
                writer.write(chunk)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
        taking.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await taking
        if writer.is_closing():
            writer.transport.abort()


async def _take(reader: asyncio.StreamReader, line: _Line) -> None:
    try:
        while chunk := await reader.read(_CHUNK_BYTES):
            await line.put(chunk)
    except OSError:
        pass  # the peer is gone, which the other side hears as the end
    await line.put(b"")


async def _run(options: argparse.Namespace) -> None:
    host, _, port = options.to.rpartition(":")
    proxy = _Proxy(host, int(port), options.rtt_ms / 1000, options.mb_per_s * 1e6)
    server = await asyncio.start_server(proxy.serve, options.host, options.listen)
    print("listening on", server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await _obey(proxy)
    for writer in list(proxy._writers):
        writer.transport.abort()


async def _obey(proxy: _Proxy) -> None:
    """Carry out lines of standard input until it ends."""
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := (await lines.readline()).split():
        words: list[Any] = [word.decode() for word in line]
        if words[0] == "cut":
            proxy.cut(int(words[1]) if len(words) > 1 else 0)
        elif words[0] == "mend":
            proxy.mend()
        print("ok", proxy.upstream_bytes, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--to", required=True, metavar="HOST:PORT", help="the store")
    parser.add_argument("--host", default="127.0.0.1", help="to listen on (%(default)s)")
    parser.add_argument("--listen", type=int, default=0, metavar="PORT", help="0: any free one")
    parser.add_argument("--rtt-ms", type=float, default=40, help="round trip (%(default)s)")
    parser.add_argument(
        "--mb-per-s",
        type=float,
        default=8,
        help="a connection and direction; 0: no limit (%(default)s)",
    )
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
