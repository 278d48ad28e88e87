"""plannedranges://, local files behind fsspec's event loop whose ranges go through a FaultPlan.

The operation of its rules is `cat`. Importable in a worker.
"""

from __future__ import annotations

from typing import Any

import fsspec

from tests.fakes.asynclike import AsyncLikeFileSystem
from tests.fakes.filesystems import Planned

__all__ = ["PlannedRanges"]


class PlannedRanges(Planned, AsyncLikeFileSystem):
    """See above."""

    protocol = "plannedranges"

    def __init__(self, *args: Any, plan: str | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.read_plan(plan)

    async def _cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        with self.step("cat", path, nbytes=(end or 0) - (start or 0)):
            return await super()._cat_file(path, start, end, **kwargs)


fsspec.register_implementation(PlannedRanges.protocol, PlannedRanges, clobber=True)
