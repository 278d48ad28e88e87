"""witness://, a local disk that writes down what the process is like in which a file is opened.

Importable in a worker, as fault:// is, and without torch.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

__all__ = ["WitnessFileSystem", "witnessed"]

_SAYING = "the witness says by"


class WitnessFileSystem(LocalFileSystem):
    """A local disk.

    Args:
        folder: where each opening of a shard leaves a file with facts.
        talkative: print, warn, log and write to both streams, too.
    """

    protocol = "witness"

    def __init__(self, folder: str, talkative: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.folder = folder
        self.talkative = talkative

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, str):
            # fsspec of early 2025 strips "file" only, whatever the subclass is called.
            path = path.removeprefix(f"{cls.protocol}://")
        return super()._strip_protocol(path)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if "w" in mode and ".metadata" not in path:
            name = f"{os.getpid()}.{os.path.basename(path)}.json"
            Path(self.folder, name).write_text(json.dumps(_facts()))
            if self.talkative:
                print(f"{_SAYING} print")
                print(f"{_SAYING} stderr", file=sys.stderr)
                warnings.warn(f"{_SAYING} warnings", stacklevel=1)
                logging.getLogger(__name__).warning("%s logging", _SAYING)
        return super()._open(path, mode, **kwargs)


fsspec.register_implementation(WitnessFileSystem.protocol, WitnessFileSystem, clobber=True)


def witnessed(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """What was written down, one entry per shard, in the order of process ids."""
    found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return sorted(found, key=lambda facts: facts["pid"])


def _facts() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "group": os.getpgrp(),
        "command": sys.orig_argv,
        "program": os.readlink("/proc/self/exe"),
        "sys_path": sys.path,
        "modules": sorted(sys.modules),
        "main": sorted(vars(sys.modules["__main__"])),
        "cwd": os.getcwd(),
        "ignores": [signal.getsignal(n) is signal.SIG_IGN for n in (signal.SIGINT, signal.SIGTERM)],
        "blocked_signals": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "omp_threads": os.environ.get("OMP_NUM_THREADS"),
        "links": [os.readlink(f"/proc/self/fd/{fd}") for fd in _own_fds()],
    }


def _own_fds() -> list[int]:
    fds = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.stat(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of the listing itself
        fds.append(int(name))
    return fds
