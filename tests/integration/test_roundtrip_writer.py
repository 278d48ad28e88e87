"""The writer as a user handles it: arguments, several saves, reports, log and events."""

from __future__ import annotations

import inspect
import logging
import pickle
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from mpwriter import FsspecReader, MPFsspecWriter, SerializationFormat
from mpwriter._compat import StockFsspecWriter
from mpwriter._report import SaveEvent, SaveReport
from mpwriter.errors import CheckpointExistsError, StorageError
from tests.fakes import FaultPlan
from tests.states import (
    assert_loads_everywhere,
    assert_same,
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


# -- arguments -------------------------------------------------------------------------------


def test_writer_takes_the_positional_arguments_of_stock(checkpoint_dir: Path) -> None:
    """Moving from FsspecWriter is a one-word change."""
    names = list(inspect.signature(StockFsspecWriter.__init__).parameters)
    ours = list(inspect.signature(MPFsspecWriter.__init__).parameters)
    renamed = {"thread_count": "num_workers", "per_thread_copy_ahead": "per_worker_copy_ahead"}
    expected = [renamed.get(name, name) for name in names if name != "kwargs"]
    assert ours[: len(expected)] == expected
    state = mixed_items(20)
    arguments = (checkpoint_dir, True, True, 3, 10_000_000, True, None)
    writer = MPFsspecWriter(*arguments, SerializationFormat.TORCH_SAVE)
    save_with(writer, state)
    assert len(shard_names(checkpoint_dir)) == 3
    assert_loads_everywhere(checkpoint_dir, state)


def test_writer_takes_the_keywords_of_stock(checkpoint_dir: Path, plan: FaultPlan) -> None:
    """And passes on what is for the filesystem."""
    state = mixed_items(20)
    writer = MPFsspecWriter(
        path=f"fault://{checkpoint_dir}",
        single_file_per_rank=True,
        sync_files=False,
        thread_count=2,
        per_thread_copy_ahead=5000,
        overwrite=True,
        **plan.options,
    )
    save_with(writer, state)
    assert len(shard_names(checkpoint_dir)) == 2
    assert plan.calls("fileno", "*.distcp") == []  # nothing was synced
    assert writer.last_report is not None and writer.last_report.num_workers == 2
    assert_loads_everywhere(checkpoint_dir, state)


def test_writer_uses_one_file_per_tensor_when_told_so_by_position(checkpoint_dir: Path) -> None:
    save_with(MPFsspecWriter(checkpoint_dir, False, False, 2), mixed_items(7))
    assert len(shard_names(checkpoint_dir)) == 7


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"num_workers": 2, "thread_count": 2}, "thread_count"),
        ({"per_worker_copy_ahead": 1, "per_thread_copy_ahead": 1}, "per_thread_copy_ahead"),
    ],
)
def test_writer_refuses_both_names_of_one_option(
    arguments: dict[str, Any], name: str, checkpoint_dir: Path
) -> None:
    with pytest.raises(TypeError, match=name):
        MPFsspecWriter(checkpoint_dir, **arguments)


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("num_worker", "num_workers"),
        ("numworkers", "num_workers"),
        ("time_out_s", "timeout_s"),
        ("timeouts", "timeout_s"),
        ("retires", "retries"),
        ("sync_file", "sync_files"),
        ("over_write", "overwrite"),
        ("thread_counts", "thread_count"),
        ("per_thread_copyahead", "per_thread_copy_ahead"),
        ("staging_budget", "staging_budget_bytes"),
        ("extensions", "_extensions"),
        ("event_handlers", "event_handler"),
        ("single_file_per_node", "single_file_per_rank"),
    ],
)
def test_writer_refuses_a_misspelt_keyword(misspelt: str, meant: str, checkpoint_dir: Path) -> None:
    """It would be taken for a storage option, and ignored."""
    with pytest.raises(TypeError, match=rf"'{misspelt}'.*'{meant}'"):
        MPFsspecWriter(checkpoint_dir, **{misspelt: 1})
    assert not checkpoint_dir.exists()


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("num_worker", "num_workers"),
        ("time_out_s", "timeout_s"),
        ("verfy", "verify"),
        ("extension_registry", "_extension_registry"),
    ],
)
def test_reader_refuses_a_misspelt_keyword(misspelt: str, meant: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=rf"'{misspelt}'.*'{meant}'"):
        FsspecReader(tmp_path, **{misspelt: 1})


