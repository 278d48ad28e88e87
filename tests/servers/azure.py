"""Azure Blob Storage: Azurite, from npm."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from urllib.parse import parse_qs

from tests.servers.process import free_ports, program, running
from tests.servers.store import Store, try_store

__all__ = ["start_azure"]

_CONTAINER = "checkpoints"

# The account that Azurite has by default.
# Source: https://learn.microsoft.com/azure/storage/common/storage-use-azurite
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@contextlib.contextmanager
def start_azure() -> Iterator[Store]:
    """Start the server, with one container.

    Raises:
        ServerError: it is not installed, or does not start.
    """
    azurite = program(
        "azurite-blob",
        # Where `make` puts it: beside the interpreter's virtual environment.
        Path(sys.prefix) / "npm" / "node_modules" / ".bin",
        os.environ.get("AZURITE_BIN", os.devnull),
        hint="npm install azurite",
    )
    (port,) = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}/{_ACCOUNT}"
    connection = (
        f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={_KEY};"
        f"BlobEndpoint={endpoint};"
    )
    sas = _sas_of_reader()
    store = Store(
        "azure",
        f"abfs://{_CONTAINER}",
        {"connection_string": connection},
        # A signature is quoted in URLs, and its last letters are "=".
        (_KEY, sas, *parse_qs(sas)["sig"]),
        of_reader={"connection_string": f"BlobEndpoint={endpoint};SharedAccessSignature={sas}"},
    )

    def command(folder: Path) -> list[str]:
        return [
            azurite, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder),
            "--silent", "--disableTelemetry", "--skipApiVersionCheck",
        ]  # fmt: skip

    def works(folder: Path) -> None:
        with contextlib.suppress(FileExistsError):
            store.filesystem().mkdir(_CONTAINER)
        try_store(store)

    with running(command, works, port=port):
        yield store


def _sas_of_reader() -> str:
    from azure.storage.blob import (
        AccountSasPermissions,
        ResourceTypes,
        generate_account_sas,
    )

    now = datetime.now(timezone.utc)
    sas: str = generate_account_sas(
        _ACCOUNT,
        _KEY,
        ResourceTypes(service=True, container=True, object=True),
        AccountSasPermissions(read=True, list=True),
        start=now - timedelta(hours=1),
        expiry=now + timedelta(days=1),
    )
    return sas
