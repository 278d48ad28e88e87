"""planneds3://, a real s3fs whose every request goes through a FaultPlan.

The operations of its rules are the methods of S3 (`upload_part`, `head_object`); `nth` is the
number of a part, or of a range in the order of the requests. Importable in a worker.
"""

from __future__ import annotations

import itertools
from typing import Any

import fsspec
import s3fs
from fsspec.asyn import sync_wrapper

from tests.fakes.filesystems import Planned

__all__ = ["PlannedS3", "planned"]


class PlannedS3(Planned, s3fs.S3FileSystem):  # type: ignore[misc]
    """See above."""

    protocol = ("planneds3",)

    def __init__(self, *args: Any, plan: str | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.read_plan(plan)
        self._numbers = itertools.count(1)

    async def _call_s3(self, method: str, *args: Any, **options: Any) -> Any:
        place = options.get("Key") or options.get("Prefix") or ""
        details = {
            "nth": options.get("PartNumber") or next(self._numbers),
            "nbytes": len(options.get("Body") or b""),
        }
        with self.step(method, f"{options.get('Bucket')}/{place}", **details):
            return await super()._call_s3(method, *args, **options)

    call_s3 = sync_wrapper(_call_s3)


fsspec.register_implementation("planneds3", PlannedS3, clobber=True)


def planned(url: str) -> str:
    """The same place, with a plan between."""
    return url.replace("s3://", "planneds3://", 1)
