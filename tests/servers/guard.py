"""Runs a server for another process, and ends it whatever becomes of that process.

    python guard.py PID FOLDER LOG SOCKETS COMMAND...

The server ends when process PID has ended or has closed this one's standard input. Nothing that it
has started is left then, and neither are its folder and its sockets. Where the server ends by
itself the folder stays: the log in it says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import select
import shutil
import signal
import subprocess
import sys

import psutil

__all__: list[str] = []

# Orphans of the server, such as the sessions of sshd, become children of this process.
# Source: linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


def main(pid: str, folder: str, log: str, sockets: str, *command: str) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the server would inherit
    owner = os.pidfd_open(int(pid))
    if os.getppid() != int(pid):
        return 1  # it has ended already, and its number may be somebody else's now
    with open(log, "wb") as output:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
    ended_by_itself = _wait(owner, os.pidfd_open(server.pid))
    if not ended_by_itself:
        server.kill()
    code = server.wait()
    _end_children()
    _remove(sockets.split(os.pathsep))
    if not ended_by_itself:
        shutil.rmtree(folder, ignore_errors=True)
    return code & 0xFF


def _wait(owner: int, server: int) -> bool:
    """Whether it was the server that ended."""
    poll = select.poll()
    for fd in (0, owner, server):
        poll.register(fd, select.POLLIN)
    ready = {fd for fd, _ in poll.poll()}
    return ready == {server}


def _end_children() -> None:
    while children := psutil.Process().children():
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
            with contextlib.suppress(psutil.Error):
                child.wait()


def _remove(patterns: list[str]) -> None:
    for pattern in patterns:
        for path in glob.glob(pattern):
            with contextlib.suppress(OSError):
                os.remove(path)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
