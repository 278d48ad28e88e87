"""Reading side by side: threads, parts, places, pieces of items."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mpwriter import FsspecReader, MPFsspecWriter, _fetch_plan, _fetch_source
from mpwriter._compat import SerializationFormat, StockFsspecWriter
from mpwriter._fetch_place import MIN_PLACE_BYTES, Place
from mpwriter._fetch_plan import _piece
from mpwriter._fetch_source import lane_for
from mpwriter.errors import CorruptCheckpointError, StorageError
from tests.fakes.asynclike import AsyncLikeFileSystem
from tests.fakes.owned import OwnedFileSystem
from tests.saves import failure_of
from tests.states import assert_same, bits, blank, load_into, save_with, shard_names

LARGE = MIN_PLACE_BYTES // 4  # elements of a float32 tensor that is read in place


@pytest.fixture
def state() -> dict[str, Any]:
    return {
        "large": torch.randn(LARGE + 3),
        "huge": torch.randn(5, LARGE),
        "half": torch.randn(2 * LARGE + 7).to(torch.bfloat16),
        **{f"small{n}": torch.randn(n + 1, 7) for n in range(50)},
        "note": {"step": 3},
    }


@pytest.fixture
def saved(checkpoint_dir: Path, state: dict[str, Any]) -> Path:
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=2, sync_files=False), state)
    return checkpoint_dir


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What came of every payload that was read in place."""
    found: list[bool] = []
    real = Place.fill

    def fill(place: Place, *args: Any) -> bool:
        found.append(real(place, *args))
        return found[-1]

    monkeypatch.setattr(Place, "fill", fill)
    return found


# -- in place -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [None, 1, 5])
@pytest.mark.parametrize("verify", [True, False])
def test_load_reads_large_payloads_in_place(
    num_workers: int | None, verify: bool, saved: Path, state: dict[str, Any], places: list[bool]
) -> None:
    reader = FsspecReader(saved, num_workers=num_workers, verify=verify)
    assert_same(load_into(blank(state), reader), state)
    assert places == [True, True, True]


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(LARGE + 3, dtype=torch.float64),
        torch.zeros(2 * (LARGE + 3))[::2],
        torch.zeros(LARGE + 3, requires_grad=True),
        torch.nn.Parameter(torch.zeros(LARGE + 3)),
        torch.zeros(LARGE + 4)[1:],
    ],
    ids=["dtype", "stride", "requires_grad", "Parameter", "offset"],
)
def test_load_gives_the_same_values_whatever_the_target(
    target: torch.Tensor, saved: Path, state: dict[str, Any]
) -> None:
    """E15: in place where that is possible, else by a copy."""
    load_into({"large": target}, FsspecReader(saved))
    assert torch.equal(target.detach().to(torch.float32), state["large"])


def test_load_counts_as_a_change_for_autograd_when_it_reads_in_place(saved: Path) -> None:
    target = torch.zeros(LARGE + 3)
    version = target._version
    load_into({"large": target}, FsspecReader(saved))
    assert target._version > version


@pytest.mark.parametrize("where", ["prefix", "first", "middle", "last", "suffix"])
def test_load_raises_when_a_payload_read_in_place_is_damaged(
    where: str, saved: Path, state: dict[str, Any], places: list[bool]
) -> None:
    """A08: by name and key, whatever bit it is."""
    metadata = FsspecReader(saved).read_metadata()
    (info,) = [i for index, i in metadata.storage_data.items() if index.fqn == "huge"]
    span = _fetch_plan.StoredItem(info.offset, info.length, (), [])
    entry = metadata.state_dict_metadata["huge"]
    payload = _fetch_plan.payload_of(info.relative_path, span, entry, entry.chunks[0])
    assert payload is not None
    begin, nbytes = payload
    at = {
        "prefix": info.offset + 40,
        "first": begin,
        "middle": begin + nbytes // 2,
        "last": begin + nbytes - 1,
        "suffix": begin + nbytes + 5,
    }[where]
    flip(saved / info.relative_path, at)
    with pytest.raises(CheckpointException) as caught:
        load_into({"huge": torch.zeros_like(state["huge"])}, FsspecReader(saved))
    error = failure_of(caught.value)
    assert isinstance(error, CorruptCheckpointError)
    assert error.key == "huge" and info.relative_path in str(error)
    assert places == [False]


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def test_load_asks_the_planner_once_for_every_target(saved: Path, state: dict[str, Any]) -> None:
    """Also where the place turns out to be none."""

    class Planner(DefaultLoadPlanner):
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[str] = []
            self.committed: list[str] = []
            self.threads: set[int] = set()

        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            self.asked.append(read_item.dest_index.fqn)
            self.threads.add(threading.get_ident())
            return super().resolve_tensor(read_item)

        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            self.committed.append(read_item.dest_index.fqn)
            super().commit_tensor(read_item, tensor)

    planner = Planner()
    target = {**blank(state), "half": torch.zeros(2 * LARGE + 7)}
    load_into(target, FsspecReader(saved), planner)
    tensors = sorted(key for key, value in state.items() if isinstance(value, torch.Tensor))
    assert sorted(planner.asked) == sorted(planner.committed) == tensors
    assert planner.threads == {threading.get_ident()}


