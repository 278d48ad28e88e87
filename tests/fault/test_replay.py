"""A crash after every file operation of a save: the old checkpoint loads, the new one, or none.

With sync_files a loss of power is survived, without it the death of all processes.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from mpwriter import MPFsspecWriter
from mpwriter._compat import HAS_RANK_METADATA, StockFsspecWriter
from tests.fakes import FaultPlan
from tests.replay_scene import NEW, OLD, Scene, save_new
from tests.saves import save, small_state


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


# -- saves that end well ------------------------------------------------------------------------


@pytest.mark.parametrize("sync_files", [True, False])
def test_first_save_is_there_or_not_when_all_crashes(scene: Scene, sync_files: bool) -> None:
    """Invariant 3, in a directory whose parents are new, too."""
    scene.checkpoint = "run/step-1/checkpoint"
    scene.record(lambda place, recording: save_new(place, recording, sync_files=sync_files))
    kinds = [operation.kind for operation in scene.operations]
    assert len({operation.pid for operation in scene.operations}) == 3, "trainer and two workers"
    assert kinds.count("mkdir") == 3
    assert kinds.count("fsync") == (2 * 3 + 3 if sync_files else 0), "files and directories"
    scene.replay(power_loss=sync_files).assert_sound(sees=["none", "new"])


OVERWRITES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as many workers": ({}, {}),
    "fewer workers": ({"num_workers": 4}, {"num_workers": 1}),
    "one file per value": ({}, {"single_file_per_rank": False}),
}


@pytest.mark.parametrize("sync_files", [True, False])
@pytest.mark.parametrize("kind", list(OVERWRITES))
def test_overwrite_is_old_or_new_when_all_crashes(
    scene: Scene, kind: str, sync_files: bool
) -> None:
    """Invariant 3, B01, B06."""
    of_old, of_new = OVERWRITES[kind]
    scene.happened(lambda: save(scene.path, OLD, **of_old))
    scene.record(
        lambda place, recording: save_new(place, recording, sync_files=sync_files, **of_new)
    )
    removed = sum(operation.kind == "unlink" for operation in scene.operations)
    assert removed == of_old.get("num_workers", 2)
    scene.replay(power_loss=sync_files).assert_sound(sees=["old", "new"])


@pytest.mark.parametrize("sync_files", [True, False])
def test_overwrite_is_old_or_new_when_the_old_one_is_of_stock(
    scene: Scene, sync_files: bool
) -> None:
    """Invariant 3: stock's files have names without a save in them."""
    scene.happened(lambda: scene.save_by_stock(StockFsspecWriter(str(scene.path), thread_count=2)))
    assert f"{scene.checkpoint}/__0_1.distcp" in scene.before
    scene.record(lambda place, recording: save_new(place, recording, sync_files=sync_files))
    assert f"{scene.checkpoint}/__0_1.distcp" not in scene.tree()
    scene.replay(power_loss=sync_files).assert_sound(sees=["old", "new"])


def test_overwrite_is_old_or_new_when_payloads_are_large(scene: Scene) -> None:
    """Invariant 3: also where large payloads go to the disk past the page cache."""
    scene.old, scene.new = (small_state(number, num_tensors=2, numel=700_000) for number in (1, 2))
    scene.happened(lambda: save(scene.path, scene.old))
    scene.record(lambda place, recording: save(place, scene.new, **recording))
    written = sum(len(operation.chunk) for operation in scene.operations)
    assert written > 2 * 4 * 700_000
    scene.replay(power_loss=True).assert_sound(sees=["old", "new"])


def test_overwrite_is_old_or_new_when_the_trainer_writes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariants 3, 9: without workers."""
    monkeypatch.setattr("mpwriter._save.refusal", lambda fs: "this test wants it")
    scene.happened(lambda: save(scene.path, OLD))
    scene.record(save_new)
    assert {operation.pid for operation in scene.operations} == {os.getpid()}
    scene.replay(power_loss=True).assert_sound(sees=["old", "new"])


if HAS_RANK_METADATA:

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    @pytest.mark.parametrize("old", [False, True])
    def test_save_of_one_rank_is_old_or_new_when_all_crashes(scene: Scene, old: bool) -> None:
        """Invariant 17: the metadata file is the rank's own."""

        def save_alone(place: str | Path, state: dict[str, Any], **recording: Any) -> None:
            writer = MPFsspecWriter(place, num_workers=2, **recording)
            dcp.save(state, storage_writer=writer, no_dist=True, use_collectives=False)

        if old:
            scene.happened(lambda: save_alone(scene.path, OLD))
        scene.record(lambda place, recording: save_alone(place, NEW, **recording))
        assert f"{scene.checkpoint}/__0.metadata" in scene.tree()
        assert f"{scene.checkpoint}/.metadata" not in scene.tree()
        scene.replay(power_loss=True).assert_sound(sees=["old" if old else "none", "new"])


