"""FsspecReader: what it loads, what it refuses, and what it asks of the storage."""

from __future__ import annotations

import copy
import dataclasses
import errno
import io
import logging
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from mpwriter import _fetch_decode, _fetch_plan, _metadata
from mpwriter._checksum import crc32
from mpwriter._compat import HAS_RANK_METADATA, storage_info
from mpwriter._container import frame
from mpwriter._reader import FsspecReader
from mpwriter._reader_agreement import RankView, check_agreement, with_view, without_views
from mpwriter._report import LoadEvent
from mpwriter.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    MPWriterError,
    ShapeMismatchError,
    StorageError,
)
from tests.fakes import FaultPlan
from tests.states import shard_names

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
# Those that stock does not save: it does not know their size.
REFUSED = [d for d in DTYPES if re.fullmatch(r"torch\.(u?int[1-7]|bits\w+)", str(d))]


def make_state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "weight": torch.randn(7, 5),
        "half": torch.randn(33).to(torch.bfloat16),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "nested": {"list": [torch.arange(5), {"x": torch.tensor([True, False])}], "step": 17},
        "text": "a string",
        "set": {1, 2},
        "none": None,
    }


def blank(state: Any) -> Any:
    """The same structure with other values."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return -1


def assert_equal(left: Any, right: Any) -> None:
    if isinstance(right, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert raw(left) == raw(right)
    elif isinstance(right, dict):
        assert left.keys() == right.keys()
        for key in right:
            assert_equal(left[key], right[key])
    elif isinstance(right, list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    else:
        assert left == right


def raw(tensor: torch.Tensor) -> bytes:
    """The elements in order."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
    return bytes(flat.view(torch.uint8).tolist())


def empty_metadata(storage_meta: StorageMeta) -> Metadata:
    metadata = Metadata({}, {}, {}, storage_meta)
    metadata.version = "1.0.0"  # as our writer does; torch 2.7 has no such field
    return metadata


class OurShard:
    """Builds a checkpoint in our format, in this process."""

    def __init__(self, directory: Path, name: str = "__0_0.abcdefgh.distcp") -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.name = name
        self.content = bytearray()
        self.metadata = empty_metadata(StorageMeta(str(directory), "save-1"))

    def add(self, key: str, value: Any) -> None:
        offset = len(self.content)
        if isinstance(value, torch.Tensor):
            payload = raw(value)
            dtype = str(value.dtype).removeprefix("torch.")
            made = frame(dtype, tuple(value.shape), len(payload), offset)
            self.content += made.prefix + payload + made.suffix(crc32(payload))
            zeros = torch.Size([0] * value.dim())
            chunk = ChunkStorageMetadata(zeros, value.size())
            self.metadata.state_dict_metadata[key] = TensorStorageMetadata(
                TensorProperties(dtype=value.dtype), value.size(), [chunk]
            )
            index = MetadataIndex(key, zeros, 0)
        else:
            stream = io.BytesIO()
            torch.save(value, stream)
            self.content += stream.getvalue()
            self.metadata.state_dict_metadata[key] = dcp.metadata.BytesStorageMetadata()
            index = MetadataIndex(key)
        self.metadata.planner_data[key] = (key,)
        self.metadata.storage_data[index] = storage_info(
            self.name, offset, len(self.content) - offset
        )

    def write(self) -> Path:
        (self.directory / self.name).write_bytes(self.content)
        (self.directory / ".metadata").write_bytes(_metadata.dumps(self.metadata))
        return self.directory


def save_stock(state: dict[str, Any], directory: Path, **options: Any) -> Path:
    writer = FileSystemWriter(directory, sync_files=False, **options)
    dcp.save(state, storage_writer=writer, no_dist=True)
    return directory


def save_ours(state: dict[str, Any], directory: Path) -> Path:
    """A flat state."""
    shard = OurShard(directory)
    for key, value in state.items():
        shard.add(key, value)
    return shard.write()


def load(target: dict[str, Any], reader: FsspecReader, planner: Any = None) -> dict[str, Any]:
    dcp.load(target, storage_reader=reader, planner=planner, no_dist=True)
    return target


def load_error(target: dict[str, Any], reader: FsspecReader, planner: Any = None) -> BaseException:
    """What this rank raised, out of DCP's own exception."""
    with pytest.raises(CheckpointException) as caught:
        load(target, reader, planner)
    (failure,) = caught.value.failures.values()
    assert str(failure[0]) in str(caught.value)
    return failure[0]


def shard_of(directory: Path) -> Path:
    (path,) = directory.glob("*.distcp")
    return path


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "plan")


FLAT = {"weight": torch.arange(12.0).view(3, 4), "bias": torch.arange(4), "note": "text"}


@pytest.fixture(params=["ours", "stock"])
def flat_dir(request: pytest.FixtureRequest, checkpoint_dir: Path) -> Path:
    save = save_ours if request.param == "ours" else save_stock
    return save(FLAT, checkpoint_dir)


# ---- what loads ----


@pytest.mark.parametrize("options", [{}, {"thread_count": 4}, {"single_file_per_rank": False}])
def test_load_gives_what_stock_saved(checkpoint_dir: Path, options: dict[str, Any]) -> None:
    """E01, E08: nested values, bytes items, odd strides, empty and 0-d tensors."""
    state = make_state()
    save_stock(state, checkpoint_dir, **options)
    assert_equal(load(blank(state), FsspecReader(checkpoint_dir)), state)


def test_load_gives_what_ours_saved(flat_dir: Path) -> None:
    assert_equal(load(blank(FLAT), FsspecReader(flat_dir)), FLAT)


def values_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 2, (6, 16), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in REFUSED], ids=str)
def test_load_does_as_stock_with_every_dtype(checkpoint_dir: Path, dtype: torch.dtype) -> None:
    """E05"""
    values = values_of(dtype)
    stock, ours = (torch.zeros(6, 16, dtype=torch.uint8).view(dtype) for _ in range(2))
    save_stock({"x": values}, checkpoint_dir)
    try:
        dcp.load({"x": stock}, checkpoint_id=checkpoint_dir, no_dist=True)
    except CheckpointException:
        with pytest.raises(CheckpointException):
            load({"x": ours}, FsspecReader(checkpoint_dir))
    else:
        load({"x": ours}, FsspecReader(checkpoint_dir))
        assert torch.equal(ours.view(torch.uint8), stock.view(torch.uint8))


@pytest.mark.parametrize("dtype", REFUSED, ids=str)
def test_stock_refuses_the_dtypes_that_are_not_loaded(
    checkpoint_dir: Path, dtype: torch.dtype
) -> None:
    """Else the test above has a gap."""
    with pytest.raises((RuntimeError, CheckpointException)):
        save_stock({"x": values_of(dtype)}, checkpoint_dir)


