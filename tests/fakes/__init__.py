"""Filesystems that misbehave on demand, in the trainer and in the workers alike.

    plan = FaultPlan(tmp_path / "plan")
    plan.add("write", "__0_1.*", nth=2, errno=errno.ENOSPC)
    dcp.save(state, storage_writer=MPFsspecWriter(f"fault://{tmp_path}/ckpt", **plan.options))
    plan.calls("open", "*.distcp")

Importing this package registers the protocols fault://, objectlike://, commitlike:// and
closelike:// with fsspec. All four keep their files under the same path of the local disk.
"""

from tests.fakes.filesystems import FaultFileSystem
from tests.fakes.objects import (
    CloseLikeFileSystem,
    CommitLikeFileSystem,
    ObjectLikeFileSystem,
)
from tests.fakes.plan import Call, FaultPlan

__all__ = [
    "Call",
    "CloseLikeFileSystem",
    "CommitLikeFileSystem",
    "FaultFileSystem",
    "FaultPlan",
    "ObjectLikeFileSystem",
]
