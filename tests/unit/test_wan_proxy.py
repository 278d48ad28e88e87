"""The network of scripts/wan_proxy.py: order, content, delay, bandwidth, cuts.

Times are those of a clock that jumps to the next event; on the real one only lower bounds hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from scripts.wan_proxy import WanProxy, _Line

KIB = 1 << 10


class _JumpingLoop(asyncio.SelectorEventLoop):
    """Time passes only where everybody waits for it, and then at once."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now_s


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: _JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout:
            self._loop._now_s += timeout
        return super().select(0)


@pytest.fixture
def virtually() -> Iterator[Callable[[Awaitable[Any]], Any]]:
    """Run a coroutine on a clock that jumps."""
    loop = _JumpingLoop()
    asyncio.set_event_loop(loop)
    yield loop.run_until_complete
    loop.close()
    asyncio.set_event_loop(None)


async def _arrivals(line: _Line, chunks: list[bytes]) -> list[tuple[float, bytes]]:
    """Send all as fast as the line takes them; when each arrived, and what."""
    loop = asyncio.get_running_loop()

    async def send() -> None:
        for chunk in chunks:
            await line.put(chunk)

    sending = asyncio.create_task(send())
    got = []
    for _ in chunks:
        chunk = await line.get()
        got.append((loop.time(), chunk))
    await sending
    return got


def test_line_keeps_order_and_content(virtually: Callable[..., Any]) -> None:
    chunks = [bytes([n]) * (n + 1) for n in range(200)]
    got = virtually(_arrivals(_Line(0.02, 1e6), chunks))
    assert [chunk for _, chunk in got] == chunks


def test_line_delays_all_bytes_alike_when_many_are_on_their_way(
    virtually: Callable[..., Any],
) -> None:
    """Pipelined: the hundredth is not a hundred delays late."""
    got = virtually(_arrivals(_Line(0.5, 0.0), [b"x" * KIB] * 100))
    assert [at_s for at_s, _ in got] == pytest.approx([0.5] * 100)


def test_line_has_its_bandwidth_when_more_is_sent_than_it_holds(
    virtually: Callable[..., Any],
) -> None:
    """10 chunks of a tenth of a second, half a second away; then the same again."""
    line = _Line(0.5, 10_000 * 16)
    first = virtually(_arrivals(line, [b"x" * 16_000] * 10))
    assert [at_s for at_s, _ in first] == pytest.approx([0.5 + 0.1 * n for n in range(1, 11)])
    more = virtually(_arrivals(line, [b"x" * 16_000] * 100))
    begun_s = first[-1][0]
    assert more[-1][0] - begun_s == pytest.approx(0.5 + 0.1 * 100)


def test_line_makes_the_sender_wait_when_it_is_full(virtually: Callable[..., Any]) -> None:
    """A store that does not read must not fill the memory."""
    line, sent = _Line(0.0, 0.0), []

    async def send() -> None:
        for _ in range(1000):
            await line.put(b"x" * (16 * KIB))
            sent.append(16 * KIB)

    async def case() -> None:
        sending = asyncio.create_task(send())
        await asyncio.sleep(100)
        held = sum(sent)
        assert held < 1 << 20
        await line.get()
        await asyncio.sleep(1)
        assert sum(sent) > held
        sending.cancel()

    virtually(case())


# -- the process --------------------------------------------------------------------------------


class _Echo:
    """A server that sends back what it gets, and ends when the client does."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            client, _ = self._socket.accept()
            if self._ending:
                client.close()
                return
            self._threads.append(threading.Thread(target=self._serve, args=(client,)))
            self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            try:
                while chunk := client.recv(64 * KIB):
                    client.sendall(chunk)
            except OSError:
                pass

    _ending = False

    def close(self) -> None:
        self._ending = True
        socket.create_connection(self._socket.getsockname()).close()
        for thread in self._threads:
            thread.join()
        self._socket.close()


@pytest.fixture
def echo() -> Iterator[_Echo]:
    server = _Echo()
    yield server
    server.close()


def _exchange(port: int, payload: bytes) -> bytes:
    """Send all and read all of the echo, as far as the connection goes."""
    received = bytearray()
    with socket.create_connection(("127.0.0.1", port)) as client:

        def read() -> None:
            with contextlib.suppress(OSError):
                while chunk := client.recv(64 * KIB):
                    received.extend(chunk)

        reading = threading.Thread(target=read)
        reading.start()
        with contextlib.suppress(OSError):
            client.sendall(payload)
            client.shutdown(socket.SHUT_WR)
        reading.join()
    return bytes(received)


def test_connections_keep_their_own_bytes_when_there_are_many(echo: _Echo) -> None:
    payloads = [os.urandom(300 * KIB + n) for n in range(20)]
    with WanProxy(echo.address, rtt_ms=2) as proxy, ThreadPoolExecutor(20) as threads:
        assert list(threads.map(partial(_exchange, proxy.port), payloads)) == payloads
        assert proxy.upstream_bytes() == sum(map(len, payloads))


def test_first_answer_takes_two_round_trips_when_a_connection_is_new(echo: _Echo) -> None:
    """One for the handshake, one for the question; never less."""
    with WanProxy(echo.address, rtt_ms=100) as proxy:
        begun_s = time.monotonic()
        assert _exchange(proxy.port, b"hello") == b"hello"
        assert time.monotonic() - begun_s >= 0.2


def test_bytes_take_their_time_when_the_bandwidth_is_low(echo: _Echo) -> None:
    with WanProxy(echo.address, mb_per_s=1) as proxy:
        payload, begun_s = os.urandom(500_000), time.monotonic()
        assert _exchange(proxy.port, payload) == payload
        assert time.monotonic() - begun_s >= 0.5


def test_connections_break_and_are_refused_when_enough_has_gone_upstream(echo: _Echo) -> None:
    with WanProxy(echo.address) as proxy:
        assert _exchange(proxy.port, b"before") == b"before"
        proxy.cut(after_bytes=100_000)
        assert _exchange(proxy.port, b"x" * 50_000) == b"x" * 50_000
        assert _is_cut(proxy.port, bytes(200_000))
        assert _is_cut(proxy.port, b"hello")
        proxy.mend()
        assert _exchange(proxy.port, b"after") == b"after"
        proxy.cut()
        assert _is_cut(proxy.port, b"hello")


def _is_cut(port: int, payload: bytes) -> bool:
    try:
        return _exchange(port, payload) != payload
    except OSError:  # not even a connection
        return True


def test_connection_ends_when_the_store_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with WanProxy(address) as proxy:
        assert _is_cut(proxy.port, b"hello")


def test_proxy_ends_with_its_owner_when_connections_are_open(echo: _Echo) -> None:
    with WanProxy(echo.address) as proxy:
        client = socket.create_connection(("127.0.0.1", proxy.port))
        client.sendall(b"x")
        assert client.recv(1) == b"x"
    with client:
        try:
            assert client.recv(1) == b""
        except ConnectionResetError:
            pass
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", proxy.port))
