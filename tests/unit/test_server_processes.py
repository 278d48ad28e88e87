"""Servers of the tests: started, waited for, and gone whatever becomes of the tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.servers.process import ServerError, free_ports, program, running
from tests.trainers import REPOSITORY, all_gone, wait_until

# A server with a child in a session of its own, as each connection to sshd is.
_SERVER = """
import os, socket, subprocess, sys
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
with open("pids.part", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename("pids.part", "pids")
while True:
    listening.accept()[0].close()
"""
_OWNER = """
import os, signal, sys
from tests.unit.test_server_processes import start
with start() as folder:
    print(folder, (folder / "pids").read_text(), flush=True)
    os.kill(os.getpid(), int(sys.argv[1]))
    signal.pause()
"""


def start(
    source: str = _SERVER, sockets: Sequence[str] = ()
) -> contextlib.AbstractContextManager[Path]:
    (port,) = free_ports(1)
    command = [sys.executable, "-c", source, str(port)]

    def works(folder: Path) -> str:
        return (folder / "pids").read_text()

    return running(lambda folder: command, works, port=port, sockets=sockets)


def test_running_ends_the_server_and_all_that_it_has_started(tmp_path: Path) -> None:
    outside = tmp_path / "x.sock"
    outside.touch()
    with start(sockets=[f"{tmp_path}/*.sock"]) as folder:
        pids = [int(pid) for pid in (folder / "pids").read_text().split()]
        assert not all_gone(pids, within_s=0)
    assert all_gone(pids, within_s=0)
    assert not folder.exists() and not outside.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_running_leaves_nothing_when_its_process_is_ended(number: int) -> None:
    owner = subprocess.run(
        [sys.executable, "-c", _OWNER, str(int(number))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=REPOSITORY,
        timeout=50,
    )
    folder, *pids = owner.stdout.split()
    assert owner.returncode != 0 and len(pids) == 2
    assert all_gone([int(pid) for pid in pids], within_s=10)
    wait_until(lambda: not os.path.exists(folder))


def test_running_shows_the_end_of_the_log_when_the_server_does_not_start() -> None:
    source = "import sys; print(*range(500), sep='\\n'); sys.exit('no such option')"
    with pytest.raises(ServerError, match="ended with 1") as caught, start(source):
        pass
    lines = str(caught.value).splitlines()
    assert lines[-1] == "no such option" and "499" in lines and "400" not in lines


def test_running_raises_when_the_server_never_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.servers.process.STARTS_WITHIN_S", 0.0)
    with pytest.raises(ServerError, match="not ready"), start("import time; time.sleep(1000)"):
        pass
    assert [child for child in psutil.Process().children() if "sleep" in child.cmdline()] == []


def test_program_raises_when_it_is_not_installed() -> None:
    with pytest.raises(ServerError, match="no-such-server is not installed: ask for it"):
        program("no-such-server", "/nowhere", hint="ask for it")


def test_free_ports_differ() -> None:
    assert len(set(free_ports(20))) == 20
