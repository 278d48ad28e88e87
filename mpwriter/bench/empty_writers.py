"""Storage writers that store nothing: what DCP costs without any writer.

Runs in: trainer. One writer serves one save at a time.
"""

from __future__ import annotations

import io
import os
import pickle
import time
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from mpwriter._compat import storage_info

__all__ = ["MetadataOnlyWriter", "PlanningOnlyWriter"]


class PlanningOnlyWriter(StorageWriter):
    """Writes nothing and reports nothing: what remains is DCP's own planning."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        return _done([])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class MetadataOnlyWriter(PlanningOnlyWriter):
    """Reports every item as written and pickles the metadata as a stock writer does, to nowhere.

    Attributes:
        pickle_s: seconds that the pickling took; it is the same work for every writer.
    """

    pickle_s = 0.0

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        return _done(
            [
                WriteResult(item.index, 4096, storage_info("__0_0.distcp", 4096 * number, 4096))
                for number, item in enumerate(plan.items)
            ]
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {
            written.index: written.storage_data for of_rank in results for written in of_rank
        }
        began = time.perf_counter()
        pickle.dump(metadata, io.BytesIO())
        self.pickle_s = time.perf_counter() - began


def _done(results: list[WriteResult]) -> Future[list[WriteResult]]:
    future: Future[list[WriteResult]] = Future()
    future.set_result(results)
    return future
