"""The worker's side: messages in, files and answers out."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from mpwriter._decode import decode
from mpwriter._types import (
    AbortJob,
    Ack,
    EndJob,
    ItemSpec,
    JobDone,
    JobFailed,
    JobRefused,
    JobStarted,
    MapSegment,
    Message,
    Put,
    StartJob,
    UnmapSegment,
)
from mpwriter._worker import ABORTED, BOOTSTRAP, JobServer
from tests.fakes import FaultPlan
from tests.fakes.filesystems import FaultFileSystem
from tests.saves import names_in

PAYLOAD = bytes(range(256)) * 4
SPEC = ItemSpec("float32", (256,), 1024)
SEGMENT = 3


class Setup:
    """A server with one mapped segment that holds the payload twice."""

    def __init__(self, **options: Any) -> None:
        self.replies: list[Message] = []
        self._fds: list[int] = []
        self.server = JobServer(self.replies.append, self._fds.pop, **options)
        self.map(SEGMENT, PAYLOAD * 2)

    def map(self, segment: int, content: bytes) -> None:
        fd = os.memfd_create("segment")
        os.write(fd, content)
        self._fds.append(fd)  # the server's from now on
        self.server.handle(MapSegment(segment, len(content)))

    def send(self, *messages: Message) -> list[Message]:
        """What these messages are answered with."""
        self.replies.clear()
        for message in messages:
            self.server.handle(message)
        return self.replies[:]


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    monkeypatch.chdir(Path.cwd())  # and back: a server goes where its trainer is
    mask = os.umask(0o022)
    made = Setup()
    yield made
    made.server.close()
    os.umask(mask)


def start_of(job: int, path: Path, filesystem: Any = None) -> StartJob:
    return StartJob(
        job=job,
        filesystem=pickle.dumps(filesystem or LocalFileSystem()),
        path=str(path),
        token="0123abcd",
        sync_files=False,
        cwd=str(path.parents[0]),
        umask=0o022,
        container="torch",
    )


def put_of(job: int, sequence: int = 0, *, spec: ItemSpec | None = SPEC, nbytes: int = 1024) -> Put:
    return Put(job, sequence, SEGMENT, [spec], [0], [nbytes])


def failed(messages: list[Message]) -> JobFailed:
    (message,) = messages
    assert isinstance(message, JobFailed)
    return message


def test_server_answers_every_step_of_a_job(setup: Setup, tmp_path: Path) -> None:
    target = tmp_path / "file"
    assert setup.send(start_of(1, target)) == [JobStarted(1)]
    assert not target.exists()
    assert setup.send(put_of(1, 0), put_of(1, 1)) == [Ack(1, 0), Ack(1, 1)]
    (done,) = setup.send(EndJob(1))
    assert isinstance(done, JobDone) and done.job == 1
    content = target.read_bytes()
    assert done.nbytes == len(content)
    for offset, length in zip(done.offsets, done.lengths, strict=True):
        tensor = decode(memoryview(content)[offset : offset + length], verify=True)
        assert tensor is not None and bytes(tensor.payload) == PAYLOAD
    assert done.offsets == [0, done.lengths[0]]
    assert names_in(tmp_path) == ["file"]


def test_server_joins_the_pieces_of_an_item(setup: Setup, tmp_path: Path) -> None:
    first = Put(1, 0, SEGMENT, [SPEC], [0], [1000])
    second = Put(1, 1, SEGMENT, [None, SPEC], [1000, 1024], [24, 1024])
    replies = setup.send(start_of(1, tmp_path / "file"), first, second, EndJob(1))
    done = replies[-1]
    assert isinstance(done, JobDone) and len(done.offsets) == 2
    content = memoryview((tmp_path / "file").read_bytes())
    for offset, length in zip(done.offsets, done.lengths, strict=True):
        tensor = decode(content[offset : offset + length], verify=True)
        assert tensor is not None and bytes(tensor.payload) == PAYLOAD


def test_server_drops_what_follows_when_a_job_has_failed(setup: Setup, tmp_path: Path) -> None:
    """Messages of the failed attempt are still on their way; they are not the next one's."""
    error = failed(setup.send(start_of(1, tmp_path / "missing" / "file"))).error
    assert error.type_name.endswith("FileNotFoundError") and error.errno == 2
    assert error.path is not None and "missing" in error.path and "Traceback" in error.traceback
    assert setup.send(put_of(1), EndJob(1)) == []
    assert setup.send(start_of(2, tmp_path / "file")) == [JobStarted(2)]
    assert setup.send(put_of(1, 1), EndJob(1)) == []
    assert setup.send(put_of(2)) == [Ack(2, 0)]
    (done,) = setup.send(EndJob(2))
    assert isinstance(done, JobDone) and len(done.offsets) == 1
    assert names_in(tmp_path) == ["file"]


