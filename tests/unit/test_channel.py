"""Framed messages over a socket pair."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from mpwriter._channel import Channel, ChannelClosed, Mailbox, channel_pair
from mpwriter._types import Ack, EndJob, JobDone, MapSegment


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    ours, bare = channel_pair()
    theirs = Channel(bare)
    yield ours, theirs
    ours.close()
    theirs.close()


def test_receive_returns_messages_in_order_when_several_were_sent(
    pair: tuple[Channel, Channel],
) -> None:
    left, right = pair
    for number in range(100):
        left.send(Ack(1, number))
    assert [message.sequence for message in right.receive()] == list(range(100))
    assert right.receive() == []


def test_receive_returns_nothing_when_half_a_frame_has_arrived() -> None:
    raw, bare = socket.socketpair()
    channel = Channel(bare)
    try:
        raw.send(b"\x10\x00\x00\x00half")
        assert channel.receive() == []
    finally:
        raw.close()
        channel.close()


def test_send_does_not_block_when_the_peer_does_not_read(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    done = JobDone(1, list(range(200_000)), list(range(200_000)), 0, 0.0, 0.0, 0.0, 0.0)
    left.send(done)
    assert left.wants_write
    received: list[object] = []
    while not received:
        left.flush()
        received = list(right.receive())
    assert not left.wants_write
    assert received == [done]


def test_receive_raises_when_the_peer_has_closed(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    left.send(EndJob(3))
    left.close()
    assert right.receive() == [EndJob(3)]
    with pytest.raises(ChannelClosed):
        right.receive()
    with pytest.raises(ChannelClosed):
        right.send(EndJob(4))


def test_take_fd_gives_the_descriptor_that_came_with_its_message(
    pair: tuple[Channel, Channel],
) -> None:
    left, right = pair
    readers = []
    for number in range(3):
        reader, writer = os.pipe()
        readers.append(reader)
        left.send(MapSegment(number, 10), (writer,))
        os.close(writer)
    messages = right.receive()
    while len(messages) < 3:  # one read ends where the next descriptor begins
        messages += right.receive()
    for reader, message in zip(readers, messages, strict=True):
        fd = right.take_fd()
        os.write(fd, str(message.segment).encode())
        os.close(fd)
        assert os.read(reader, 10) == str(message.segment).encode()
        os.close(reader)


def test_receive_refuses_a_frame_when_its_length_is_absurd() -> None:
    raw, bare = socket.socketpair()
    channel = Channel(bare)
    try:
        raw.send(b"\xff\xff\xff\xff")
        with pytest.raises(ChannelClosed, match="damaged"):
            channel.receive()
    finally:
        raw.close()
        channel.close()


def test_mailbox_gives_what_threads_have_put_in_order() -> None:
    mailbox: Mailbox[tuple[int, int]] = Mailbox()
    poll = select.poll()
    poll.register(mailbox, select.POLLIN)
    assert not poll.poll(0)
    assert mailbox.take() == []
    threads = [
        threading.Thread(target=lambda n=n: [mailbox.put((n, turn)) for turn in range(500)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    taken: list[tuple[int, int]] = []
    while len(taken) < 2000:
        assert poll.poll(10_000), "nobody was woken"
        taken += mailbox.take()
    for thread in threads:
        thread.join()
    for n in range(4):
        assert [turn for thread, turn in taken if thread == n] == list(range(500))
    assert not poll.poll(0)
    mailbox.close()
