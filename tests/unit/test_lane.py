"""One worker and what is on its way to it: slots go round, and none is used too early."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from mpwriter._lane import Job, Lane
from mpwriter._lane_window import TrainerPeer, Window
from mpwriter._staging import Batch
from mpwriter._staging_parts import MIN_SLOT_BYTES, Slot
from mpwriter._types import AbortJob, Ack, EndJob, ItemSpec, JobFailed, Message, Put

SPEC = ItemSpec("uint8", (100,), 100)


class RecordingPeer:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def receive(self) -> list[Message]:
        return []


class Copy:
    """The event of a copy that lands when it is told to, or waited for."""

    def __init__(self) -> None:
        self.landed = False
        self.waited = False

    def query(self) -> bool:
        return self.landed

    def synchronize(self) -> None:
        self.landed = self.waited = True


class FakeStream:
    """As many batches as asked for, one item of 100 bytes each."""

    def __init__(self, num_batches: int, copies: Iterable[Copy] = (), staged: bool = False) -> None:
        self.num_batches = num_batches
        self.copies = list(copies)
        self.is_staged = staged  # in the arena already: no slot is needed
        self.num_restarts = -1
        self.restart()

    def restart(self) -> None:
        self.num_restarts += 1
        self._left = self.num_batches
        self.exhausted = False
        self.filled: list[Slot | None] = []

    def needs_slot(self) -> bool:
        if not self._left:
            self.exhausted = True
        return bool(self._left) and not self.is_staged

    def fill(self, slot: Slot | None) -> Batch | None:
        if not self._left:
            self.exhausted = True
            return None
        self._left -= 1
        self.filled.append(slot)
        segment, offset = (7, 0) if slot is None else (slot.segment, slot.offset)
        batch = Batch(segment, slot, [SPEC], [offset], [100])
        if self.copies:
            batch.events.append(self.copies.pop(0))
        return batch


class Setup:
    """A lane with a window of some slots."""

    def __init__(self, num_slots: int = 3) -> None:
        self.peer = RecordingPeer()
        self.num_leases = 0
        self.num_releases = 0
        self.reached: list[int] = []
        self._num_slots = num_slots
        self.lane = Lane(self.peer, self._lease, self.reached.append)

    def _lease(self) -> Window:
        self.num_leases += 1
        memory = torch.zeros(self._num_slots * MIN_SLOT_BYTES, dtype=torch.uint8)
        return Window(5, 4096, memory, memoryview(memory.numpy()), self._release)

    def _release(self) -> None:
        self.num_releases += 1

    def begin(self, stream: FakeStream, attempt: int = 1) -> None:
        self.lane.begin(Job(0, "/there", "there", [0]), start_of(attempt), stream)  # type: ignore

    def step_until_it_rests(self) -> None:
        while self.lane.step():
            pass


def start_of(attempt: int) -> Any:
    """Stands in for a StartJob."""

    class Start:
        job = attempt

    return Start()


def sequences(messages: list[Any]) -> list[int]:
    return [message.sequence for message in messages if isinstance(message, Put)]


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_lane_sends_a_job_from_its_start_to_its_end(setup: Setup) -> None:
    setup.begin(FakeStream(2))
    assert setup.lane.unannounced and not setup.lane.outstanding
    setup.step_until_it_rests()
    start, *puts, end = setup.peer.sent
    assert start.job == 1
    assert [(put.job, put.sequence, put.segment) for put in puts] == [(1, 0, 5), (1, 1, 5)]
    assert end == EndJob(1)
    assert setup.reached == [5, 5]
    assert setup.lane.outstanding and not setup.lane.unannounced and not setup.lane.empty


def test_lane_stops_when_every_slot_is_in_flight(setup: Setup) -> None:
    """Back-pressure: no more than the window is ahead of the file."""
    stream = FakeStream(7)
    setup.begin(stream)
    setup.step_until_it_rests()
    assert sequences(setup.peer.sent) == [0, 1, 2]
    assert setup.lane.acknowledge(Ack(1, 0)) == 100
    setup.step_until_it_rests()
    assert sequences(setup.peer.sent) == [0, 1, 2, 3]
    # The slot that came back, and no other, was filled again.
    assert [slot.offset for slot in stream.filled if slot] == [4096, 6144, 8192, 4096]
    assert setup.lane.acknowledge(Ack(1, 3)) == 300  # and those before it
    setup.step_until_it_rests()
    assert sequences(setup.peer.sent) == list(range(7)[:7])
    assert setup.lane.acknowledge(Ack(1, 6)) == 300
    assert setup.lane.acknowledge(Ack(1, 6)) == 0


def test_lane_sends_nothing_before_the_copies_have_landed(setup: Setup) -> None:
    copies = [Copy(), Copy()]
    setup.begin(FakeStream(2, copies))
    setup.step_until_it_rests()
    assert setup.peer.sent == [] and setup.lane.staged
    copies[1].landed = True
    setup.step_until_it_rests()
    assert setup.peer.sent == []  # in order: the first one has not
    copies[0].landed = True
    setup.step_until_it_rests()
    assert sequences(setup.peer.sent) == [0, 1] and setup.peer.sent[-1] == EndJob(1)
    assert not any(copy.waited for copy in copies)


def test_lane_waits_for_the_oldest_copy_only(setup: Setup) -> None:
    copies = [Copy(), Copy()]
    setup.begin(FakeStream(2, copies))
    setup.step_until_it_rests()
    setup.lane.wait_for_copies()
    assert [copy.waited for copy in copies] == [True, False]
    setup.lane.step()
    assert sequences(setup.peer.sent) == [0]


def test_lane_takes_no_slot_when_the_bytes_are_in_the_arena_already(setup: Setup) -> None:
    """Invariant 11: an asynchronous save needs no second copy; messages ahead are bounded."""
    setup.begin(FakeStream(20, staged=True))
    setup.step_until_it_rests()
    assert setup.num_leases == 0
    assert sequences(setup.peer.sent) == list(range(8))
    assert set(setup.reached) == {7}
    setup.lane.acknowledge(Ack(1, 7))
    setup.step_until_it_rests()
    assert sequences(setup.peer.sent) == list(range(16))
    setup.lane.release()
    assert setup.num_releases == 0


def test_lane_is_empty_when_the_job_has_nothing_of_its_own(setup: Setup) -> None:
    """Every item is tied to another file's: no file is opened."""
    setup.begin(FakeStream(0))
    setup.step_until_it_rests()
    assert setup.lane.empty and setup.peer.sent == []
    assert setup.lane.end().number == 0
    assert setup.lane.unannounced and not setup.lane.outstanding


