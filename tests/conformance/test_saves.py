"""What every store has to give: saves that load, overwrites, refusals, the same by name."""

from __future__ import annotations

import errno

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from mpwriter import FsspecReader, MPFsspecWriter
from mpwriter._compat import SerializationFormat, StockFsspecReader
from mpwriter.errors import CheckpointExistsError, IncompleteCheckpointError, StorageError
from tests.asyncs import async_save, settled
from tests.saves import failure_in_save, failure_of, small_state
from tests.servers import Store
from tests.states import assert_same, blank, load_into, mixed_items
from tests.stores import WITH_READER, assert_holds, in_words, of_stranger, on, save, shards

ODD_NAMES = [
    "a [b]", "star*", "what?", "#1", "100%20", "50%", "a b", "ünï-漢字", "plus+and&=", "a'\"b", "~",
    "{x}", "$HOME", "a::b", "s3::x",
]  # fmt: skip


@pytest.mark.parametrize("single_file", [True, False])
def test_save_loads_back_when_it_holds_many_kinds(
    single_file: bool, store: Store, url: str
) -> None:
    state = {
        **mixed_items(12),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "half": torch.randn(7, 3).to(torch.bfloat16).t(),
        "nested": {"list": [torch.ones(2), {"deep": torch.zeros(1)}], "none": None},
    }
    writer = save(store, url, state, single_file_per_rank=single_file)
    assert_holds(store, url, state)
    report = writer.last_report
    assert report is not None and report.num_workers == (2 if store.serves_workers else 0)
    # Nothing beside the files of the checkpoint.
    assert all(name.endswith(".distcp") for name in shards(store, url))


def test_save_loads_with_the_stock_reader(store: Store, url: str) -> None:
    state = mixed_items(6)
    save(store, url, state)
    reader = StockFsspecReader(url, **store.options)
    assert_same(load_into(blank(state), reader), state)


def test_save_loads_back_when_it_is_empty(store: Store, url: str) -> None:
    save(store, url, {})
    assert store.names(url) == [".metadata"]
    assert_holds(store, url, {})


def test_save_loads_back_when_files_take_many_parts(store: Store, url: str) -> None:
    """64 MiB: several parts, blocks or chunks of a file on every store."""
    state = {f"layer{n}": torch.randn(2 << 20) for n in range(8)}
    save(store, url, state)
    assert_holds(store, url, state)


def test_save_loads_back_when_it_is_of_safetensors(store: Store, url: str) -> None:
    state = mixed_items(6)
    save(store, url, state, serialization_format=SerializationFormat.SAFETENSORS)
    assert_holds(store, url, state)


def test_load_reads_one_key_when_only_that_is_asked_for(store: Store, url: str) -> None:
    save(store, url, small_state(1))
    target = {"layer2.weight": torch.zeros(1000)}
    load_into(target, FsspecReader(url, **store.options))
    assert torch.equal(target["layer2.weight"], small_state(1)["layer2.weight"])


@pytest.mark.parametrize("name", ODD_NAMES)
def test_save_loads_back_when_the_name_is_odd(name: str, store: Store, url: str) -> None:
    """F01, F11: names are taken literally, and nothing is written anywhere else."""
    odd = f"{url}/{name}/step {name}"
    for number in (1, 2):
        save(store, odd, small_state(number), num_workers=1)
        assert_holds(store, odd, small_state(number))
        found = store.names(url)
        assert len(found) == 2, found
        assert {entry.rsplit("/", 1)[0] for entry in found} == {f"{name}/step {name}"}


def test_save_means_the_same_place_when_the_url_ends_in_slashes(store: Store, url: str) -> None:
    """F01."""
    save(store, f"{url}/", small_state(1))
    assert_holds(store, url, small_state(1))
    save(store, url, small_state(2))
    assert_holds(store, f"{url}//", small_state(2))
    assert len(store.names(url)) == 3


def test_save_replaces_a_checkpoint_when_one_is_there(store: Store, url: str) -> None:
    """B06: the old shards go, whatever the number of the new ones."""
    save(store, url, small_state(1), num_workers=4)
    old = set(shards(store, url))
    save(store, url, small_state(2), num_workers=1)
    assert_holds(store, url, small_state(2))
    assert not old & set(shards(store, url))
    assert len(shards(store, url)) == 1


