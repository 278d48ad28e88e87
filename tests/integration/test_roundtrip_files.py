"""Which files a save makes, and how many bytes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.storage import StorageWriter

from mpwriter import FsspecReader, MPFsspecWriter
from mpwriter._compat import StockFsspecWriter
from tests.states import (
    READERS,
    Tied,
    assert_loads_everywhere,
    assert_same,
    blank,
    load_into,
    mixed_items,
    save_with,
    shard_bytes,
    shard_names,
)

State = dict[str, Any]

# -- how many files ------------------------------------------------------------------------


@pytest.mark.parametrize("single_file", [True, False])
@pytest.mark.parametrize("num_items", [0, 1, 3, 100])
@pytest.mark.parametrize("num_workers", [1, 2, 8])
def test_save_makes_one_file_per_worker_or_per_item(
    num_workers: int, num_items: int, single_file: bool, checkpoint_dir: Path
) -> None:
    """G04: none of them empty, also where there are fewer items than workers."""
    state = mixed_items(num_items)
    writer = MPFsspecWriter(checkpoint_dir, single_file, num_workers=num_workers)
    save_with(writer, state)
    names = shard_names(checkpoint_dir)
    assert len(names) == (min(num_workers, num_items) if single_file else num_items)
    save8 = re.escape(str(FsspecReader(checkpoint_dir).read_metadata().storage_meta.save_id)[:8])
    assert all(re.fullmatch(rf"__0_\d+\.{save8}\.distcp", name) for name in names)
    assert all((checkpoint_dir / name).stat().st_size for name in names)
    assert_loads_everywhere(checkpoint_dir, state)


def test_save_balances_the_files_by_bytes(checkpoint_dir: Path) -> None:
    """G04: not by the number of items."""
    sizes = {"a": 16_000, "b": 64_000, "c": 16_000, "d": 32_000}
    state = {key: torch.randn(numel) for key, numel in sizes.items()}
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=2), state)
    one, other = ((checkpoint_dir / name).stat().st_size for name in shard_names(checkpoint_dir))
    assert abs(one - other) < 0.02 * one


def _save_as_ranks(
    path: Path, make_writer: Callable[[Path], StorageWriter], states: list[State]
) -> None:
    """What dcp.save does on several ranks, one after the other in this process."""
    planners = [DefaultSavePlanner() for _ in states]
    writers = [make_writer(path) for _ in states]
    plans = []
    for rank, (state, planner, writer) in enumerate(zip(states, planners, writers)):
        storage_meta = writer.storage_meta()
        planner.set_up_planner(state, storage_meta, rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for plan, planner, writer in zip(plans, planners, writers)
    ]
    writers[0].finish(metadata, results)


def test_save_keeps_one_rank_when_all_have_the_key(tmp_path: Path) -> None:
    """A15: the same rank's value as stock, and one copy of it."""
    states: list[State] = [
        {"weight": torch.full((4000,), 10.0 + rank), f"own{rank}": torch.full((3,), float(rank))}
        for rank in range(3)
    ]
    states[2]["rank"] = 2
    target = {
        "weight": torch.zeros(4000),
        **{f"own{rank}": torch.zeros(3) for rank in range(3)},
        "rank": None,
    }
    loaded = {}
    for name, writer in (("stock", StockFsspecWriter), ("ours", _with_two_workers)):
        _save_as_ranks(tmp_path / name, writer, states)
        for reader in READERS.values():
            found = load_into(blank(target), reader(tmp_path / name))
            assert_same(found, loaded.setdefault("first", found), name)
    assert loaded["first"]["weight"][0] in (10.0, 11.0, 12.0)
    assert loaded["first"]["rank"] == 2
    assert shard_bytes(tmp_path / "ours") < 1.5 * 16_000
    ranks = {name.split("_")[2] for name in shard_names(tmp_path / "ours")}
    assert ranks == {"0", "1", "2"}


def _with_two_workers(path: Path) -> StorageWriter:
    return MPFsspecWriter(path, num_workers=2)


# -- tied tensors --------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 2, 4])
@pytest.mark.parametrize("single_file", [True, False])
def test_save_writes_tied_weights_once(
    single_file: bool, num_workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """E09: also where the two would be in files of their own; both keys load."""
    state = Tied().state_dict()
    assert state["embedding.weight"] is not state["head.weight"]
    tied_bytes = state["head.weight"].nbytes
    once_bytes = sum(tensor.nbytes for tensor in state.values()) - tied_bytes
    writer = MPFsspecWriter(tmp_path / "ours", single_file, num_workers=num_workers)
    save_with(writer, state)
    written = shard_bytes(tmp_path / "ours")
    assert once_bytes < written < once_bytes + 0.02 * tied_bytes
    assert writer.last_report is not None and writer.last_report.nbytes == written
    assert all((tmp_path / "ours" / name).stat().st_size for name in shard_names(tmp_path / "ours"))
    assert_loads_everywhere(tmp_path / "ours", dict(state))
    save_with(StockFsspecWriter(tmp_path / "stock", single_file), state)
    stock = shard_bytes(tmp_path / "stock")
    assert stock > 1.9 * once_bytes, "stock has learned it: say so in the README"
    if single_file and num_workers == 2:
        with capsys.disabled():
            print(
                f"\ntied: {written / once_bytes:.2f} of the bytes, stock {stock / once_bytes:.2f}"
            )


def test_save_writes_each_view_when_views_differ(checkpoint_dir: Path) -> None:
    """E09: sharing memory is not enough."""
    base = torch.randn(60, 60)
    state = {
        "base": base,
        "again": base[:],
        "rows": base[:30],
        "transposed": base.t(),
        "flat": base.view(-1),
        "integers": base.view(torch.int32),
        "complex": torch.view_as_complex(base.view(60, 30, 2)),
        "conjugated": torch.view_as_complex(base.view(60, 30, 2)).conj(),
        "clone": base.clone(),
    }
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=2), state)
    assert shard_bytes(checkpoint_dir) > 7.5 * base.nbytes
    assert_loads_everywhere(checkpoint_dir, state)


# -- many ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_save_takes_twenty_thousand_tensors(
    checkpoint_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """E14: it works; what it costs is the benchmark's to judge, here it is printed."""
    state = {f"layer{n}.weight": torch.full((4,), float(n)) for n in range(20_000)}
    begin_s = time.perf_counter()
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=1), state)
    saved_s = time.perf_counter()
    loaded = load_into({key: torch.zeros(4) for key in state}, FsspecReader(checkpoint_dir))
    loaded_s = time.perf_counter()
    assert torch.equal(torch.stack(list(loaded.values())), torch.stack(list(state.values())))
    part = {key: state[key] for key in list(state)[::997]}
    assert_loads_everywhere(checkpoint_dir, part)
    with capsys.disabled():
        print(
            f"\n20,000 tensors: saved in {saved_s - begin_s:.1f} s, "
            f"loaded in {loaded_s - saved_s:.1f} s"
        )