@pytest.mark.parametrize("verify", [True, False])
def test_load_reads_from_memory_filesystem(verify: bool) -> None:
    fs = fsspec.filesystem("memory")
    try:
        writer = dcp._fsspec_filesystem.FsspecWriter("memory://reader/ckpt")
        dcp.save(FLAT, storage_writer=writer, no_dist=True)
        reader = FsspecReader("memory://reader/ckpt", verify=verify)
        assert_equal(load(blank(FLAT), reader), FLAT)
    finally:
        fs.rm("/reader", recursive=True)


@pytest.mark.parametrize("form", ["str", "path", "slash", "url", "relative"])
def test_load_takes_a_path_in_any_form(
    flat_dir: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F01"""
    monkeypatch.chdir(flat_dir.parent)
    path = {
        "str": str(flat_dir),
        "path": flat_dir,
        "slash": f"{flat_dir}/",
        "url": f"file://{flat_dir}",
        "relative": flat_dir.name,
    }[form]
    reader = FsspecReader(path)
    assert reader.checkpoint_id == path
    monkeypatch.chdir("/")
    assert_equal(load(blank(FLAT), reader), FLAT)


def test_load_gives_keys_of_any_kind(checkpoint_dir: Path) -> None:
    """E12"""
    keys = ["foo", "Foo", "a/b", "../../x", "a.b.c", "nul\0", "ümläut", "k" * 5000, " "]
    state = {key: torch.full((3,), float(i)) for i, key in enumerate(keys)}
    save_ours(state, checkpoint_dir)
    assert_equal(load(blank(state), FsspecReader(checkpoint_dir)), state)


def test_load_gives_part_of_a_checkpoint(flat_dir: Path) -> None:
    """G12"""
    target = {"bias": torch.zeros(4, dtype=torch.int64), "new": torch.ones(2)}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    load(target, FsspecReader(flat_dir), planner)
    assert torch.equal(target["bias"], FLAT["bias"])
    assert torch.equal(target["new"], torch.ones(2))
    with pytest.raises(CheckpointException, match=r"Missing key .* new"):
        load({"new": torch.ones(2)}, FsspecReader(flat_dir))


@pytest.mark.parametrize("keys", [None, {"weight"}])
def test_load_builds_a_state_from_nothing(flat_dir: Path, keys: set[str] | None) -> None:
    """G12"""
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner(keys=keys)
    dcp.state_dict_loader._load_state_dict(
        state, storage_reader=FsspecReader(flat_dir), planner=planner, no_dist=True
    )
    assert_equal(state, FLAT if keys is None else {"weight": FLAT["weight"]})


def test_read_metadata_reads_that_of_a_rank(flat_dir: Path) -> None:
    (flat_dir / ".metadata").rename(flat_dir / "__0.metadata")
    metadata = FsspecReader(flat_dir).read_metadata(rank=0)
    assert metadata.state_dict_metadata.keys() == FLAT.keys()


if HAS_RANK_METADATA:

    def test_load_reads_rank_local_metadata(flat_dir: Path) -> None:
        (flat_dir / ".metadata").rename(flat_dir / "__0.metadata")
        reader = FsspecReader(flat_dir)
        assert_equal(load(blank(FLAT), reader), FLAT)
        assert (reader.rank, reader.use_collectives) == (0, False)

    def test_load_says_why_when_rank_metadata_is_damaged(flat_dir: Path) -> None:
        (flat_dir / ".metadata").unlink()
        (flat_dir / "__0.metadata").write_bytes(b"junk")
        error = load_error(blank(FLAT), FsspecReader(flat_dir))
        assert type(error) is CorruptCheckpointError
        assert "__0.metadata" in str(error)

    def test_prepare_local_plan_looks_at_the_files_when_ranks_are_on_their_own(
        flat_dir: Path,
    ) -> None:
        (flat_dir / ".metadata").rename(flat_dir / "__0.metadata")
        shard = shard_of(flat_dir)
        content = shard.read_bytes()
        shard.write_bytes(content[:-1])
        target = blank(FLAT)
        error = load_error(target, FsspecReader(flat_dir))
        assert type(error) is CorruptCheckpointError
        assert_equal(target, blank(FLAT))  # seen before anything was read
        shard.unlink()
        assert type(load_error(target, FsspecReader(flat_dir))) is IncompleteCheckpointError

else:  # torch 2.7 asks for the metadata of all ranks only

    def test_load_says_why_when_this_torch_reads_no_rank_metadata(flat_dir: Path) -> None:
        (flat_dir / ".metadata").rename(flat_dir / "__0.metadata")
        target = blank(FLAT)
        error = load_error(target, FsspecReader(flat_dir))
        assert type(error) is IncompleteCheckpointError
        assert "use_collectives=False" in str(error)
        assert "this torch cannot load" in str(error)
        assert_equal(target, blank(FLAT))


# ---- targets ----


def test_load_casts_to_the_type_of_the_target(flat_dir: Path) -> None:
    """E15"""
    target = {"weight": torch.zeros(3, 4, dtype=torch.bfloat16), "bias": torch.zeros(4)}
    load(target, FsspecReader(flat_dir))
    assert target["weight"].dtype == torch.bfloat16
    assert torch.equal(target["weight"].float(), FLAT["weight"])
    assert torch.equal(target["bias"], FLAT["bias"].float())


def test_load_writes_into_a_view_and_nothing_beside_it(flat_dir: Path) -> None:
    """E15"""
    base = torch.full((4, 8), -1.0)
    load({"weight": base.t()[1:7:2, :]}, FsspecReader(flat_dir))
    assert torch.equal(base.t()[1:7:2, :], FLAT["weight"])
    assert (base == -1).sum() == 32 - 12


@pytest.mark.parametrize("make", [torch.nn.Parameter, lambda t: t.requires_grad_()])
def test_load_writes_in_place_when_the_target_wants_a_gradient(
    flat_dir: Path, make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """E15"""
    target = make(torch.zeros(3, 4))
    address = target.data_ptr()
    loaded = load({"weight": target}, FsspecReader(flat_dir))
    assert loaded["weight"] is target
    assert target.requires_grad
    assert target.is_leaf
    assert target.data_ptr() == address
    assert torch.equal(target, FLAT["weight"])


def test_load_raises_when_the_target_is_expanded(flat_dir: Path) -> None:
    """E15"""
    error = load_error({"weight": torch.zeros(1, 4).expand(3, 4)}, FsspecReader(flat_dir))
    assert isinstance(error, RuntimeError)
    if sys.version_info >= (3, 11):
        assert any("'weight'" in note for note in error.__notes__)


def test_load_commits_each_tensor_once(flat_dir: Path) -> None:
    class Planner(DefaultLoadPlanner):
        committed: list[str]

        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            return torch.empty_like(super().resolve_tensor(read_item))

        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            self.committed.append(read_item.dest_index.fqn)
            super().resolve_tensor(read_item).copy_(tensor)

    planner = Planner()
    planner.committed = []
    assert_equal(load(blank(FLAT), FsspecReader(flat_dir), planner), FLAT)
    assert sorted(planner.committed) == ["bias", "weight"]


@pytest.mark.parametrize("shape", [(5,), (2, 2), (1, 4), (3,), ()])
def test_load_raises_when_the_target_has_another_shape(
    checkpoint_dir: Path, shape: tuple[int, ...]
) -> None:
    """A11"""
    save_stock({"a": torch.arange(4.0)}, checkpoint_dir)
    target = torch.full(shape, -1.0)
    error = load_error({"a": target}, FsspecReader(checkpoint_dir))
    assert isinstance(error, ValueError)
    assert "for a" in str(error)
    assert torch.equal(target, torch.full(shape, -1.0))


@pytest.mark.parametrize("shape", [(5,), (2, 2), (1, 4), (3,), ()])
def test_read_data_raises_when_a_planner_lets_another_shape_pass(
    checkpoint_dir: Path, shape: tuple[int, ...]
) -> None:
    """A11"""
    save_ours({"a": torch.arange(4.0)}, checkpoint_dir)
    target = torch.full(shape, -1.0)
    zero = torch.Size([0])
    read = ReadItem(
        LoadItemType.TENSOR, MetadataIndex("a"), zero, MetadataIndex("a", zero), zero,
        torch.Size([4]),
    )  # fmt: skip

    class Planner(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            return target

    reader = FsspecReader(checkpoint_dir)
    reader.set_up_storage_reader(reader.read_metadata(), True)
    with pytest.raises(ShapeMismatchError, match=r"^a: .*shape \(4,\)") as caught:
        reader.read_data(LoadPlan([read]), Planner())
    assert caught.value.key == "a"
    assert torch.equal(target, torch.full(shape, -1.0))


def slice_reads(key: str, corners: list[tuple[tuple[int, int], tuple[int, int]]]) -> list[ReadItem]:
    return [
        ReadItem(
            LoadItemType.TENSOR, MetadataIndex(key), torch.Size(offsets),
            MetadataIndex(key, [0, 0]), torch.Size(offsets), torch.Size(lengths),
        )
        for offsets, lengths in corners
    ]  # fmt: skip


def test_read_data_decodes_once_when_many_slices_are_wanted(
    checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E03: what a resharded load asks for, out of order and by columns."""
    stored = torch.arange(48.0).view(6, 8)
    save_ours({"a": stored}, checkpoint_dir)
    corners = [((4, 0), (2, 8)), ((0, 0), (4, 3)), ((0, 3), (4, 5))]
    target = torch.full((6, 8), -1.0)
    planner = DefaultLoadPlanner()
    decoded = count_calls(monkeypatch, _fetch_decode, "decode")
    reader = FsspecReader(checkpoint_dir)
    metadata = reader.read_metadata()
    planner.set_up_planner({"a": target}, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(LoadPlan(slice_reads("a", corners)), planner).wait()
    assert torch.equal(target, stored)
    assert len(decoded) == 1


def count_calls(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[Any]:
    calls: list[Any] = []
    original = getattr(module, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)
    return calls


def test_load_decodes_once_when_keys_are_tied(
    checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E09"""
    shard = OurShard(checkpoint_dir)
    shard.add("embedding", torch.randn(20, 3))
    metadata = shard.metadata
    metadata.state_dict_metadata["head"] = metadata.state_dict_metadata["embedding"]
    place = metadata.storage_data[MetadataIndex("embedding", [0, 0])]
    metadata.storage_data[MetadataIndex("head", [0, 0], 0)] = place
    shard.write()
    decoded = count_calls(monkeypatch, _fetch_decode, "decode")
    target = {"embedding": torch.zeros(20, 3), "head": torch.zeros(20, 3)}
    load(target, FsspecReader(checkpoint_dir))
    assert torch.equal(target["embedding"], target["head"])
    assert target["head"].any()
    assert len(decoded) == 1


# ---- nothing there ----


def break_missing(path: Path) -> None:
    shutil.rmtree(path)


def break_empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def break_shards_only(path: Path) -> None:
    (path / ".metadata").unlink()


def break_stock_temporary(path: Path) -> None:
    (path / ".metadata").rename(path / ".metadata.tmp")


def break_our_temporary(path: Path) -> None:
    (path / ".metadata").rename(path / ".metadata.abcdefgh.tmp")


def break_into_directory(path: Path) -> None:
    (path / ".metadata").unlink()
    (path / ".metadata").mkdir()


def break_into_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"x")


def break_into_other_rank(path: Path) -> None:
    (path / ".metadata").rename(path / "__7.metadata")


def break_into_something_else(path: Path) -> None:
    break_empty(path)
    (path / "notes.txt").touch()


ABSENT = [
    (break_missing, "no such directory"),
    (break_empty, "directory is empty"),
    (break_shards_only, "1 shard files but no .metadata: the save was interrupted"),
    (break_stock_temporary, "only .metadata.tmp and 1 shard files"),
    (break_our_temporary, "only .metadata.abcdefgh.tmp and 1 shard files"),
    (break_into_directory, ".metadata is a directory"),
    (break_into_file, "a file, not a directory"),
    (break_into_other_rank, "use_collectives=False"),
    (break_into_something_else, "no .metadata among its 1 entries"),
]


@pytest.mark.parametrize(("breaking", "text"), ABSENT)
def test_read_metadata_says_why_when_there_is_no_checkpoint(
    flat_dir: Path, breaking: Callable[[Path], None], text: str
) -> None:
    """B02, B17"""
    breaking(flat_dir)
    with pytest.raises(IncompleteCheckpointError) as caught:
        FsspecReader(flat_dir).read_metadata()
    assert text in str(caught.value)
    assert str(flat_dir) in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)
    assert caught.value.errno == errno.ENOENT
    assert caught.value.path == f"{flat_dir}/.metadata"


@pytest.mark.parametrize("planner", [DefaultLoadPlanner, _EmptyStateDictLoadPlanner])
@pytest.mark.parametrize(("breaking", "text"), ABSENT)
def test_load_says_why_when_there_is_no_checkpoint(
    flat_dir: Path, breaking: Callable[[Path], None], text: str, planner: Callable[[], Any]
) -> None:
    """B02: not the AssertionError "metadata is None" that DCP makes of it."""
    breaking(flat_dir)
    state = {} if planner is _EmptyStateDictLoadPlanner else blank(FLAT)
    error = load_error(state, FsspecReader(flat_dir), planner())
    assert type(error) is IncompleteCheckpointError
    assert text in str(error)
    assert state.get("note", -1) == -1


def test_load_says_why_when_a_subclass_reads_the_metadata(flat_dir: Path) -> None:
    class Reader(FsspecReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return super().read_metadata(*args, **kwargs)

    shutil.rmtree(flat_dir)
    assert type(load_error(blank(FLAT), Reader(flat_dir))) is IncompleteCheckpointError


def test_load_says_why_when_metadata_is_damaged(flat_dir: Path) -> None:
    path = flat_dir / ".metadata"
    path.write_bytes(path.read_bytes()[:100])
    error = load_error(blank(FLAT), FsspecReader(flat_dir))
    assert type(error) is CorruptCheckpointError
    assert error.path == str(path)
    with pytest.raises(CorruptCheckpointError):
        FsspecReader(flat_dir).read_metadata()


def test_load_does_not_take_rank_metadata_when_the_metadata_is_damaged(flat_dir: Path) -> None:
    """Left over from an earlier save, it would load old values without a word."""
    path = flat_dir / ".metadata"
    shutil.copy(path, flat_dir / "__0.metadata")
    path.write_bytes(path.read_bytes()[:100])
    assert type(load_error(blank(FLAT), FsspecReader(flat_dir))) is CorruptCheckpointError


def test_read_metadata_raises_at_once_when_a_rank_is_asked_for(flat_dir: Path) -> None:
    reader = FsspecReader(flat_dir)
    with pytest.raises(IncompleteCheckpointError, match=r"no __3\.metadata"):
        reader.read_metadata(rank=3)
    (flat_dir / ".metadata").unlink()
    with pytest.raises(IncompleteCheckpointError):
        reader.read_metadata()
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            reader.read_metadata(rank=3)
        except IncompleteCheckpointError as error:
            caught.append(error)

    thread = threading.Thread(target=ask)  # DCP asks both times on one thread
    thread.start()
    thread.join()
    assert len(caught) == 1


def test_read_metadata_gives_a_stand_in_that_raises_when_it_is_used(checkpoint_dir: Path) -> None:
    reader = FsspecReader(checkpoint_dir)
    with pytest.raises(IncompleteCheckpointError):
        reader.read_metadata()
    metadata = reader.read_metadata(rank=0)
    assert isinstance(metadata, Metadata)
    assert metadata
    assert "no such directory" in repr(metadata)
    fields = [field.name for field in dataclasses.fields(Metadata)]
    assert {"state_dict_metadata", "planner_data", "storage_data", "storage_meta"} <= {*fields}
    for name in fields:
        with pytest.raises(IncompleteCheckpointError):
            getattr(metadata, name)
    with pytest.raises(IncompleteCheckpointError):
        reader.set_up_storage_reader(metadata, True, rank=0, use_collectives=False)
    with pytest.raises(IncompleteCheckpointError):
        reader.read_metadata(rank=0)  # the failure was DCP's to hear once


def test_read_metadata_says_so_when_listing_is_forbidden(
    plan: FaultPlan, checkpoint_dir: Path
) -> None:
    checkpoint_dir.mkdir()
    plan.add("ls", errno=errno.EACCES)
    reader = FsspecReader(f"fault://{checkpoint_dir}", **plan.options)
    with pytest.raises(IncompleteCheckpointError, match="cannot be listed"):
        reader.read_metadata()


def test_read_metadata_raises_storage_error_when_reading_is_forbidden(
    plan: FaultPlan, flat_dir: Path
) -> None:
    plan.add("open_read", ".metadata", errno=errno.EACCES)
    reader = FsspecReader(f"fault://{flat_dir}", **plan.options)
    with pytest.raises(StorageError) as caught:
        reader.read_metadata()
    assert caught.value.errno == errno.EACCES
    assert ".metadata" in str(caught.value)
    assert type(load_error(blank(FLAT), reader)) is StorageError


def test_read_metadata_gives_a_new_object_each_time(flat_dir: Path) -> None:
    reader = FsspecReader(flat_dir)
    first = reader.read_metadata()
    first.state_dict_metadata.clear()
    second = reader.read_metadata()
    assert second.state_dict_metadata.keys() == FLAT.keys()
    assert second.storage_meta.load_id == reader.load_id
    reader.reset()
    assert second.storage_meta.load_id != reader.load_id


def test_set_up_storage_reader_raises_when_the_metadata_has_no_places(flat_dir: Path) -> None:
    with pytest.raises(CorruptCheckpointError):
        FsspecReader(flat_dir).set_up_storage_reader(Metadata({}), True)


# ---- damage ----


def cut(nbytes: int) -> Callable[[bytes], bytes]:
    return lambda content: content[: len(content) - nbytes]


@pytest.mark.parametrize(
    ("cutting", "key"),
    [(cut(1), None), (cut(700), None), (lambda c: c[: len(c) // 2], None), (lambda c: b"", None)],
)
def test_load_names_file_and_key_when_a_shard_is_cut_off(
    flat_dir: Path, cutting: Callable[[bytes], bytes], key: str | None
) -> None:
    """A08"""
    shard = shard_of(flat_dir)
    shard.write_bytes(cutting(shard.read_bytes()))
    error = load_error(blank(FLAT), FsspecReader(flat_dir))
    assert type(error) is CorruptCheckpointError
    assert error.path == str(shard)
    assert error.key in FLAT
    assert str(shard) in str(error)
    assert f"{error.key}: " in str(error)


def test_load_names_file_and_key_when_a_shard_is_missing(flat_dir: Path) -> None:
    """A08"""
    shard = shard_of(flat_dir)
    shard.unlink()
    error = load_error(blank(FLAT), FsspecReader(flat_dir))
    assert type(error) is IncompleteCheckpointError
    assert error.path == str(shard)
    assert error.key in FLAT


def test_load_raises_when_another_file_has_the_name_of_the_shard(flat_dir: Path) -> None:
    shard = shard_of(flat_dir)
    shard.write_bytes(random.Random(1).randbytes(shard.stat().st_size))
    assert type(load_error(blank(FLAT), FsspecReader(flat_dir))) is CorruptCheckpointError


def test_load_claims_no_memory_for_bytes_that_do_not_exist(flat_dir: Path) -> None:
    path = flat_dir / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for place in metadata.storage_data.values():
        place.length = 2**60
    path.write_bytes(_metadata.dumps(metadata))
    error = load_error(blank(FLAT), FsspecReader(flat_dir))
    assert type(error) is CorruptCheckpointError


@pytest.mark.parametrize("seed", range(4))
def test_load_gives_right_values_or_a_named_error_when_a_bit_flips(
    checkpoint_dir: Path, seed: int
) -> None:
    """Everywhere in a shard of ours: headers, payload, directory, and bytes items."""
    state = {
        "a": torch.randn(40),
        "b": torch.arange(3, dtype=torch.uint8),
        "lr": 0.125,
        "c": torch.randn(4, 3).to(torch.float16),
    }
    save_ours(state, checkpoint_dir)
    shard = shard_of(checkpoint_dir)
    content = shard.read_bytes()
    generator = random.Random(seed)
    found = 0
    for _ in range(150):
        damaged = bytearray(content)
        position = generator.randrange(len(content))
        damaged[position] ^= 1 << generator.randrange(8)
        shard.write_bytes(damaged)
        target = blank(state)
        try:
            load(target, FsspecReader(checkpoint_dir))
        except CheckpointException as error:
            ((inner, _),) = error.failures.values()
            assert isinstance(inner, MPWriterError), (position, inner)
            assert shard.name in str(inner)
            found += 1
        else:
            assert_equal(target, state)
    assert found > 60


@pytest.mark.parametrize("key", ["weight", "note"])
def test_load_finds_a_flipped_bit_in_a_stock_shard(checkpoint_dir: Path, key: str) -> None:
    save_stock({"weight": torch.full((64,), 7, dtype=torch.int8), "note": "text"}, checkpoint_dir)
    shard = shard_of(checkpoint_dir)
    mark = b"\x07" * 64 if key == "weight" else b"text"
    content = shard.read_bytes()
    assert content.count(mark) == 1
    shard.write_bytes(content.replace(mark, bytes([mark[0] ^ 4]) + mark[1:]))
    target: dict[str, Any] = {"weight": torch.zeros(64, dtype=torch.int8), "note": ""}
    error = load_error(target, FsspecReader(checkpoint_dir))
    assert type(error) is CorruptCheckpointError
    assert error.key == key
    assert not target["weight"].any() or key == "note"
    # Without verification it loads, as with stock.
    load(target, FsspecReader(checkpoint_dir, verify=False))


def test_load_tells_unverified_from_corrupt_when_stock_wrote_no_crc(
    checkpoint_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        save_stock(FLAT, checkpoint_dir)
    finally:
        torch.serialization.set_crc32_options(True)
    with caplog.at_level(logging.INFO, "mpwriter"):
        assert_equal(load(blank(FLAT), FsspecReader(checkpoint_dir)), FLAT)
    assert "2 of these items are unverified" in caplog.text


def test_load_logs_one_line_when_all_is_well(
    flat_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mpwriter"):
        load(blank(FLAT), FsspecReader(flat_dir))
    (record,) = [r for r in caplog.records if r.name.startswith("mpwriter")]
    assert record.getMessage().startswith(f"{flat_dir}: read 3 items, ")


def test_load_reports_what_it_read(flat_dir: Path) -> None:
    reader = FsspecReader(flat_dir)
    assert reader.last_report is None
    load(blank(FLAT), reader)
    report = reader.last_report
    assert report is not None
    assert report.checkpoint_id == str(flat_dir)
    assert (report.items, report.unverified, report.rank, report.num_workers) == (3, 0, 0, 0)
    assert report.files == len(shard_names(flat_dir))
    size = sum((flat_dir / name).stat().st_size for name in shard_names(flat_dir))
    assert 0 < report.nbytes <= size
    assert report.gib_per_s > 0


def test_load_tells_an_event_handler_what_happens(flat_dir: Path) -> None:
    events: list[LoadEvent] = []
    reader = FsspecReader(flat_dir, event_handler=events.append)
    load(blank(FLAT), reader)
    assert [event.name for event in events] == ["load_started", "load_finished"]
    assert events[0].report is None and events[1].report is reader.last_report
    (flat_dir / shard_names(flat_dir)[0]).unlink()
    error = load_error(blank(FLAT), reader)
    assert [event.name for event in events[2:]] == ["load_started", "load_failed"]
    assert events[3].error is error and events[3].report is None


@pytest.mark.parametrize("when", ["load_started", "load_finished", "load_failed"])
def test_load_is_what_it_is_when_an_event_handler_raises(
    when: str, flat_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only at the start can it say no."""

    def handle(event: LoadEvent) -> None:
        if event.name == when:
            raise LookupError("not today")

    reader = FsspecReader(flat_dir, event_handler=handle)
    if when == "load_started":
        assert isinstance(load_error(blank(FLAT), reader), LookupError)
        return
    if when == "load_failed":
        (flat_dir / shard_names(flat_dir)[0]).unlink()
        assert isinstance(load_error(blank(FLAT), reader), IncompleteCheckpointError)
    else:
        assert_equal(load(blank(FLAT), reader), FLAT)
    assert "not today" in caplog.text


def test_load_raises_when_the_metadata_names_no_place(flat_dir: Path) -> None:
    path = flat_dir / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    del metadata.storage_data[MetadataIndex("bias", [0])]
    path.write_bytes(_metadata.dumps(metadata))
    error = load_error(blank(FLAT), FsspecReader(flat_dir))
    assert type(error) is CorruptCheckpointError
    assert error.key == "bias"


# ---- containers that are not ours ----


def test_load_uses_torch_load_with_weights_only_when_a_container_is_of_another_kind(
    checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E08"""
    values = torch.randn(5, dtype=torch.complex64)
    shard = OurShard(checkpoint_dir)
    shard.add("plain", torch.ones(2))
    shard.add("conjugated", values)
    stream = io.BytesIO()
    torch.save(values.conj(), stream)  # a lazy bit in the pickle
    place = shard.metadata.storage_data[MetadataIndex("conjugated", [0])]
    place.offset, place.length = len(shard.content), len(stream.getvalue())
    shard.content += stream.getvalue()
    shard.write()
    calls = count_calls(monkeypatch, torch, "load")
    target = {"plain": torch.zeros(2), "conjugated": torch.zeros(5, dtype=torch.complex64)}
    load(target, FsspecReader(checkpoint_dir))
    assert torch.equal(target["conjugated"], values.conj())
    assert [kwargs["weights_only"] for _, kwargs in calls] == [True]


def test_load_keeps_the_exception_of_torch_load_when_it_refuses(checkpoint_dir: Path) -> None:
    class Custom:
        pass

    shard = OurShard(checkpoint_dir)
    shard.add("odd", torch.ones(2))
    stream = io.BytesIO()
    torch.save(range(3), stream)
    place = shard.metadata.storage_data[MetadataIndex("odd", [0])]
    place.offset, place.length = len(shard.content), len(stream.getvalue())
    shard.content += stream.getvalue()
    shard.write()
    error = load_error({"odd": torch.zeros(2)}, FsspecReader(checkpoint_dir))
    assert isinstance(error, pickle.UnpicklingError)


@pytest.mark.parametrize("payload", [b"", b"no zip at all", b"PK", b"x" * 5000])
def test_load_passes_bytes_on_when_a_planner_stored_other_bytes(
    checkpoint_dir: Path, payload: bytes
) -> None:
    shard = OurShard(checkpoint_dir)
    shard.add("raw", "to be replaced")
    place = shard.metadata.storage_data[MetadataIndex("raw")]
    shard.content[:] = payload
    place.length = len(payload)
    shard.write()
    received: list[bytes] = []

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            received.append(value.read())

    load({"raw": None}, FsspecReader(checkpoint_dir), Planner())
    assert received == [payload]


def write_raw(directory: Path, length: int | None = None) -> dict[str, torch.Tensor]:
    """A safetensors file: payloads as they are, what they are in the metadata only."""
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.empty(0, 4), "c": torch.tensor(7)}
    shard = OurShard(directory, "__0_0.abcdefgh.safetensors")
    content = bytearray(b"header")
    for key, value in state.items():
        shard.add(key, value)
        place = shard.metadata.storage_data[MetadataIndex(key, [0] * value.dim())]
        payload = raw(value)
        place.offset, place.length = len(content), length if length is not None else len(payload)
        content += payload
    shard.content = content
    shard.write()
    return state


def test_load_reads_safetensors_payloads(
    checkpoint_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = write_raw(checkpoint_dir)
    with caplog.at_level(logging.INFO, "mpwriter"):
        assert_equal(load(blank(state), FsspecReader(checkpoint_dir)), state)
    assert "2 of these items are unverified" in caplog.text  # nothing is read of "b"


def test_load_raises_when_a_safetensors_payload_has_another_length(checkpoint_dir: Path) -> None:
    state = write_raw(checkpoint_dir, length=20)
    error = load_error(blank(state), FsspecReader(checkpoint_dir))
    assert type(error) is CorruptCheckpointError
    assert "expected" in str(error)


class Deflate(StreamTransformExtension):
    @staticmethod
    def registry_name() -> str:
        return "test.deflate"

    @staticmethod
    def from_descriptor(version: str) -> Deflate:
        return Deflate()

    def get_descriptor(self) -> str:
        return "test.deflate/1"

    def transform_to(self, output: Any) -> Any:
        class Sink(io.RawIOBase):
            def __init__(self) -> None:
                self.kept = bytearray()

            def write(self, part: Any) -> int:
                self.kept += part
                return len(part)

            def close(self) -> None:
                if not self.closed:
                    output.write(zlib.compress(self.kept))
                super().close()

        return Sink()

    def transform_from(self, input: Any) -> Any:
        return io.BytesIO(zlib.decompress(input.read()))


@pytest.fixture
def registry() -> ExtensionRegistry:
    registry = ExtensionRegistry()
    registry.register(Deflate)
    return registry


def test_load_undoes_stream_transforms(checkpoint_dir: Path, registry: ExtensionRegistry) -> None:
    """G13"""
    save_stock(FLAT, checkpoint_dir, _extensions=[Deflate()])
    assert_equal(load(blank(FLAT), FsspecReader(checkpoint_dir, registry)), FLAT)


def test_load_names_the_transform_when_its_stream_is_damaged(
    checkpoint_dir: Path, registry: ExtensionRegistry
) -> None:
    save_stock(FLAT, checkpoint_dir, _extensions=[Deflate()])
    shard = shard_of(checkpoint_dir)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0x10
    shard.write_bytes(content)
    error = load_error(blank(FLAT), FsspecReader(checkpoint_dir, registry))
    assert type(error) is CorruptCheckpointError
    assert "test.deflate" in str(error)


def test_load_raises_when_the_transform_is_not_registered(checkpoint_dir: Path) -> None:
    save_stock(FLAT, checkpoint_dir, _extensions=[Deflate()])
    error = load_error(blank(FLAT), FsspecReader(checkpoint_dir))
    assert not isinstance(error, MPWriterError)
    assert "test.deflate" in str(error)


# ---- what is asked of the storage ----


def many_shards(directory: Path, num_shards: int, num_tensors: int) -> dict[str, torch.Tensor]:
    directory.mkdir()
    state: dict[str, torch.Tensor] = {}
    merged = empty_metadata(StorageMeta())
    for number in range(num_shards):
        shard = OurShard(directory, f"__0_{number}.abcdefgh.distcp")
        for i in range(num_tensors):
            key = f"layer.{number}.{i}"
            state[key] = torch.full((32,), float(number * num_tensors + i))
            shard.add(key, state[key])
        shard.write()
        merged.state_dict_metadata.update(shard.metadata.state_dict_metadata)
        merged.storage_data.update(shard.metadata.storage_data)
    (directory / ".metadata").write_bytes(_metadata.dumps(merged))
    return state


def test_load_opens_each_shard_once_and_reads_neighbours_together(
    plan: FaultPlan, checkpoint_dir: Path
) -> None:
    """F15"""
    state = many_shards(checkpoint_dir, 4, 125)
    target = blank(dict(reversed(state.items())))
    load(target, FsspecReader(f"fault://{checkpoint_dir}", **plan.options))
    assert_equal(target, dict(reversed(state.items())))
    assert len(plan.calls("open_read", "*.distcp")) == 4
    assert len(plan.calls("read", "*.distcp")) == 4
    assert len(plan.calls("close", "*.distcp")) == 4


def test_load_opens_only_the_shards_that_hold_what_is_wanted(
    plan: FaultPlan, checkpoint_dir: Path
) -> None:
    """F16"""
    state = many_shards(checkpoint_dir, 4, 10)
    key = "layer.2.5"
    load({key: torch.zeros(32)}, FsspecReader(f"fault://{checkpoint_dir}", **plan.options))
    (opened,) = plan.calls("open_read", "*.distcp")
    assert opened.name == "__0_2.abcdefgh.distcp"
    (read,) = plan.calls("read", "*.distcp")
    assert read.nbytes < os.path.getsize(checkpoint_dir / opened.name) / 5
    assert state.keys() >= {key}


def test_load_opens_nothing_when_nothing_is_wanted(plan: FaultPlan, flat_dir: Path) -> None:
    load({}, FsspecReader(f"fault://{flat_dir}", **plan.options))
    assert plan.calls("open_read", "*.distcp") == []


def test_load_reads_again_when_an_error_may_pass(plan: FaultPlan, flat_dir: Path) -> None:
    plan.add("open_read", ".metadata", times=1, errno=errno.ETIMEDOUT)
    plan.add("open_read", "*.distcp", times=1, errno=errno.ECONNRESET)
    plan.add("read", "*.distcp", times=1, raises="TimeoutError")
    reader = FsspecReader(f"fault://{flat_dir}", **plan.options)
    assert_equal(load(blank(FLAT), reader), FLAT)
    assert len(plan.calls("open_read", "*.distcp")) == 3


def test_load_gives_up_when_an_error_does_not_pass(plan: FaultPlan, flat_dir: Path) -> None:
    plan.add("read", "*.distcp", errno=errno.ETIMEDOUT)
    error = load_error(blank(FLAT), FsspecReader(f"fault://{flat_dir}", retries=1, **plan.options))
    assert type(error) is StorageError
    assert error.errno == errno.ETIMEDOUT
    assert len(plan.calls("read", "*.distcp")) == 2


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_load_fails_at_once_when_an_error_is_permanent(
    plan: FaultPlan, flat_dir: Path, number: int
) -> None:
    plan.add("open_read", "*.distcp", errno=number)
    error = load_error(blank(FLAT), FsspecReader(f"fault://{flat_dir}", **plan.options))
    assert type(error) is StorageError
    assert (error.errno, error.original_type) == (number, type(OSError(number, "")).__name__)
    assert shard_of(flat_dir).name in str(error)
    assert len(plan.calls("open_read", "*.distcp")) == 1


def test_load_reads_all_when_the_file_gives_a_few_bytes_at_a_time(
    flat_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dribble(io.RawIOBase):
        def __init__(self, content: bytes) -> None:
            self._content = io.BytesIO(content)

        def readinto(self, buffer: Any) -> int:
            return self._content.readinto(memoryview(buffer)[:7])

        def seek(self, *args: int) -> int:
            return self._content.seek(*args)

    class WithoutReadinto:
        def __init__(self, content: bytes) -> None:
            self._content = io.BytesIO(content)
            self.seek, self.close = self._content.seek, self._content.close

        def read(self, nbytes: int) -> bytes:
            return self._content.read(min(nbytes, 7))

    for kind in (Dribble, WithoutReadinto):
        opened = lambda fs, path, kind=kind: kind(Path(path).read_bytes())  # noqa: E731
        monkeypatch.setattr("mpwriter._fetch_file._open", opened)
        assert_equal(load(blank(FLAT), FsspecReader(flat_dir)), FLAT)


def test_load_asks_a_network_filesystem_for_exact_ranges(
    flat_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

    from mpwriter._fetch_file import _open

    asked: list[dict[str, Any]] = []
    wrapped = AsyncFileSystemWrapper(fsspec.filesystem("file"))
    monkeypatch.setattr(
        type(wrapped), "open", lambda self, path, mode, **options: asked.append(options)
    )
    _open(wrapped, "x")
    assert asked == [{"cache_type": "none"}]


def test_load_holds_files_open_no_longer_than_needed(flat_dir: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    reader = FsspecReader(flat_dir)
    for _ in range(3):
        load(blank(FLAT), reader)
    shard_of(flat_dir).write_bytes(b"")
    for _ in range(3):
        load_error(blank(FLAT), reader)
    assert len(os.listdir("/proc/self/fd")) == before


def test_load_draws_progress_when_asked(flat_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(blank(FLAT), FsspecReader(flat_dir, progress=True))
    assert "loading" in capsys.readouterr().err
    load(blank(FLAT), FsspecReader(flat_dir))
    assert capsys.readouterr().err == ""


# ---- planning of reads ----


def byte_reads(*places: tuple[int, int]) -> tuple[list[ReadItem], dict[MetadataIndex, Any]]:
    indices = [MetadataIndex(f"k{i}") for i in range(len(places))]
    size = torch.Size([0])
    reads = [ReadItem(LoadItemType.BYTE_IO, i, size, i, size, size) for i in indices]
    infos = {
        index: storage_info("f", offset, length)
        for index, (offset, length) in zip(indices, places, strict=True)
    }
    return reads, infos


def spans(*places: tuple[int, int]) -> list[tuple[int, int, int]]:
    planned = _fetch_plan.plan_reads(*byte_reads(*places))
    return [(span.start, span.stop, len(span.items)) for span in planned.get("f", [])]


GAP, LIMIT = _fetch_plan.MAX_GAP_BYTES, _fetch_plan.MAX_RANGE_BYTES


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], []),
        ([(10, 5)], [(10, 15, 1)]),
        ([(20, 5), (0, 10), (10, 10)], [(0, 25, 3)]),
        ([(0, 10), (10 + GAP, 5)], [(0, 15 + GAP, 2)]),
        ([(0, 10), (11 + GAP, 5)], [(0, 10, 1), (11 + GAP, 16 + GAP, 1)]),
        ([(0, LIMIT), (LIMIT, 5)], [(0, LIMIT, 1), (LIMIT, LIMIT + 5, 1)]),
        ([(0, LIMIT - 5), (LIMIT - 5, 5)], [(0, LIMIT, 2)]),
        ([(0, 5 * LIMIT)], [(0, 5 * LIMIT, 1)]),
        ([(0, 100), (0, 100), (10, 20), (50, 80)], [(0, 130, 3)]),
        ([(5, 0), (5, 0), (9, 0)], [(5, 9, 2)]),
    ],
)
def test_plan_reads_joins_what_lies_close_together(
    places: list[tuple[int, int]], expected: list[tuple[int, int, int]]
) -> None:
    assert spans(*places) == expected


@pytest.mark.parametrize("place", [(-1, 5), (0, -5), ("0", 5), (0, None), (True, 5)])
def test_plan_reads_raises_when_a_place_is_no_range(place: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match="k0"):
        spans(place)


def test_plan_reads_takes_the_records_of_older_torch() -> None:
    reads, places = byte_reads((0, 5))
    del next(iter(places.values())).transform_descriptors
    assert _fetch_plan.plan_reads(reads, places)["f"][0].items[0].descriptors == ()


# ---- ranks ----


def plans_of(*views: RankView | None) -> list[LoadPlan]:
    return [LoadPlan([]) if view is None else with_view(LoadPlan([]), view) for view in views]


def test_check_agreement_passes_when_all_ranks_see_the_same() -> None:
    same = RankView("/x", "save", True)
    check_agreement(plans_of(same, same, None))
    check_agreement(plans_of(same, RankView("/y", "other", True)))  # copies on each node
    check_agreement(plans_of(RankView("/x", "a", False), RankView("/x", "b", False)))
    check_agreement([])


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (RankView("/x", "save", False), r"ranks \[1\] see no .metadata"),
        (RankView("/x", "later save", True), "rank 1 sees another save"),
    ],
)
def test_check_agreement_raises_when_ranks_see_different_things(other: RankView, text: str) -> None:
    """B14"""
    plans = plans_of(RankView("/x", "save", True), other)
    with pytest.raises(IncompleteCheckpointError, match=text):
        check_agreement(plans)
    with pytest.raises(IncompleteCheckpointError, match=text):
        FsspecReader("/x").prepare_global_plan(plans)


def test_prepare_global_plan_leaves_plans_as_their_planner_made_them() -> None:
    mine = LoadPlan([], storage_data="the planner's own", planner_data=3)
    assert with_view(mine, RankView("/x", None, True)) is mine
    given = [mine, *plans_of(RankView("/x", None, True))]
    assert without_views(given) == [mine, LoadPlan([])]


RANK_PROGRAM = """
    import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from mpwriter._reader import FsspecReader
    from torch.distributed.checkpoint.api import CheckpointException

    rank, store, directory, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    reader = FsspecReader(directory)
    if rank == 1 and mode in ("blind", "own"):
        # An attribute cache that does not show the file yet; in "own" an old file of this rank.
        from mpwriter import _reader
        real = _reader.read_file
        def read_file(fs, path):
            if path.endswith("/.metadata"):
                raise FileNotFoundError(path)
            return real(fs, path)
        _reader.read_file = read_file
    state = {"weight": torch.zeros(3, 4)}
    try:
        dcp.load(state, storage_reader=reader)
        print("loaded", state["weight"].sum().item(), flush=True)
    except CheckpointException as error:
        names = {type(e).__name__ for e, _ in error.failures.values()}
        print("failed", *sorted(names), flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("plain", "loaded 66.0"),
        ("blind", "failed IncompleteCheckpointError"),
        ("own", "failed IncompleteCheckpointError"),
        ("ranks", "loaded 66.0" if HAS_RANK_METADATA else "failed IncompleteCheckpointError"),
    ],
)
def test_load_does_not_hang_when_ranks_disagree(
    checkpoint_dir: Path, tmp_path: Path, mode: str, expected: str
) -> None:
    """B14; "ranks": both load the metadata of their own, as use_collectives=False saves it."""
    save_ours(FLAT, checkpoint_dir)
    if mode in ("own", "ranks"):
        shutil.copy(checkpoint_dir / ".metadata", checkpoint_dir / "__1.metadata")
    if mode == "ranks":
        (checkpoint_dir / ".metadata").rename(checkpoint_dir / "__0.metadata")
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(RANK_PROGRAM))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ranks = [
        subprocess.Popen(
            [sys.executable, program, str(rank), tmp_path / "store", checkpoint_dir, mode],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [out.strip() for out, _ in outputs] == [expected] * 2, outputs


# ---- the reader object ----


def test_reset_moves_on_and_keeps_storage_options(
    plan: FaultPlan, checkpoint_dir: Path, tmp_path: Path
) -> None:
    first = save_ours({"a": torch.ones(2)}, checkpoint_dir)
    second = save_ours({"a": torch.full((2,), 5.0)}, tmp_path / "second")
    reader = FsspecReader(f"fault://{first}", **plan.options)
    load_id = reader.load_id
    target = {"a": torch.zeros(2)}
    dcp.load(target, checkpoint_id=f"fault://{second}", storage_reader=reader, no_dist=True)
    assert target["a"].tolist() == [5, 5]
    assert reader.checkpoint_id == f"fault://{second}"
    assert reader.load_id != load_id
    assert {call.path for call in plan.calls("open_read", "*.distcp")} == {str(shard_of(second))}
    reader.reset()
    assert reader.checkpoint_id == f"fault://{second}"
    assert reader.storage_data == {}
    load(target, reader)


@pytest.mark.parametrize(
    ("checkpoint_id", "expected"),
    [("/a/b", True), ("memory://x", True), (Path("/a/b"), False), ("no-such-protocol://x", False)],
)
def test_validate_checkpoint_id_answers_as_stock(checkpoint_id: Any, expected: bool) -> None:
    stock = dcp._fsspec_filesystem.FsspecReader.validate_checkpoint_id(checkpoint_id)
    assert FsspecReader.validate_checkpoint_id(checkpoint_id) is expected is stock


def test_reader_is_found_by_its_public_name() -> None:
    import mpwriter

    assert mpwriter.FsspecReader is FsspecReader


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_workers": 0}, ValueError),
        ({"timeout_s": 0}, ValueError),
        ({"retries": -1}, ValueError),
        ({"retires": 3}, TypeError),
        ({"verfy": False}, TypeError),
    ],
)
def test_reader_refuses_options_that_make_no_sense(
    options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=next(iter(options))):
        FsspecReader("/x", **options)


def test_reader_takes_all_its_options() -> None:
    FsspecReader(
        "/x", None, num_workers=2, verify=False, timeout_s=5.0, retries=0, progress=False,
        event_handler=None, auto_mkdir=True,
    )  # fmt: skip


def test_reader_refuses_a_url_that_pathlib_has_folded() -> None:
    """F01"""
    with pytest.raises(ValueError, match="s3"):
        FsspecReader(Path("s3://bucket/x"))


def test_reader_shows_no_credentials_in_errors() -> None:
    reader = FsspecReader("memory://user:secret@host/nowhere")
    with pytest.raises(IncompleteCheckpointError) as caught:
        reader.read_metadata()
    assert "secret" not in str(caught.value)


def test_load_works_from_several_readers_at_the_same_time(flat_dir: Path) -> None:
    targets = [blank(FLAT) for _ in range(4)]
    threads = [
        threading.Thread(target=load, args=(target, FsspecReader(flat_dir))) for target in targets
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for target in targets:
        assert_equal(target, copy.deepcopy(FLAT))


@pytest.fixture(autouse=True)
def _quiet_loader() -> Iterator[None]:
    """DCP logs a traceback for every metadata file that is not there."""
    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
