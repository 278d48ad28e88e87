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
PidFile none
AuthorizedKeysFile {folder}/authorized_keys
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
_PASSPHRASE = "sftp-secret-4714"


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
        _make_keys(keygen, folder)
        (folder / "config").write_text(_CONFIG.format(port=port, folder=folder))
        (folder / "data").mkdir()
        return [sshd, "-D", "-e", "-f", str(folder / "config")]

    def works(folder: Path) -> None:
        try_store(_store_in(folder, port))

    with running(command, works, port=port) as folder:
        yield _store_in(folder, port)


def _make_keys(keygen: str, folder: Path) -> None:
    for name in ("host_key", "user_key", "reader_key"):
        # One round: a passphrase that is slow to try out is of no use here.
        secret = ["-N", "" if name == "host_key" else _PASSPHRASE, "-a", "1"]
        command = [keygen, "-q", "-t", "ed25519", *secret, "-f", str(folder / name)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    user, reader = ((folder / f"{name}_key.pub").read_text() for name in ("user", "reader"))
    allowed = f'{user}command="internal-sftp -R" {reader}'
    (folder / "authorized_keys").write_text(allowed)


def _store_in(folder: Path, port: int) -> Store:
    options = {
        "username": getpass.getuser(),
        "port": port,
        "key_filename": str(folder / "user_key"),
        "passphrase": _PASSPHRASE,
        "allow_agent": False,
        "look_for_keys": False,
    }
    return Store(
        "sftp",
        f"sftp://127.0.0.1{folder}/data",
        options,
        (_PASSPHRASE,),
        has_directories=True,
        of_reader={**options, "key_filename": str(folder / "reader_key")},
    )
