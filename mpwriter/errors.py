"""The exceptions that mpwriter raises.

Runs in: both. Imports nothing of the package and no torch.

    MPWriterError
    |-- StorageError            (OSError)               a file operation failed
    |-- WorkerDiedError                                 a worker process ended in mid-job
    |-- WorkerTimeoutError      (TimeoutError)          a worker made no progress for timeout_s
    |-- WorkerStartError        (OSError)               a worker process could not be started
    |-- StagingError            (ValueError)            a value of the state dict cannot be staged
    |-- StagingMemoryError      (MemoryError)           no shared memory to stage into
    |-- CheckpointExistsError   (FileExistsError, RuntimeError)   overwrite=False and there is one
    |-- IncompleteCheckpointError (FileNotFoundError)   no complete checkpoint at that place
    |-- CorruptCheckpointError  (ValueError)            what was read is not what was written
    `-- ShapeMismatchError      (ValueError)            stored and target shapes differ

Every one can be pickled with its fields: torch.distributed.checkpoint sends a rank's exception
to the coordinator and raises it inside its own CheckpointException.
"""

from __future__ import annotations

import errno as _errno
from typing import Any

__all__ = [
    "CheckpointExistsError",
    "CorruptCheckpointError",
    "IncompleteCheckpointError",
    "MPWriterError",
    "ShapeMismatchError",
    "StagingError",
    "StagingMemoryError",
    "StorageError",
    "WorkerDiedError",
    "WorkerStartError",
    "WorkerTimeoutError",
]


def _rebuild(cls: type[MPWriterError], message: str, fields: dict[str, Any]) -> MPWriterError:
    return cls(message, **fields)


class MPWriterError(Exception):
    """Root of the tree.

    Args:
        message: the whole text; `str(error)` gives exactly this.
        fields: kept as attributes and in the pickle.
    """

    _fields: tuple[str, ...] = ()

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        for name in self._fields:
            setattr(self, name, fields.pop(name, None))
        if fields:
            raise TypeError(f"{type(self).__name__} has no fields {sorted(fields)}")

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {name: getattr(self, name) for name in self._fields}
        return _rebuild, (type(self), self.message, fields)


class StorageError(MPWriterError, OSError):
    """A file operation failed in the trainer or in a worker.

    Attributes:
        errno: number of the original OSError; EIO where the original had none.
        path: the file, as its filesystem names it, without credentials.
        filename: the same, as OSError calls it.
        original_type: qualified name of the exception that the filesystem raised.
        worker: number of the worker, None in the trainer.
        worker_traceback: formatted traceback of the worker, "" in the trainer.
    """

    _fields = ("errno", "path", "original_type", "worker", "worker_traceback")
    path: str | None
    original_type: str | None
    worker: int | None
    worker_traceback: str | None

    def __init__(self, message: str, **fields: Any) -> None:
        if fields.get("errno") is None:
            fields["errno"] = _errno.EIO
        super().__init__(message, **fields)
        self.strerror = message
        self.filename = self.path


class WorkerDiedError(MPWriterError):
    """A worker process ended in the middle of a job.

    Attributes:
        worker: its number; pid: its process id; path: the file it was writing.
        exit_code: as subprocess gives it (negative: a signal); None if not known.
        signal_name: "SIGKILL" and so on, None where it exited by itself.
    """

    _fields = ("worker", "pid", "exit_code", "signal_name", "path")
    worker: int | None
    pid: int | None
    exit_code: int | None
    signal_name: str | None
    path: str | None


class WorkerTimeoutError(MPWriterError, TimeoutError):
    """A worker made no progress for `timeout_s` seconds and was killed."""

    _fields = ("worker", "pid", "timeout_s", "path")
    worker: int | None
    pid: int | None
    timeout_s: float | None
    path: str | None


class WorkerStartError(MPWriterError, OSError):
    """A worker process could not be started (process limits, no interpreter, no memfd)."""

    _fields = ("errno", "worker")
    worker: int | None


class StagingError(MPWriterError, ValueError):
    """A value of the state dict cannot be staged; `key` names it."""

    _fields = ("key", "original_type")
    key: str | None
    original_type: str | None


class StagingMemoryError(MPWriterError, MemoryError):
    """There is no shared memory to stage into.

    Attributes:
        needed_bytes, budget_bytes, available_bytes: None where not known.
    """

    _fields = ("needed_bytes", "budget_bytes", "available_bytes")
    needed_bytes: int | None
    budget_bytes: int | None
    available_bytes: int | None


class CheckpointExistsError(MPWriterError, FileExistsError, RuntimeError):
    """`overwrite=False` and `path` holds a checkpoint. Nothing was touched."""

    _fields = ("path",)
    path: str | None

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.errno = _errno.EEXIST
        self.filename = self.path


class IncompleteCheckpointError(MPWriterError, FileNotFoundError):
    """There is no complete checkpoint at `path`: no metadata file, or a shard of it is missing."""

    _fields = ("path", "key")
    path: str | None
    key: str | None

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.errno = _errno.ENOENT
        self.filename = self.path


class CorruptCheckpointError(MPWriterError, ValueError):
    """What was read from `path` is not what was written there; `key` names the value."""

    _fields = ("path", "key")
    path: str | None
    key: str | None


class ShapeMismatchError(MPWriterError, ValueError):
    """The stored and the target shape of `key` differ; the target was not touched."""

    _fields = ("path", "key")
    path: str | None
    key: str | None
