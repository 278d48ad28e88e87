"""fault://, a local disk that follows a FaultPlan.

Importable in a worker: the folder above tests/ is in the trainer's sys.path.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tests.fakes.plan import FaultPlan

__all__ = ["FaultFile", "FaultFileSystem", "Planned"]

# Plan that counts where no storage option names one.
PLAN_VARIABLE = "MPWRITER_FAULT_PLAN"


class Planned:
    """What all of them do: every call goes through the plan."""

    _plan: FaultPlan | None

    def read_plan(self, plan: str | None) -> None:
        folder = plan or os.environ.get(PLAN_VARIABLE)
        self._plan = None if folder is None else FaultPlan(folder, fresh=False)

    def step(self, op: str, path: str, **details: Any) -> Any:
        if self._plan is None:
            return contextlib.nullcontext(("", None))
        return self._plan.step(op, path, **details)


class FaultFile:
    """A local file whose every call goes through the plan."""

    def __init__(self, fs: FaultFileSystem, path: str, file: Any) -> None:
        self._fs = fs
        self._path = path
        self._file = file
        self._counts: dict[str, int] = {}
        self._position = 0

    def _step(self, op: str, nbytes: int = 0) -> Any:
        nth = self._counts[op] = self._counts.get(op, 0) + 1
        return self._fs.step(op, self._path, nbytes=nbytes, nth=nth, position=self._position)

    def write(self, chunk: Any) -> int | None:
        if self._fs.bytes_only and not isinstance(chunk, bytes):
            raise TypeError("bytes are needed")
        view = memoryview(chunk)
        with self._step("write", view.nbytes) as (kind, value):
            taken = view[:value] if kind in ("short", "lie") else view
            if taken:
                self._file.write(taken)
            self._position += taken.nbytes
        claimed = view.nbytes if kind == "lie" else taken.nbytes
        return None if self._fs.returns_none and kind != "short" else claimed

    def read(self, *args: Any) -> Any:
        with self._step("read"):
            return self._file.read(*args)

    def readinto(self, buffer: Any) -> Any:
        with self._step("read", memoryview(buffer).nbytes):
            return self._file.readinto(buffer)

    def flush(self) -> None:
        with self._step("flush"):
            self._file.flush()

    def fileno(self) -> Any:
        with self._step("fileno"):
            return self._file.fileno()

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            with self._step("close"):
                self._file.close()
        finally:
            self._file.close()  # a failed close leaves no descriptor behind either

    def __enter__(self) -> FaultFile:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    def __iter__(self) -> Any:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class NumberlessFaultFile(FaultFile):
    """The same without a file number, as files of remote systems are."""

    def fileno(self) -> Any:
        raise AttributeError("fileno")


class FaultFileSystem(Planned, LocalFileSystem):
    """A local disk with faults.

    Args:
        plan: folder of the FaultPlan.
        fileno: whether its files have one.
        bytes_only: refuse a memoryview with TypeError.
        returns_none: write() returns None, as paramiko's does.
    """

    protocol = "fault"

    def __init__(
        self,
        plan: str | None = None,
        fileno: bool = True,
        bytes_only: bool = False,
        returns_none: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.read_plan(plan)
        self.has_fileno = fileno
        self.bytes_only = bytes_only
        self.returns_none = returns_none

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, str):
            # fsspec of early 2025 strips "file" only, whatever the subclass is called.
            path = path.removeprefix(f"{cls.protocol}://")
        return super()._strip_protocol(path)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        autocommit = kwargs.get("autocommit")
        with self.step("open_read" if "r" in mode else "open", path, autocommit=autocommit):
            file = super()._open(path, mode, **kwargs)
        return (FaultFile if self.has_fileno else NumberlessFaultFile)(self, path, file)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        # The target is what a rule and the log name.
        with self.step("mv", path2):
            os.replace(self._strip_protocol(path1), self._strip_protocol(path2))

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        with self.step("cp", path2):
            super().cp_file(path1, path2, **kwargs)

    def rm_file(self, path: str) -> None:
        with self.step("rm", path):
            super().rm_file(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        with self.step("makedirs", path):
            super().makedirs(path, exist_ok=exist_ok)

    def info(self, path: Any, **kwargs: Any) -> Any:
        with self.step("info", os.fspath(path)):
            return super().info(path, **kwargs)

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        with self.step("ls", path):
            return super().ls(path, detail=detail, **kwargs)

    def exists(self, path: str, **kwargs: Any) -> bool:
        return self._answer("exists", path) and os.path.exists(self._strip_protocol(path))

    def isdir(self, path: str) -> bool:
        return self._answer("isdir", path) and super().isdir(path)

    def _answer(self, op: str, path: str) -> bool:
        try:
            with self.step(op, path):
                return True
        except FileNotFoundError:
            return False


fsspec.register_implementation(FaultFileSystem.protocol, FaultFileSystem, clobber=True)