@pytest.mark.parametrize("op", ["open", "write", "flush", "close", "mv"])
@pytest.mark.parametrize("action", [{"errno": 28}, {"raises": "AttributeError"}], ids=str)
def test_server_discards_the_file_when_the_filesystem_fails(
    action: dict[str, Any], op: str, setup: Setup, tmp_path: Path
) -> None:
    """Whatever it raises: also what unpickling it might have raised."""
    plan = FaultPlan(tmp_path / "plan")
    plan.add(op, "file", **action)
    folder = tmp_path / "there"
    folder.mkdir()
    fs = FaultFileSystem(**plan.options)
    replies = setup.send(start_of(1, folder / "file", fs), put_of(1), EndJob(1))
    assert isinstance(failure := replies[-1], JobFailed) and failure.job == 1
    assert failure.error.errno == 28 or "AttributeError" in failure.error.type_name
    assert names_in(folder) == []
    assert setup.send(EndJob(1)) == []


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([Put(1, 0, 99, [SPEC], [0], [1024])], "99"),
        ([put_of(1, nbytes=1000), EndJob(1)], "24 bytes of an item are missing"),
        ([put_of(1, nbytes=1000), put_of(1, 1)], "24 bytes of an item are missing"),
        ([Put(1, 0, SEGMENT, [SPEC], [0], [1025])], "1025"),
    ],
    ids=["no such segment", "item not complete", "next item too early", "piece too long"],
)
def test_server_fails_the_job_when_the_messages_make_no_sense(
    messages: list[Message], text: str, setup: Setup, tmp_path: Path
) -> None:
    """No file is published that is not what was planned."""
    replies = setup.send(start_of(1, tmp_path / "file"), *messages)
    assert isinstance(failure := replies[-1], JobFailed) and text in failure.error.text
    assert not failure.error.transient
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("when", ["unknown", "open", "written", "done", "failed", "refused"])
def test_server_answers_an_abort_when_the_job_is(when: str, setup: Setup, tmp_path: Path) -> None:
    """Always: the trainer waits for it before it uses the worker for something else."""
    target = tmp_path / ("missing/file" if when == "failed" else "file")
    start = start_of(1, target)
    before: dict[str, list[Message]] = {
        "unknown": [],
        "open": [start],
        "written": [start, put_of(1)],
        "done": [start, put_of(1), EndJob(1)],
        "failed": [start],
        "refused": [replace(start, filesystem=b"cno_such_module\nThing\n.")],
    }
    setup.send(*before[when])
    answer = failed(setup.send(AbortJob(1)))
    assert (answer.job, answer.error.type_name) == (1, ABORTED)
    assert names_in(tmp_path) == (["file"] if when == "done" else [])
    assert setup.send(put_of(1, 1), EndJob(1)) == []


def test_server_spares_the_job_when_the_abort_is_of_an_earlier_one(
    setup: Setup, tmp_path: Path
) -> None:
    setup.send(start_of(2, tmp_path / "file"), put_of(2))
    assert failed(setup.send(AbortJob(1))).job == 1
    (done,) = setup.send(EndJob(2))
    assert isinstance(done, JobDone)