def test_save_refuses_when_a_checkpoint_may_not_be_replaced(store: Store, url: str) -> None:
    """B05: before anything is touched."""
    save(store, url, small_state(1))
    before = store.names(url)
    with pytest.raises(CheckpointException) as caught:
        save(store, url, small_state(2), overwrite=False)
    assert isinstance(failure_of(caught.value), CheckpointExistsError)
    assert in_words(url) in str(caught.value)
    assert store.names(url) == before
    assert_holds(store, url, small_state(1))
    save(store, f"{url}2", small_state(2), overwrite=False)
    assert_holds(store, f"{url}2", small_state(2))


def test_async_save_holds_the_values_of_its_call(store: Store, url: str) -> None:
    """A01."""
    state = small_state(1, numel=100_000)
    saved = async_save(state, url, **store.options)
    for number in range(4):
        state[f"layer{number}.weight"].zero_()
    assert settled(saved) is None
    assert_holds(store, url, small_state(1, numel=100_000))


def test_storage_options_stay_when_the_checkpoint_id_changes(store: Store, url: str) -> None:
    """Invariant 13: writer and reader, one object for many checkpoints."""
    writer = MPFsspecWriter(f"{url}/unused", num_workers=1, **store.options)
    reader = FsspecReader(f"{url}/unused", **store.options)
    for number in range(3):
        place = f"{url}/{number}"
        dcp.save(small_state(number), checkpoint_id=place, storage_writer=writer, no_dist=True)
        target = blank(small_state(number))
        dcp.load(target, checkpoint_id=place, storage_reader=reader, no_dist=True)
        assert_same(target, small_state(number))


@pytest.mark.parametrize("left", ["nothing", "shards"])
def test_load_raises_when_there_is_no_checkpoint(left: str, store: Store, url: str) -> None:
    """B02."""
    if left == "shards":
        save(store, url, small_state(1))
        store.filesystem().rm_file(f"{store.path(url)}/.metadata")
    with pytest.raises(CheckpointException) as caught:
        load_into(blank(small_state(1)), FsspecReader(url, **store.options))
    error = failure_of(caught.value)
    assert isinstance(error, IncompleteCheckpointError) and isinstance(error, FileNotFoundError)
    assert in_words(url) in str(error)


def test_load_raises_when_a_shard_is_gone(store: Store, url: str) -> None:
    """A08."""
    save(store, url, small_state(1))
    lost = shards(store, url)[0]
    store.filesystem().rm_file(f"{store.path(url)}/{lost}")
    with pytest.raises(CheckpointException) as caught:
        load_into(blank(small_state(1)), FsspecReader(url, **store.options))
    assert lost in str(caught.value)


@on(*WITH_READER)
@pytest.mark.parametrize("overwrites", [False, True], ids=["first", "overwrites"])
def test_save_names_the_file_when_it_may_not_be_written(
    overwrites: bool, store: Store, url: str
) -> None:
    """A05, F12, F18: at once, and what was there stays."""
    if overwrites:
        save(store, url, small_state(1))
    before = store.names(url)
    assert store.of_reader is not None
    error = failure_in_save(url, small_state(2), **store.of_reader)
    assert isinstance(error, StorageError) and isinstance(error, OSError)
    assert error.errno == errno.EACCES
    assert error.path is not None and in_words(url) in error.path
    assert in_words(url) in str(error)
    assert store.names(url) == before
    if overwrites:
        reader = FsspecReader(url, **store.of_reader)
        assert_same(load_into(blank(small_state(1)), reader), small_state(1))


@on("s3", "azure")
def test_load_names_the_file_when_it_may_not_be_read(store: Store, url: str) -> None:
    """F18: it is no missing checkpoint."""
    save(store, url, small_state(1))
    reader = FsspecReader(url, **(of_stranger(store) or {}))
    with pytest.raises(CheckpointException) as caught:
        load_into(blank(small_state(1)), reader)
    error = failure_of(caught.value)
    assert isinstance(error, StorageError) and error.errno == errno.EACCES
    assert error.path is not None and in_words(url) in error.path and in_words(url) in str(error)