# -- rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "offsets", "lengths", "expected"),
    [
        ((10, 4), (2, 0), (3, 4), (8, 12)),
        ((10, 4), (2, 1), (1, 2), (9, 2)),
        ((10, 4), (2, 1), (2, 2), None),
        ((3, 10, 4), (1, 0, 0), (1, 10, 4), (40, 40)),
        ((3, 10, 4), (1, 2, 0), (1, 3, 4), (48, 12)),
        ((3, 10, 4), (0, 2, 0), (2, 3, 4), None),
        ((3, 1, 4), (1, 0, 0), (2, 1, 4), (4, 8)),
        ((8,), (3,), (2,), (3, 2)),
        ((), (), (), (0, 1)),
        ((4, 4), (0, 0), (0, 4), None),
        ((4, 4), (2, 0), (3, 4), None),
        ((4, 4), (0,), (4,), None),
    ],
)
def test_piece_is_where_the_elements_lie(
    sizes: Any, offsets: Any, lengths: Any, expected: tuple[int, int] | None
) -> None:
    assert _piece(sizes, offsets, lengths) == expected
    if expected is not None:
        numbers = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
        for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            numbers = numbers.narrow(dimension, offset, length)
        first, count = expected
        assert numbers.flatten().tolist() == list(range(first, first + count))


class Rows(DefaultLoadPlanner):
    """Loads one box of a tensor, as a rank of a resharded job does."""

    def __init__(self, target: torch.Tensor, offsets: tuple[int, ...]) -> None:
        super().__init__()
        self._target = target
        self._offsets = offsets

    def create_local_plan(self) -> LoadPlan:
        assert isinstance(self.metadata, Metadata)
        entry = self.metadata.state_dict_metadata["huge"]
        assert isinstance(entry, TensorStorageMetadata)
        box = ChunkStorageMetadata(torch.Size(self._offsets), self._target.size())
        return LoadPlan(create_read_items_for_chunk_list("huge", entry, [box]))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._target


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    real = os.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        counts.append(real(fd, buffers, offset))
        return counts[-1]

    monkeypatch.setattr(_fetch_source.os, "preadv", preadv)
    return counts


@pytest.mark.parametrize("kind", ["ours", "safetensors"])
@pytest.mark.parametrize(
    ("offsets", "shape"),
    [((1, 0), (2, LARGE)), ((4, 5), (1, 1000)), ((0, 0), (1, LARGE)), ((3, 7), (1, LARGE - 7))],
)
def test_load_reads_only_the_rows_that_it_needs(
    kind: str,
    offsets: tuple[int, int],
    shape: tuple[int, int],
    checkpoint_dir: Path,
    state: dict[str, Any],
    bytes_read: list[int],
) -> None:
    """E03."""
    options: dict[str, Any] = {}
    if kind == "safetensors":
        options["serialization_format"] = SerializationFormat.SAFETENSORS
    save_with(MPFsspecWriter(checkpoint_dir, sync_files=False, **options), state)
    target = torch.zeros(shape)
    load_into({}, FsspecReader(checkpoint_dir), Rows(target, offsets))
    (row, column), (rows, columns) = offsets, shape
    expected = state["huge"][row : row + rows, column : column + columns]
    assert bits(target) == bits(expected)
    assert sum(bytes_read) == target.nbytes


