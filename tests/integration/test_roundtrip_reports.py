"""What a save says: its report, the log, the streams, events."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from mpwriter import FsspecReader, MPFsspecWriter
from mpwriter._report import SaveEvent, SaveReport
from mpwriter.errors import StorageError
from tests.fakes import FaultPlan
from tests.states import (
    assert_loads_everywhere,
    blank,
    load_into,
    mixed_items,
    outcome,
    save_with,
    shard_bytes,
    shard_names,
)


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "plan")


def _check_report(report: SaveReport, folder: Path) -> None:
    sizes = {(folder / name).stat().st_size for name in shard_names(folder)}
    assert report.nbytes == shard_bytes(folder)
    assert report.files == len(shard_names(folder))
    assert sum(worker.files for worker in report.workers) == report.files
    assert sum(worker.nbytes for worker in report.workers) == report.nbytes
    if report.files == len(report.workers):
        assert {worker.nbytes for worker in report.workers} == sizes
    for worker in report.workers:
        assert worker.files > 0
        # Workers run side by side, but none of them longer than the save.
        assert 0 < worker.write_s + worker.publish_s <= report.write_s
        assert 0 <= worker.crc_s <= report.write_s
        assert worker.cpu_s >= 0
    assert 0 < report.plan_s
    assert 0 <= report.stage_s <= report.write_s
    assert 0 < report.commit_s
    assert report.plan_s + report.write_s + report.commit_s <= report.total_s
    assert report.gib_per_s == pytest.approx(report.nbytes / 2**30 / report.write_s)


@pytest.mark.parametrize(("single_file", "num_files"), [(True, 3), (False, 40)])
def test_save_reports_what_it_has_done(
    single_file: bool, num_files: int, checkpoint_dir: Path
) -> None:
    """Figures per worker and of the whole; they are those of the disk."""
    writer = MPFsspecWriter(checkpoint_dir, single_file, num_workers=3)
    assert writer.last_report is None
    save_with(writer, mixed_items(40))
    report = writer.last_report
    assert report is not None
    assert report.files == num_files
    assert report.rank == 0
    numbers = [worker.worker for worker in report.workers]
    assert len(set(numbers)) == len(numbers) == report.num_workers
    assert None not in numbers
    assert report.num_workers <= 3 and (report.num_workers == 3 or not single_file)
    _check_report(report, checkpoint_dir)


def test_save_reports_nothing_written_when_there_is_nothing(checkpoint_dir: Path) -> None:
    writer = MPFsspecWriter(checkpoint_dir, num_workers=2)
    save_with(writer, {})
    report = writer.last_report
    assert report is not None
    assert (report.nbytes, report.files, report.num_workers, report.workers) == (0, 0, 0, ())
    assert report.gib_per_s == 0


def test_save_logs_one_line(
    checkpoint_dir: Path, plan: FaultPlan, caplog: pytest.LogCaptureFixture
) -> None:
    """One INFO line with the figures; no warning, no storage option."""
    writer = MPFsspecWriter(
        f"fault://{checkpoint_dir}", num_workers=2, fileno=True, secret="hunter2", **plan.options
    )
    with caplog.at_level(logging.DEBUG, "mpwriter"):
        save_with(writer, mixed_items(20))
    report = writer.last_report
    assert report is not None
    lines = [record for record in caplog.records if record.name.startswith("mpwriter")]
    assert [record.levelno for record in lines if record.levelno >= logging.INFO] == [logging.INFO]
    (line,) = (record.getMessage() for record in lines if record.levelno == logging.INFO)
    for figure in (
        str(checkpoint_dir),
        f"{report.nbytes} bytes",
        "2 files",
        "2 workers",
        f"{report.stage_s:.3f} s",
        f"{report.write_s:.3f} s",
        f"{report.gib_per_s:.2f} GiB/s",
    ):
        assert figure in line
    assert "hunter2" not in caplog.text


def test_save_says_nothing_on_the_streams(
    checkpoint_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither here nor in the workers, unless asked to."""
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=2), mixed_items(20))
    load_into(blank(mixed_items(20)), FsspecReader(checkpoint_dir))
    assert capfd.readouterr() == ("", "")
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=2, progress=True), mixed_items(20))
    out, err = capfd.readouterr()
    assert out == ""
    assert str(checkpoint_dir) in err and "100%" in err


def test_save_tells_an_event_handler_what_happens(checkpoint_dir: Path) -> None:
    events: list[SaveEvent] = []

    def handle(event: SaveEvent) -> None:
        # What an event says has happened already.
        if event.name == "file_written":
            assert event.path is not None and Path(event.path).stat().st_size > 0
        if event.name == "shards_written":
            assert len(shard_names(checkpoint_dir)) == 2
            assert not (checkpoint_dir / ".metadata").exists()
        if event.name == "save_committed":
            assert (checkpoint_dir / ".metadata").exists()
        events.append(event)

    writer = MPFsspecWriter(checkpoint_dir, num_workers=2, event_handler=handle)
    save_with(writer, mixed_items(20))
    names = [event.name for event in events]
    assert names == [
        "save_started",
        "file_written",
        "file_written",
        "shards_written",
        "save_committed",
    ]
    written = {Path(event.path).name for event in events if event.path}
    assert written == set(shard_names(checkpoint_dir))
    report = writer.last_report
    assert report is not None
    assert {event.save_id for event in events} == {report.save_id}
    assert {event.checkpoint_id for event in events} == {str(checkpoint_dir)}
    assert {event.error for event in events} == {None}
    assert events[0].report is None
    assert events[-1].report == report


def test_save_tells_an_event_handler_of_a_failure(checkpoint_dir: Path, plan: FaultPlan) -> None:
    events: list[SaveEvent] = []
    plan.add("write", "__0_1.*", errno=28)
    writer = MPFsspecWriter(
        f"fault://{checkpoint_dir}", num_workers=2, event_handler=events.append, **plan.options
    )
    found = outcome(lambda: save_with(writer, mixed_items(20)))
    assert found[0] is StorageError
    names = [event.name for event in events]
    assert names[0] == "save_started"
    assert names.count("save_failed") == 1 and names[-1] == "save_failed"
    assert "save_committed" not in names and "shards_written" not in names
    assert isinstance(events[-1].error, StorageError)


@pytest.mark.parametrize("when", ["save_started", "file_written", "shards_written"])
def test_save_raises_what_an_event_handler_raises(when: str, checkpoint_dir: Path) -> None:
    """A way to give up a save: nothing of it stays, and the writer can be used again."""
    armed = True
    told: list[str] = []

    def handle(event: SaveEvent) -> None:
        told.append(event.name)
        if armed and event.name in (when, "save_failed"):
            raise LookupError(event.name)

    writer = MPFsspecWriter(checkpoint_dir, num_workers=2, event_handler=handle)
    found = outcome(lambda: save_with(writer, mixed_items(20)))
    assert found == (LookupError, when)
    assert told[-1] == ("save_started" if when == "save_started" else "save_failed")
    assert not (checkpoint_dir / ".metadata").exists()
    assert not checkpoint_dir.exists() or shard_names(checkpoint_dir) == []
    armed = False
    state = mixed_items(20)
    save_with(writer, state)
    assert_loads_everywhere(checkpoint_dir, state)
