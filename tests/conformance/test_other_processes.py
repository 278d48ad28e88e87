"""What other processes do to a checkpoint is seen at once, whatever listings are remembered."""

from __future__ import annotations

import contextlib
from typing import Any

import fsspec
import pytest
from torch.distributed.checkpoint.api import CheckpointException

from mpwriter import MPFsspecWriter
from mpwriter.errors import CheckpointExistsError, IncompleteCheckpointError
from tests.elsewhere import OtherProcess
from tests.saves import failure_of, small_state
from tests.servers import Store
from tests.states import save_with
from tests.stores import NO_MEMORY, assert_holds, on, save, shards


def look(store: Store, url: str) -> None:
    """Fill the listing cache of this process, as a user's own look around does."""
    fs, path = fsspec.url_to_fs(url, **store.options)
    for place in (path, path.rpartition("/")[0]):
        with contextlib.suppress(FileNotFoundError):
            fs.ls(place, detail=True)


def refusal(store: Store, url: str, state: dict[str, Any]) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        save(store, url, state, overwrite=False)
    return failure_of(caught.value)


# -- in the other process -----------------------------------------------------------------------


def save_small(url: str, options: dict[str, Any], number: int, num_tensors: int) -> None:
    writer = MPFsspecWriter(url, num_workers=1, **options)
    save_with(writer, small_state(number, num_tensors=num_tensors))


def remove_metadata(url: str, options: dict[str, Any]) -> None:
    fs, path = fsspec.url_to_fs(url, **options)
    fs.rm_file(f"{path}/.metadata")


# -----------------------------------------------------------------------------------------------


@on(*NO_MEMORY)
def test_load_is_of_the_newest_checkpoint_when_another_process_has_saved(
    store: Store, url: str, elsewhere: OtherProcess
) -> None:
    """Of another length than the one before, so that a remembered one cuts it off."""
    look(store, url)
    with pytest.raises(CheckpointException):
        assert_holds(store, url, small_state(1))
    for number, num_tensors in ((1, 1), (2, 60), (3, 2)):
        look(store, url)
        elsewhere.run(save_small, url, dict(store.options), number, num_tensors)
        assert_holds(store, url, small_state(number, num_tensors=num_tensors))


@on(*NO_MEMORY)
def test_save_sees_the_checkpoint_that_another_process_has_saved(
    store: Store, url: str, elsewhere: OtherProcess
) -> None:
    """B05, B06: it refuses to replace it, or removes all of it."""
    look(store, url)
    elsewhere.run(save_small, url, dict(store.options), 1, 60)
    assert isinstance(refusal(store, url, small_state(2)), CheckpointExistsError)
    save(store, url, small_state(2))
    look(store, url)
    elsewhere.run(save_small, url, dict(store.options), 3, 60)
    save(store, url, small_state(4))
    assert_holds(store, url, small_state(4))
    assert len(shards(store, url)) == 2


@on(*NO_MEMORY)
def test_checkpoint_is_gone_when_another_process_has_removed_its_metadata(
    store: Store, url: str, elsewhere: OtherProcess
) -> None:
    """B02."""
    save(store, url, small_state(1))
    look(store, url)
    elsewhere.run(remove_metadata, url, dict(store.options))
    with pytest.raises(CheckpointException) as caught:
        assert_holds(store, url, small_state(1))
    assert isinstance(failure_of(caught.value), IncompleteCheckpointError)
    save(store, url, small_state(2), overwrite=False)
    assert_holds(store, url, small_state(2))
