"""SFTP: the sshd of OpenSSH, run by the user of the tests."""

from __future__ import annotations

import contextlib
import getpass
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.servers.process import free_ports, program, running
from tests.servers.store import Store, try_store

__all__ = ["start_sftp"]

_CONFIG = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
PidFile {folder}/pid
AuthorizedKeysFile {folder}/user_key.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
PubkeyAuthentication yes
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
Subsystem sftp internal-sftp
MaxSessions 100
MaxStartups 100
"""


@contextlib.contextmanager
def start_sftp() -> Iterator[Store]:
    """Start the server; its root is a folder of this machine.

    Raises:
        ServerError: it is not installed, or does not start.
    """
    hint = "Debian's openssh-server"
    sshd = program("sshd", "/usr/sbin", "/usr/local/sbin", hint=hint)
    keygen = program("ssh-keygen", hint=hint)
    if os.geteuid() == 0:
        # Where sshd of root keeps an empty folder for its children; its init script makes it.
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
    (port,) = free_ports(1)

    def command(folder: Path) -> list[str]:
        for name in ("host_key", "user_key"):
            subprocess.run(
                [keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
            )
        (folder / "config").write_text(_CONFIG.format(port=port, folder=folder))
        (folder / "data").mkdir()
        return [sshd, "-D", "-e", "-f", str(folder / "config")]

    def store_in(folder: Path) -> Store:
        options = {
            "username": getpass.getuser(),
            "port": port,
            "key_filename": str(folder / "user_key"),
            "allow_agent": False,
            "look_for_keys": False,
        }
        root = f"sftp://127.0.0.1{folder}/data"
        return Store("sftp", root, options, has_directories=True)

    def works(folder: Path) -> None:
        try_store(store_in(folder))

    with running(command, works, port=port) as folder:
        yield store_in(folder)