def test_writer_passes_on_a_keyword_that_the_filesystem_knows(checkpoint_dir: Path) -> None:
    """However much it looks like one of ours; and one that looks like nothing."""

    class PatientFileSystem(LocalFileSystem):
        protocol = "patient"

        def __init__(self, timeout: float = 0, **options: Any) -> None:
            super().__init__(**options)
            self.timeout = timeout

    fsspec.register_implementation("patient", PatientFileSystem, clobber=True)
    for patient in (MPFsspecWriter, FsspecReader):
        patient(f"patient://{checkpoint_dir}", timeout=4, anything="else")
        with pytest.raises(TypeError, match=r"'timeout'.*'timeout_s'"):
            patient(checkpoint_dir, timeout=4)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"num_workers": 0}, "num_workers"),
        ({"num_workers": -1}, "num_workers"),
        ({"num_workers": 1.5}, "num_workers"),
        ({"num_workers": True}, "num_workers"),
        ({"thread_count": 0}, "num_workers"),
        ({"per_worker_copy_ahead": -1}, "per_worker_copy_ahead"),
        ({"retries": -1}, "retries"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": -3.0}, "timeout_s"),
        ({"serialization_format": "zip"}, "zip"),
    ],
)
def test_writer_refuses_a_value_out_of_range(
    arguments: dict[str, Any], name: str, checkpoint_dir: Path
) -> None:
    with pytest.raises(ValueError, match=name):
        MPFsspecWriter(checkpoint_dir, **arguments)


def test_writer_can_be_pickled(checkpoint_dir: Path) -> None:
    """It holds options only; saves belong to threads."""
    writer = MPFsspecWriter(checkpoint_dir, num_workers=2, sync_files=False)
    save_with(writer, {"a": 1})
    state = mixed_items(9)
    copied = pickle.loads(pickle.dumps(writer))
    save_with(copied, state)
    assert_loads_everywhere(checkpoint_dir, state)


# -- several saves of one writer ---------------------------------------------------------------


def test_save_has_an_id_of_its_own_each_time(checkpoint_dir: Path) -> None:
    """G15: two saves of one writer into one directory."""
    writer = MPFsspecWriter(checkpoint_dir, num_workers=2)
    seen = []
    for number in range(3):
        state = {f"weight{n}": torch.full((100,), float(number)) for n in range(4)}
        metadata = save_with(writer, state)
        stored = FsspecReader(checkpoint_dir).read_metadata().storage_meta
        report = writer.last_report
        assert stored is not None and report is not None
        assert metadata.storage_meta.save_id == stored.save_id == report.save_id
        assert stored.checkpoint_id == report.checkpoint_id == str(checkpoint_dir)
        assert str(writer.checkpoint_id) == str(checkpoint_dir)
        # Of the save before nothing is left.
        assert all(stored.save_id[:8] in name for name in shard_names(checkpoint_dir))
        assert_loads_everywhere(checkpoint_dir, state)
        seen.append(stored.save_id)
    assert len(set(seen)) == 3


def test_reset_moves_the_writer_and_keeps_its_options(tmp_path: Path, plan: FaultPlan) -> None:
    """G15: storage options too, which stock forgets."""
    first, second = f"fault://{tmp_path / 'first'}", f"fault://{tmp_path / 'second'}"
    writer = MPFsspecWriter(first, False, num_workers=2, **plan.options)
    save_with(writer, mixed_items(3))
    writer.reset(second)
    assert str(writer.checkpoint_id).endswith("second")
    state = mixed_items(5)
    save_with(writer, state)
    assert writer.last_report is not None
    assert writer.last_report.checkpoint_id.endswith("second")
    assert len(shard_names(tmp_path / "first")) == 3
    assert len(shard_names(tmp_path / "second")) == 5
    folders = [Path(call.path).parent.name for call in plan.calls("open", "*.distcp")]
    assert folders.count("first") == 3 and folders.count("second") == 5
    assert_loads_everywhere(tmp_path / "second", state)
    # Without an id it stays where it is, with a new save.
    before = writer.last_report.save_id
    writer.reset()
    save_with(writer, {"a": 1})
    assert writer.last_report.save_id != before
    assert_loads_everywhere(tmp_path / "second", {"a": 1})


def test_reader_can_be_used_again_and_moved(tmp_path: Path, plan: FaultPlan) -> None:
    """G15: as the writer."""
    states = [mixed_items(4), mixed_items(6)]
    for number, state in enumerate(states):
        save_with(MPFsspecWriter(tmp_path / str(number), num_workers=1), state)
    reader = FsspecReader(f"fault://{tmp_path / '0'}", **plan.options)
    for _ in range(2):
        assert_same(load_into(blank(states[0]), reader), states[0])
    moved = f"fault://{tmp_path / '1'}"
    assert_same(load_into(blank(states[1]), reader, checkpoint_id=moved), states[1])
    assert reader.checkpoint_id == moved
    assert len(plan.calls("open_read", "*.distcp")) == 3


def test_save_refuses_to_overwrite_when_told_so(checkpoint_dir: Path) -> None:
    state = mixed_items(6)
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=2), state)
    before = {name: (checkpoint_dir / name).read_bytes() for name in shard_names(checkpoint_dir)}
    writer = MPFsspecWriter(checkpoint_dir, num_workers=2, overwrite=False)
    found = outcome(lambda: save_with(writer, {"a": 1}))
    assert found[0] is CheckpointExistsError
    assert str(checkpoint_dir) in found[1]
    after = {name: (checkpoint_dir / name).read_bytes() for name in shard_names(checkpoint_dir)}
    assert after == before
    assert_loads_everywhere(checkpoint_dir, state)
    save_with(writer.__class__(checkpoint_dir / "new", overwrite=False), {"a": 1})


# -- what it says ------------------------------------------------------------------------------


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
