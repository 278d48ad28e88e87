"""A server: started, waited for, ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

__all__ = ["ServerError", "free_ports", "program", "running"]

# A generous watchdog; the slowest one takes 6 s on an idle machine.
STARTS_WITHIN_S = 60.0
_POLL_S = 0.1

_LOG_LINES = 30

_GUARD = Path(__file__).parent / "guard.py"

# Below what the kernel hands out for outgoing connections, which could be in the way.
_PORTS = range(20_000, 32_000)


class ServerError(RuntimeError):
    """A server is not there, or does not start."""


def program(name: str, *places: str | os.PathLike[str], hint: str) -> str:
    """Find a server's program.

    Args:
        places: folders to look into before those of PATH.
        hint: how it is installed.

    Raises:
        ServerError: it is nowhere.
    """
    folders = [*(os.fspath(place) for place in places), os.environ.get("PATH", "")]
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        raise ServerError(f"{name} is not installed: {hint}")
    return found


def free_ports(number: int) -> list[int]:
    """Ports on which nothing listens now."""
    found: list[int] = []
    start = _PORTS.start + os.getpid() * 97 % len(_PORTS)
    for port in (*range(start, _PORTS.stop), *range(_PORTS.start, start)):
        if len(found) == number:
            return found
        if _is_free(port):
            found.append(port)
    raise ServerError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def running(
    make_command: Callable[[Path], Sequence[str]],
    works: Callable[[Path], object],
    *,
    port: int,
    address: str = "127.0.0.1",
    sockets: Sequence[str] = (),
) -> Iterator[Path]:
    """Run a server until the end of the block, or of this process, however it ends.

    Args:
        make_command: its command line, given the folder for its files.
        works: a real request; raises while the server is not ready. Not asked before something
            listens on `port` of `address`: clients take their time before they ask again.
        sockets: patterns of what the server leaves outside the folder.

    Yields:
        The folder.

    Raises:
        ServerError: it ended, or was not ready in time; with the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="server", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        log = folder / "log"
        log.touch()
        process = subprocess.Popen(
            [
                sys.executable, str(_GUARD), str(os.getpid()), name, str(log),
                os.pathsep.join(sockets), *make_command(folder),
            ],
            stdin=subprocess.PIPE,
            # Ctrl-C at the tests is not meant for it.
            start_new_session=True,
        )  # fmt: skip
        try:
            _wait(process, lambda: _listens(address, port), log)
            _wait(process, lambda: works(folder), log)
            yield folder
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def _wait(process: subprocess.Popen[bytes], works: Callable[[], object], log: Path) -> None:
    end_s = time.monotonic() + STARTS_WITHIN_S
    while True:
        try:
            works()
            return
        except Exception as error:
            story = f"{process.args!r}: {type(error).__name__}: {error}\n{_end_of(log)}"
            if process.poll() is not None:
                raise ServerError(f"ended with {process.returncode}: {story}") from error
            if time.monotonic() > end_s:
                raise ServerError(f"not ready in {STARTS_WITHIN_S:g} s: {story}") from error
        time.sleep(_POLL_S)


def _listens(address: str, port: int) -> None:
    with socket.create_connection((address, port), timeout=5):
        pass


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
