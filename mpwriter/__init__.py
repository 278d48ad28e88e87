"""Checkpoints of torch.distributed.checkpoint, written by worker processes out of shared memory.

Runs in: both. The public names are found on first use: `import mpwriter` imports neither torch
nor fsspec, so that a worker process, which imports this module too, starts without torch.

    MPFsspecWriter        the storage writer for `dcp.save` and `dcp.async_save`
    FsspecReader          the storage reader for `dcp.load`
    SerializationFormat   what a shard file holds
    inspect, verify       what a checkpoint holds; whether it is what was written
    warm_up, shutdown     start and stop the worker processes of this process
    errors                MPWriterError and its children

Thread safety: any thread may be the first to use a name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpwriter import errors
from mpwriter._version import __version__

__all__ = [
    "FsspecReader",
    "MPFsspecWriter",
    "SerializationFormat",
    "__version__",
    "errors",
    "inspect",
    "shutdown",
    "verify",
    "warm_up",
]

if TYPE_CHECKING:
    from mpwriter._compat import SerializationFormat
    from mpwriter._inspect import inspect
    from mpwriter._pool import shutdown, warm_up
    from mpwriter._reader import FsspecReader
    from mpwriter._verify import verify
    from mpwriter._writer import MPFsspecWriter
else:
    # Hidden from type checkers: a module with __getattr__ has, to them, every name there is.
    _HOMES = {
        "FsspecReader": "_reader",
        "MPFsspecWriter": "_writer",
        "SerializationFormat": "_compat",
        "inspect": "_inspect",
        "shutdown": "_pool",
        "verify": "_verify",
        "warm_up": "_pool",
    }

    def __getattr__(name):
        """Import a public name's module on first use.

        Raises:
            AttributeError: there is no such public name.
        """
        from importlib import import_module

        try:
            home = _HOMES[name]
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        found = getattr(import_module(f"{__name__}.{home}"), name)
        globals()[name] = found  # the next look-up does not come here
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