def test_overwrite_is_old_or_new_when_files_were_written_twice(
    scene: Scene, plan: FaultPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 15: after a transient error the second try begins where the first one was."""
    monkeypatch.setattr("mpwriter._feed._RETRY_PAUSE_S", 0.01)
    scene.happened(lambda: save(scene.path, OLD))
    plan.add("flush", "*.distcp", errno=errno.ETIMEDOUT, after=True, times=2)
    plan.add("flush", ".metadata", errno=errno.ETIMEDOUT, after=True, times=1)
    error = scene.record(
        lambda place, recording: save_new(place, recording, **plan.options),
        protocol="recordedfault",
    )
    assert error is None
    assert [call.result for call in plan.calls("flush")].count("TimeoutError") == 3
    scene.replay(power_loss=True).assert_sound(sees=["old", "new"])


# -- saves that fail ----------------------------------------------------------------------------


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("op", "name"), [("write", "__0_1.*"), ("mv", "__0_1.*"), ("write", ".metadata")]
)
def test_failed_save_leaves_the_old_one_when_all_crashes(
    scene: Scene, plan: FaultPlan, op: str, name: str, old: bool
) -> None:
    """Invariant 3, A05: the disk is full in the middle of it."""
    if old:
        scene.happened(lambda: save(scene.path, OLD))
    plan.add(op, name, errno=errno.ENOSPC)
    error = scene.record(
        lambda place, recording: save_new(place, recording, **plan.options),
        protocol="recordedfault",
    )
    assert isinstance(error, OSError) and error.errno == errno.ENOSPC
    kept = "old" if old else "none"
    scene.replay(power_loss=True, ends=[kept]).assert_sound(sees=[kept])


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("done", [False, True])
def test_failed_swap_leaves_either_when_all_crashes(
    scene: Scene, plan: FaultPlan, done: bool, old: bool
) -> None:
    """Invariant 3: the rename of the metadata raises; `done`: though it has been carried out."""
    if old:
        scene.happened(lambda: save(scene.path, OLD))
    kept = "old" if old else "none"
    plan.add("mv", ".metadata", errno=errno.EIO, after=done)
    error = scene.record(
        lambda place, recording: save_new(place, recording, **plan.options),
        protocol="recordedfault",
    )
    assert isinstance(error, OSError) and error.errno == errno.EIO
    either = {kept, "new"} if done else {kept}
    scene.replay(power_loss=True, ends=either).assert_sound(sees=either)
    seen = "new" if done else kept
    scene.replay(power_loss=False, ends=[seen]).assert_sound(sees=either)


# -- saves after a killed one -------------------------------------------------------------------


@pytest.mark.parametrize("old", [False, True])
def test_save_is_sound_when_a_killed_one_has_left_its_files(scene: Scene, old: bool) -> None:
    """Invariant 3, B15: nothing that the killed save has done need be durable."""
    if old:
        scene.happened(lambda: save(scene.path, OLD))
    else:
        scene.checkpoint = "run/checkpoint"
    scene.record(save_new)
    history = scene.operations
    renames = [n for n, operation in enumerate(history) if operation.kind == "rename"]
    assert history[renames[-1]].target.endswith("/.metadata")
    assert len(renames) == 3
    points = {
        "one directory was made": 1,
        "both directories were made": [operation.kind for operation in history].index("open"),
        "a shard is half written": renames[0] - 3,
        "a shard has its name": renames[0] + 1,
        "the metadata has no name yet": renames[-1],
    }
    for point, number in points.items():
        if old and "made" in point:
            continue
        scene.crash_at(history[:number])
        left = [path for path in scene.tree() if path.endswith(".tmp")]
        assert left or point not in ("a shard is half written", "the metadata has no name yet")
        scene.record(save_new)
        assert not [path for path in scene.tree() if path.endswith(".tmp")], point
        scene.replay(power_loss=True).assert_sound(sees=["old" if old else "none", "new"])
