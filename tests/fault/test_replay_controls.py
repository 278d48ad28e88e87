"""The replay finds what is wrong: records of good saves with one mistake put in, and stock's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpwriter._compat import StockFsspecWriter
from tests.fakes.recording import Operation
from tests.replay_scene import OLD, Scene, save_new
from tests.saves import save

Story = list[Operation]


@pytest.fixture(scope="module")
def overwrite(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    scene = Scene(tmp_path_factory.mktemp("overwrite"))
    scene.happened(lambda: save(scene.path, OLD))
    scene.record(save_new)
    return scene


@pytest.fixture
def retold(overwrite: Scene) -> Iterator[Scene]:
    """The scene of the overwrite, whose story a test may change."""
    operations = overwrite.operations
    yield overwrite
    overwrite.operations = operations


def is_shard(operation: Operation) -> bool:
    return ".distcp" in operation.path


def is_swap(operation: Operation) -> bool:
    return operation.kind == "rename" and operation.target.endswith("/.metadata")


def swap_of(story: Story) -> int:
    return next(n for n, operation in enumerate(story) if is_swap(operation))


def without(story: Story, wrong: Callable[[Operation], bool]) -> Story:
    kept = [operation for operation in story if not wrong(operation)]
    assert len(kept) < len(story), "nothing was left out"
    return kept


def shards_not_synced(story: Story) -> Story:
    return without(story, lambda operation: operation.kind == "fsync" and is_shard(operation))


def metadata_not_synced(story: Story) -> Story:
    return without(
        story, lambda operation: operation.kind == "fsync" and ".metadata" in operation.path
    )


def is_sync_of_directory(operation: Operation) -> bool:
    return operation.kind == "fsync" and operation.path == "checkpoint"


def names_of_shards_not_synced(story: Story) -> Story:
    swap = swap_of(story)
    return without(story[:swap], is_sync_of_directory) + story[swap:]


def swap_not_synced(story: Story) -> Story:
    swap = swap_of(story)
    return story[:swap] + without(story[swap:], is_sync_of_directory)


def swap_before_the_shards_have_names(story: Story) -> Story:
    names = [operation for operation in story if operation.kind == "rename" and is_shard(operation)]
    rest = without(story, names.__contains__)
    swap = swap_of(rest) + 1
    return rest[:swap] + names + rest[swap:]


def swap_before_a_shard_is_written(story: Story) -> Story:
    """All of one shard comes late, also its bytes."""
    name = next(operation.path for operation in story if is_shard(operation))
    late = [operation for operation in story if operation.path == name]
    rest = without(story, late.__contains__)
    swap = swap_of(rest) + 1
    return rest[:swap] + late + rest[swap:]


def old_shards_removed_before_the_swap(story: Story) -> Story:
    removals = [operation for operation in story if operation.kind == "unlink"]
    rest = without(story, removals.__contains__)
    swap = swap_of(rest)
    return rest[:swap] + removals + rest[swap:]


def old_metadata_removed_before_the_swap(story: Story) -> Story:
    swap = swap_of(story)
    removal = Operation("unlink", "checkpoint/.metadata")
    return [*story[:swap], removal, *story[swap:]]


def new_shards_over_the_old_ones(story: Story) -> Story:
    """A shard takes the name of an old one, the new metadata the name of the old."""
    old = [operation.path for operation in story if operation.kind == "unlink"]
    kept = without(story, lambda operation: operation.kind == "unlink")
    first = next(n for n, op in enumerate(kept) if op.kind == "rename" and is_shard(op))
    number = kept[first].target.partition(".")[0]  # __{rank}_{n}
    kept[first] = kept[first]._replace(target=next(n for n in old if n.startswith(f"{number}.")))
    return kept


# What the mistake shows as: when the power fails, and when processes are killed.
MISTAKES: dict[Callable[[Story], Story], tuple[set[str], set[str]]] = {
    shards_not_synced: ({"unreadable", "mixture"}, set()),
    metadata_not_synced: ({"unreadable"}, set()),
    names_of_shards_not_synced: ({"unreadable"}, set()),
    swap_not_synced: ({"unreadable", "lost"}, set()),
    swap_before_the_shards_have_names: ({"unreadable"}, {"unreadable"}),
    swap_before_a_shard_is_written: ({"unreadable"}, {"unreadable"}),
    old_shards_removed_before_the_swap: ({"unreadable"}, {"unreadable"}),
    old_metadata_removed_before_the_swap: ({"lost"}, {"lost"}),
    new_shards_over_the_old_ones: ({"mixture", "unreadable"}, {"mixture", "unreadable"}),
}


@pytest.mark.parametrize("mistake", list(MISTAKES), ids=lambda mistake: mistake.__name__)
def test_replay_finds_the_mistake(retold: Scene, mistake: Callable[[Story], Story]) -> None:
    by_power_loss, by_kill = MISTAKES[mistake]
    retold.operations = mistake(retold.operations)
    for power_loss, expected in ((True, by_power_loss), (False, by_kill)):
        report = retold.replay(power_loss=power_loss)
        assert expected <= report.kinds, report.problems[:3]
        assert bool(expected) == bool(report.problems)


def test_replay_finds_nothing_when_there_is_no_mistake(retold: Scene) -> None:
    for power_loss in (True, False):
        report = retold.replay(power_loss=power_loss)
        assert not report.problems
        assert set(report.outcomes) == {"old", "new"}
        assert report.prefixes == len(retold.operations) + 1
        assert report.states >= report.prefixes


def test_replay_finds_the_missing_directory_when_its_parents_are_not_synced(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path)
    scene.checkpoint = "run/checkpoint"
    scene.record(save_new)
    scene.operations = without(
        scene.operations, lambda operation: operation.kind == "fsync" and operation.path == "run"
    )
    report = scene.replay(power_loss=True)
    assert report.kinds == {"lost"}
    assert not scene.replay(power_loss=False).problems


def test_replay_finds_what_stock_does_when_it_overwrites(tmp_path: Path) -> None:
    """A killed save leaves new shards under the old metadata, or no metadata at all."""
    scene = Scene(tmp_path)
    one_after_the_other = {"single_file_per_rank": False, "thread_count": 1}

    def save_by_stock(place: str, number: int, **recording: str) -> None:
        scene.save_by_stock(StockFsspecWriter(place, **one_after_the_other, **recording), number)

    scene.happened(lambda: save_by_stock(str(scene.path), 1))
    scene.record(lambda place, recording: save_by_stock(place, 2, **recording))
    assert {"mixture", "lost"} <= scene.replay(power_loss=False).kinds