@pytest.mark.parametrize(
    ("pickled", "text"),
    [
        (b"cno_such_module\nThing\n.", "no_such_module"),
        (b"cos\nno_such_name\n.", "no_such_name"),
        (b"cos\nstrerror\n(S'not a number'\ntR.", "TypeError"),
    ],
    ids=["no module", "no class", "refused by its constructor"],
)
@pytest.mark.parametrize("what", ["filesystem", "extensions"])
def test_server_refuses_a_job_when_it_cannot_unpickle(
    what: str, pickled: bytes, text: str, setup: Setup, tmp_path: Path
) -> None:
    """So that the trainer writes the file; told apart from an error of the file."""
    (refused,) = setup.send(replace(start_of(1, tmp_path / "file"), **{what: pickled}))
    assert isinstance(refused, JobRefused) and refused.job == 1 and text in refused.reason
    assert setup.send(put_of(1), EndJob(1)) == []
    assert names_in(tmp_path) == []


def test_server_goes_where_the_trainer_is(setup: Setup, tmp_path: Path) -> None:
    start = start_of(1, tmp_path / "file")
    setup.send(replace(start, umask=0o077), EndJob(1))
    assert os.getcwd() == str(tmp_path)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert os.umask(0o022) == 0o077
    start = start_of(2, tmp_path / "file")
    replies = setup.send(replace(start, cwd=str(tmp_path / "gone")), EndJob(2))
    assert isinstance(replies[-1], JobDone)  # paths are absolute: it is no reason to fail


def test_server_stays_where_it_is_when_it_runs_in_the_trainer(tmp_path: Path) -> None:
    before, mask = os.getcwd(), os.umask(0o022)
    setup = Setup(owns_process=False)
    try:
        start = start_of(1, tmp_path / "file")
        replies = setup.send(replace(start, umask=0o077), EndJob(1))
        assert isinstance(replies[-1], JobDone)
        assert os.getcwd() == before and os.umask(0o022) == 0o022
    finally:
        setup.server.close()
        os.umask(mask)


@pytest.mark.parametrize("owns_process", [True, False])
def test_server_passes_on_a_keyboard_interrupt_only_when_it_runs_in_the_trainer(
    owns_process: bool, setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C24: there Ctrl-C is the user's; a worker ignores the signal."""
    made = Setup(owns_process=owns_process)
    plan = FaultPlan(tmp_path / "plan")
    plan.add("mv", "file", raises="KeyboardInterrupt")
    folder = tmp_path / "there"
    folder.mkdir()
    made.send(start_of(1, folder / "file", FaultFileSystem(**plan.options)), put_of(1))
    try:
        if owns_process:
            assert "KeyboardInterrupt" in failed(made.send(EndJob(1))).error.type_name
        else:
            with pytest.raises(KeyboardInterrupt):
                made.send(EndJob(1))
        assert names_in(folder) == []
    finally:
        made.server.close()


def test_server_discards_an_unfinished_job_when_it_is_closed(setup: Setup, tmp_path: Path) -> None:
    setup.send(start_of(1, tmp_path / "file"), put_of(1))
    setup.server.close()
    assert names_in(tmp_path) == []
    assert setup.server.buffers == {}


def test_server_forgets_a_segment_when_it_is_told(setup: Setup, tmp_path: Path) -> None:
    held = setup.server.buffers[SEGMENT][:10]
    assert setup.send(UnmapSegment(SEGMENT), UnmapSegment(77)) == []
    assert setup.server.buffers == {}
    assert bytes(held) == PAYLOAD[:10]  # whoever kept a slice still has it
    setup.map(SEGMENT, PAYLOAD)
    replies = setup.send(start_of(1, tmp_path / "file"), put_of(1), EndJob(1))
    assert isinstance(replies[-1], JobDone)


def test_worker_ends_when_the_process_that_it_is_to_watch_is_not_its_parent() -> None:
    """Its trainer has died, and the number may have been given to another process."""
    ours, theirs = os.pipe()  # any descriptor that stays open
    command = [sys.executable, "-c", BOOTSTRAP, str(ours), "1", *sys.path]
    ended = subprocess.run(command, pass_fds=[ours], timeout=50, stderr=subprocess.PIPE)
    os.close(ours)
    os.close(theirs)
    assert ended.returncode == 1