@pytest.mark.parametrize(
    ("offsets", "shape"), [((0, 3), (5, 100)), ((0, 0), (4, LARGE)), ((0, 0), (5, LARGE))]
)
def test_load_reads_all_when_the_rows_are_scattered_or_most_of_it(
    offsets: tuple[int, int], shape: tuple[int, int], saved: Path, state: dict[str, Any]
) -> None:
    """Then the CRC covers it."""
    target = torch.zeros(shape)
    load_into({}, FsspecReader(saved), Rows(target, offsets))
    (row, column), (rows, columns) = offsets, shape
    expected = state["huge"][row : row + rows, column : column + columns]
    assert bits(target) == bits(expected)
    (info,) = [
        info
        for index, info in FsspecReader(saved).read_metadata().storage_data.items()
        if index.fqn == "huge"
    ]
    flip(saved / info.relative_path, info.offset + info.length // 2)
    with pytest.raises(CheckpointException) as caught:
        load_into({}, FsspecReader(saved), Rows(target, offsets))
    assert isinstance(failure_of(caught.value), CorruptCheckpointError)


def test_load_reads_stock_checkpoints_as_a_whole_when_rows_are_asked_for(
    checkpoint_dir: Path, state: dict[str, Any]
) -> None:
    save_with(StockFsspecWriter(checkpoint_dir, sync_files=False), state)
    target = torch.zeros(2, LARGE)
    load_into({}, FsspecReader(checkpoint_dir), Rows(target, (1, 0)))
    assert bits(target) == bits(state["huge"][1:3])


# -- behind an event loop -----------------------------------------------------------------------


def test_load_asks_for_many_ranges_at_once_when_the_store_is_far(
    saved: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F15: parts of large items side by side, none of them more than once."""
    monkeypatch.setattr(_fetch_source, "PART_BYTES", 2**18)
    asked: list[tuple[str, int, int]] = []
    meeting = threading.Barrier(4, timeout=30)
    real = AsyncLikeFileSystem._cat_file

    async def cat_file(fs: Any, path: str, start: Any = None, end: Any = None, **kw: Any) -> bytes:
        if path.endswith(".distcp"):
            asked.append((path, start, end))
            if len(asked) <= 4:
                # The first four are under way together, or none of them is answered.
                await asyncio.to_thread(meeting.wait)
        return await real(fs, path, start, end, **kw)

    monkeypatch.setattr(AsyncLikeFileSystem, "_cat_file", cat_file)
    assert_same(load_into(blank(state), FsspecReader(f"asynclike://{saved}")), state)
    assert len(asked) == len(set(asked))
    total = sum((saved / name).stat().st_size for name in shard_names(saved))
    assert sum(end - start for _, start, end in asked) <= total
    assert max(end - start for _, start, end in asked) == 2**18


@pytest.mark.parametrize("kept", ["all but 1", "all but 1000", "half", "nothing"])
def test_load_raises_when_a_remote_file_is_cut_off(
    kept: str, saved: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A08: also where a store refuses ranges behind the end."""
    real = AsyncLikeFileSystem._cat_file

    async def cat_file(fs: Any, path: str, start: Any = None, end: Any = None, **kw: Any) -> bytes:
        if path.endswith(".distcp") and start >= os.path.getsize(fs._strip_protocol(path)):
            raise ValueError("the range is not satisfiable")
        return await real(fs, path, start, end, **kw)

    monkeypatch.setattr(AsyncLikeFileSystem, "_cat_file", cat_file)
    for name in shard_names(saved):
        size = (saved / name).stat().st_size
        left = {"all but 1": size - 1, "all but 1000": size - 1000, "half": size // 2, "nothing": 0}
        os.truncate(saved / name, left[kept])
    with pytest.raises(CheckpointException) as caught:
        load_into(blank(state), FsspecReader(f"asynclike://{saved}"))
    error = failure_of(caught.value)
    assert isinstance(error, CorruptCheckpointError)
    assert any(name in str(error) for name in shard_names(saved))


def test_load_takes_its_range_when_the_server_sends_all(
    saved: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain HTTP server may know no ranges."""
    real = AsyncLikeFileSystem._cat_file

    async def cat_file(fs: Any, path: str, start: Any = None, end: Any = None, **kw: Any) -> bytes:
        return await real(fs, path, **kw)

    monkeypatch.setattr(AsyncLikeFileSystem, "_cat_file", cat_file)
    assert_same(load_into(blank(state), FsspecReader(f"asynclike://{saved}")), state)


# -- threads ------------------------------------------------------------------------------------


def test_load_raises_when_a_read_does_not_end(
    saved: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 8: a dead network filesystem is told by `timeout_s`."""
    released = threading.Event()
    real = os.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        released.wait(30)
        return real(fd, buffers, offset)

    monkeypatch.setattr(_fetch_source.os, "preadv", preadv)
    try:
        with pytest.raises(CheckpointException) as caught:
            load_into(blank(state), FsspecReader(saved, timeout_s=0.2))
    finally:
        released.set()
    error = failure_of(caught.value)
    assert isinstance(error, StorageError) and "no answer for 0.2 s" in str(error)
    assert str(saved) in str(error)


def test_load_tries_again_when_an_error_may_pass(
    saved: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F12: each read by itself."""
    left = [errno.ESTALE, errno.EINTR]
    stale: set[int] = set()
    real = os.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        assert fd not in stale, "a stale handle stays stale: the file has to be opened again"
        if left:
            stale.add(fd)
            raise OSError(left.pop(), "for a while")
        return real(fd, buffers, offset)

    monkeypatch.setattr(_fetch_source.os, "preadv", preadv)
    assert_same(load_into(blank(state), FsspecReader(saved, num_workers=1)), state)
    assert not left


def test_lane_is_none_when_one_thread_has_to_read(tmp_path: Path) -> None:
    """F07: a filesystem that may not be shared, or that does more in `open` than a descriptor."""
    assert lane_for(fsspec.filesystem("memory"), 4) is None
    assert lane_for(OwnedFileSystem(log=str(tmp_path)), 4) is None
    local = lane_for(fsspec.filesystem("file"), 3)
    assert local is not None and local.num_threads == 3


def test_load_works_from_inference_mode(saved: Path, state: dict[str, Any]) -> None:
    with torch.inference_mode():
        target = {"large": torch.zeros(LARGE + 3)}
        load_into(target, FsspecReader(saved))
    assert torch.equal(target["large"], state["large"])


def test_loads_do_not_mix_when_two_run_at_once(saved: Path, state: dict[str, Any]) -> None:
    results: list[dict[str, Any]] = []

    def run() -> None:
        results.append(load_into(blank(state), FsspecReader(saved)))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    for result in results:
        assert_same(result, state)
