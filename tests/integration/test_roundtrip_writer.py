"""The writer as a user handles it: arguments, and several saves of one writer."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

from mpwriter import FsspecReader, MPFsspecWriter, SerializationFormat
from mpwriter._compat import StockFsspecWriter
from mpwriter.errors import CheckpointExistsError
from tests.fakes import FaultPlan
from tests.states import (
    assert_loads_everywhere,
    assert_same,
    blank,
    load_into,
    mixed_items,
    outcome,
    save_with,
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


def test_save_names_its_own_files_when_the_plan_is_a_cached_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G15: of the plan of the first save only the rank counts."""
    for name in vars(SavePlanner):
        if name.startswith("_cached_"):
            monkeypatch.setattr(SavePlanner, name, {})
    writer = MPFsspecWriter(tmp_path / "0", num_workers=2)
    for number in range(3):
        state = {f"weight{n}": torch.full((100,), float(number)) for n in range(4)}
        writer.reset(tmp_path / str(number))
        save_with(writer, state, DefaultSavePlanner(enable_plan_caching=True))
        report = writer.last_report
        assert report is not None
        assert all(report.save_id[:8] in name for name in shard_names(tmp_path / str(number)))
        assert_loads_everywhere(tmp_path / str(number), state)
    assert SavePlanner._cached_final_save_plan  # it was used


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
