"""s3torchconnector, a peer on S3, where it is installed: its writer and reader beside ours.

Runs in: trainer.

It takes no fsspec options, so what it needs of them is put in its own words. Keys go through the
environment, the one way that it has for them, and only while it makes its client.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

__all__ = ["PEER", "peer_environment", "peer_missing", "peer_reader", "peer_writer", "serves"]

PEER = "s3torchconnector"
"""Its family, and the name of its package."""

_REGION = "us-east-1"
_ENVIRONMENT = {
    "key": "AWS_ACCESS_KEY_ID",
    "secret": "AWS_SECRET_ACCESS_KEY",
    "token": "AWS_SESSION_TOKEN",
}


def serves(url: str) -> bool:
    """Whether it can write to such a URL."""
    return url.startswith("s3://")


def peer_missing() -> str | None:
    """Why it cannot take part, or None."""
    wanted = (PEER, "tenacity")  # the latter comes with [dcp] only
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    return f"not installed: pip install '{PEER}[dcp]'" if missing else None


@contextmanager
def peer_environment(options: Mapping[str, Any]) -> Iterator[None]:
    """The keys of fsspec's `options` in the environment, until the end of the block."""
    given = {_ENVIRONMENT[name]: str(options[name]) for name in _ENVIRONMENT if options.get(name)}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def peer_writer(url: str, options: Mapping[str, Any], num_threads: int) -> StorageWriter:
    """Its writer with `num_threads` threads; to be used within `peer_environment`."""
    from s3torchconnector.dcp import S3StorageWriter

    writer: Any = S3StorageWriter(
        region=_region(options), path=url, thread_count=num_threads, overwrite=True
    )
    writer.fs = _filesystem(options)
    return writer  # type: ignore[no-any-return]


def peer_reader(url: str, options: Mapping[str, Any]) -> StorageReader:
    """Its reader, as it comes; to be used within `peer_environment`."""
    from s3torchconnector import S3ReaderConstructor
    from s3torchconnector.dcp import S3StorageReader

    ranges = S3ReaderConstructor.dcp_optimized()  # its default
    reader: Any = S3StorageReader(_region(options), url, reader_constructor=ranges)
    reader.fs = _filesystem(options, reader_constructor=ranges)
    return reader  # type: ignore[no-any-return]


def _region(options: Mapping[str, Any]) -> str:
    region = options.get("client_kwargs", {}).get("region_name")
    return str(region or os.environ.get("AWS_REGION") or _REGION)


def _filesystem(options: Mapping[str, Any], **more: Any) -> Any:
    """Writer and reader make one that cannot be told an endpoint."""
    from s3torchconnector._s3client import S3Client
    from s3torchconnector._s3client.s3client_config import S3ClientConfig
    from s3torchconnector.dcp.s3_file_system import S3FileSystem

    endpoint = options.get("endpoint_url") or options.get("client_kwargs", {}).get("endpoint_url")
    config = S3ClientConfig(force_path_style=endpoint is not None)
    region = _region(options)
    client = S3Client(region, endpoint=endpoint, s3client_config=config)
    return S3FileSystem(region, s3_client=client, **more)
