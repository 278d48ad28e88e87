#!/usr/bin/env python
"""What a save of a large job costs its coordinator, without the job.

    python scripts/simulate.py --ranks 8 64 256 1024 --tensors 100 1000

Every tensor is sharded by rows over all ranks, as FSDP does. The plans and write results that the
ranks would send are made up; planning, the writer's global step and its `finish` are the real ones,
each in a process of its own, once for MPFsspecWriter and once for torch's FsspecWriter. No tensor
has memory, no shard is written.

    gathered   bytes of all plans and results, as pickled for the collectives, and the seconds to
               unpickle them: DCP's, the same for every writer
    planner    DCP's global plan, the same for every writer
    global     the writer's prepare_global_plan
    finish     the writer's finish, with the file synced
    metadata   bytes of `.metadata`
    peak       growth of the process's peak memory over all of it
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (  # noqa: E402
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult  # noqa: E402

import mpwriter  # noqa: E402
from mpwriter import MPFsspecWriter  # noqa: E402
from mpwriter._compat import StockFsspecWriter, storage_info  # noqa: E402
from mpwriter.bench.table import format_bytes, render_table  # noqa: E402

_COLUMNS = 1024
_ROWS_PER_RANK = 16
_BYTES_PER_SHARD = 4 * _COLUMNS * _ROWS_PER_RANK


@dataclass(frozen=True)
class Cost:
    """One job's save, as far as its coordinator is concerned; seconds and bytes.

    See the columns of the module's docstring.
    """

    writer: str
    num_ranks: int
    num_tensors: int
    gathered_bytes: int
    unpickle_s: float
    planner_s: float
    global_s: float
    finish_s: float
    metadata_bytes: int
    peak_bytes: int


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--tensors", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--json", metavar="FILE", help="write every figure to FILE")
    parser.add_argument("--one", nargs=3, metavar=("WRITER", "RANKS", "TENSORS"), help="itself")
    given = parser.parse_args(argv)
    if given.one:
        writer, num_ranks, num_tensors = given.one
        print(json.dumps(asdict(simulate(writer, int(num_ranks), int(num_tensors)))))
        return 0
    costs = [
        _in_fresh_process(writer, num_ranks, num_tensors)
        for num_tensors in given.tensors
        for num_ranks in given.ranks
        for writer in ("stock", "ours")
    ]
    print(table(costs))
    if given.json:
        Path(given.json).write_text(json.dumps([asdict(cost) for cost in costs], indent=1))
    return 0


def table(costs: Sequence[Cost]) -> str:
    """A line for each job and writer."""
    headers = [
        *("ranks x tensors", "writer", "gathered", "unpickle s", "planner s"),
        *("global s", "finish s", "metadata", "peak"),
    ]
    cells = [
        [
            f"{cost.num_ranks} x {cost.num_tensors}",
            cost.writer,
            format_bytes(cost.gathered_bytes),
            f"{cost.unpickle_s:.2f}",
            f"{cost.planner_s:.2f}",
            f"{cost.global_s:.3f}",
            f"{cost.finish_s:.2f}",
            format_bytes(cost.metadata_bytes),
            format_bytes(cost.peak_bytes),
        ]
        for cost in costs
    ]
    return render_table(headers, cells)


def _in_fresh_process(writer: str, num_ranks: int, num_tensors: int) -> Cost:
    """Of its own, so that one's memory is not the other's."""
    job = [writer, str(num_ranks), str(num_tensors)]
    print(f"{writer}: {num_ranks} ranks, {num_tensors} tensors", file=sys.stderr, flush=True)
    ran = subprocess.run(
        [sys.executable, __file__, "--one", *job], stdout=subprocess.PIPE, check=True, text=True
    )
    return Cost(**json.loads(ran.stdout.splitlines()[-1]))


def simulate(writer_name: str, num_ranks: int, num_tensors: int) -> Cost:
    """Run the coordinator's part of one save.

    Args:
        writer_name: "ours" or "stock".
        num_ranks, num_tensors: of the job.
    """
    with tempfile.TemporaryDirectory() as folder:
        writer: Any = (
            MPFsspecWriter(folder, num_workers=1)
            if writer_name == "ours"
            else StockFsspecWriter(folder)
        )
        if writer_name == "ours":
            mpwriter.warm_up(1)  # a worker's start is no part of it
        # A commit looks whether the shards are there, as far as its rank can see them.
        for rank in range(num_ranks):
            Path(folder, _shard_name(rank, writer_name)).touch()
        before_bytes = _peak_bytes()
        plans, plans_bytes, plans_s = _gathered(
            lambda rank: _plan(rank, num_ranks, num_tensors), num_ranks
        )
        storage_meta = writer.storage_meta()
        writer.set_up_storage_writer(True)
        planner = DefaultSavePlanner()
        planner.set_up_planner({}, storage_meta, True)
        (plans, metadata), planner_s = _timed(planner.create_global_plan, plans)
        plans, global_s = _timed(writer.prepare_global_plan, plans)
        # Nothing of its own to write, so that the simulated results are all that there is.
        writer.write_data(dataclasses.replace(plans[0], items=[]), planner)
        del plans
        results, results_bytes, results_s = _gathered(
            lambda rank: _results(rank, num_ranks, num_tensors, writer_name), num_ranks
        )
        _, finish_s = _timed(writer.finish, metadata, results)
        return Cost(
            writer_name,
            num_ranks,
            num_tensors,
            plans_bytes + results_bytes,
            plans_s + results_s,
            planner_s,
            global_s,
            finish_s,
            (Path(folder) / ".metadata").stat().st_size,
            _peak_bytes() - before_bytes,
        )


def _timed(call: Any, *args: Any) -> tuple[Any, float]:
    gc.collect()
    begin_s = time.perf_counter()
    found = call(*args)
    return found, time.perf_counter() - begin_s


def _gathered(make: Any, num_ranks: int) -> tuple[list[Any], int, float]:
    """What each rank sends, unpickled here one after the other: objects, bytes, seconds."""
    found, nbytes, seconds = [], 0, 0.0
    for rank in range(num_ranks):
        sent = pickle.dumps(make(rank))
        nbytes += len(sent)
        begin_s = time.perf_counter()
        found.append(pickle.loads(sent))
        seconds += time.perf_counter() - begin_s
    return found, nbytes, seconds


def _index(number: int, rank: int, *, index: int | None) -> MetadataIndex:
    return MetadataIndex(_key(number), torch.Size([rank * _ROWS_PER_RANK, 0]), index)


def _key(number: int) -> str:
    return f"model.layers.{number // 10}.attention.projection{number % 10}.weight"


def _plan(rank: int, num_ranks: int, num_tensors: int) -> SavePlan:
    """The local plan of one rank, with one shard of every tensor."""
    return SavePlan(
        [
            WriteItem(
                _index(number, rank, index=rank),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(
                        torch.Size([rank * _ROWS_PER_RANK, 0]),
                        torch.Size([_ROWS_PER_RANK, _COLUMNS]),
                    ),
                    TensorProperties(torch.float32),
                    torch.Size([num_ranks * _ROWS_PER_RANK, _COLUMNS]),
                ),
            )
            for number in range(num_tensors)
        ],
        planner_data={_key(number): (_key(number),) for number in range(num_tensors)},
    )


def _results(rank: int, num_ranks: int, num_tensors: int, writer_name: str) -> list[WriteResult]:
    """What one rank reports of its shards, in one file."""
    name = _shard_name(rank, writer_name)
    stride = _BYTES_PER_SHARD + 1024
    return [
        WriteResult(
            _index(number, rank, index=rank),
            _BYTES_PER_SHARD,
            storage_info(name, number * stride, stride),
        )
        for number in range(num_tensors)
    ]


def _shard_name(rank: int, writer_name: str) -> str:
    return f"__{rank}_0.0a1b2c3d.distcp" if writer_name == "ours" else f"__{rank}_0.distcp"


def _peak_bytes() -> int:
    """Of this process; VmHWM counts whole pages that were resident at once."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


if __name__ == "__main__":
    sys.exit(main())
