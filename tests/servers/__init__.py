"""Real storage servers on loopback, for tests and measurements.

    with start_s3() as store:       # also start_gcs, start_azure, start_sftp
        MPFsspecWriter(f"{store.root}/run", **store.options)

A server is a process of this one, on free ports, with its files in a temporary folder. It is ready
when a file has been written and read; it is ended by its pid. One that is missing or does not start
raises `ServerError`, with the end of its log.
"""

from __future__ import annotations

from tests.servers.azure import start_azure
from tests.servers.gcs import start_gcs
from tests.servers.process import ServerError
from tests.servers.s3 import S3Store, start_s3
from tests.servers.sftp import start_sftp
from tests.servers.store import Store

__all__ = [
    "S3Store",
    "ServerError",
    "Store",
    "start_azure",
    "start_gcs",
    "start_s3",
    "start_sftp",
]