def test_lane_begins_again_with_all_its_slots_when_an_attempt_has_failed(setup: Setup) -> None:
    """Invariant 15: from the first item, under another number, after the pause."""
    stream = FakeStream(7)
    setup.begin(stream)
    setup.step_until_it_rests()
    setup.peer.sent.clear()
    setup.lane.begin_again(start_of(2), at_s=0.0)
    assert stream.num_restarts == 1 and setup.lane.attempt == 2
    assert not setup.lane.outstanding
    setup.step_until_it_rests()
    start, *puts = setup.peer.sent
    assert start.job == 2 and [(put.job, put.sequence) for put in puts] == [(2, 0), (2, 1), (2, 2)]
    assert len({put.offsets[0] for put in puts}) == 3
    assert setup.num_leases == 1


def test_lane_rests_when_the_next_try_is_not_due(setup: Setup) -> None:
    setup.begin(FakeStream(1))
    setup.lane.begin_again(start_of(2), at_s=float("inf"))
    assert setup.lane.step() is False
    assert setup.peer.sent == []


def test_lane_waits_for_copies_before_it_lets_go_of_a_slot(setup: Setup) -> None:
    """Nothing may land in memory that is somebody else's by then."""
    for let_go in (
        lambda: setup.lane.begin_again(start_of(2), at_s=0.0),
        setup.lane.end,
        setup.lane.release,
        setup.lane.abort,
    ):
        copies = [Copy(), Copy(), Copy()]
        setup.begin(FakeStream(3, copies))
        setup.step_until_it_rests()
        assert not any(copy.landed for copy in copies)
        let_go()
        assert all(copy.waited for copy in copies)


def test_lane_uses_its_window_for_the_next_job(setup: Setup) -> None:
    for attempt in range(1, 4):
        setup.begin(FakeStream(3), attempt)
        setup.step_until_it_rests()
        assert sequences(setup.peer.sent) == [0, 1, 2]
        assert setup.peer.sent[-1] == EndJob(attempt)
        setup.peer.sent.clear()
        setup.lane.end()
    assert setup.num_leases == 1
    setup.lane.release()
    setup.lane.release()
    assert setup.num_releases == 1


def test_abort_tells_the_worker_when_it_knows_of_the_job(setup: Setup) -> None:
    assert setup.lane.abort() is False
    setup.begin(FakeStream(1, [Copy()]))
    setup.step_until_it_rests()
    assert setup.lane.abort() is False  # staged, but not sent
    assert setup.peer.sent == []
    setup.begin(FakeStream(1), 2)
    setup.step_until_it_rests()
    assert setup.lane.abort() is True
    assert setup.peer.sent[-1] == AbortJob(2)


def test_trainer_peer_answers_at_once_and_each_answer_once() -> None:
    peer = TrainerPeer()
    window = peer.window(100_000)
    assert peer.reaches(window.slots[0].segment) and not peer.reaches(5)
    peer.reach(5, memoryview(b"elsewhere"))
    assert peer.reaches(5)
    peer.send(AbortJob(3))
    (answer,) = peer.receive()
    assert isinstance(answer, JobFailed) and answer.job == 3
    assert peer.receive() == []
    window.slots.clear()
    peer.close()
    assert not peer.reaches(5)
