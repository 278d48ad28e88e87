"""Credentials that the client of S3 takes from its environment, renewed while a job runs.

Runs in: both. Torch-free; imports no s3fs.

A client reads the environment and the files of profiles once. Where a program renews what is
there, its next save and load use that: a filesystem whose credentials are not among its options
gets a new client when the variables (`AWS_...`) or the files have changed since it was looked at.
Workers outlive many saves, so the trainer's variables go to them with every file.

What a client renews by itself (roles, web identities, processes that give keys) is left to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from typing import Any

__all__ = ["Crossing", "renew_client"]

_logger = logging.getLogger(__name__)

_PREFIX = "AWS_"
# Source: botocore, configprovider.BOTOCORE_DEFAULT_SESSION_VARIABLES.
_FILES = (
    ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
    ("AWS_CONFIG_FILE", "~/.aws/config"),
)
_SEEN = "_mpwriter_credentials"  # of a filesystem: what they were when its client was made


class Crossing:
    """A filesystem on its way to another process, with the variables of this one.

    What is unpickled there is the filesystem.
    """

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    def __reduce__(self) -> Any:
        if _depends_on_environment(self._fs):
            return _arrived, (self._fs, _variables())
        return _itself, (self._fs,)


def _itself(fs: Any) -> Any:
    return fs


def _arrived(fs: Any, variables: Mapping[str, str]) -> Any:
    for name in _variables().keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    renew_client(fs)
    return fs


def renew_client(fs: Any) -> None:
    """Give `fs` a new client if the credentials around it have changed since the last look.

    Never raises: what is wrong with the new ones is said when they are used.
    """
    if not _depends_on_environment(fs):
        return
    now = (_variables(), [_state_of_file(*file) for file in _FILES])
    before = getattr(fs, _SEEN, None)
    if before == now:
        return
    try:
        if before is not None:
            fs.connect(refresh=True)
        setattr(fs, _SEEN, now)
    except Exception as exc:
        _logger.warning("credentials have changed, but give no client: %s", type(exc).__name__)


def _depends_on_environment(fs: Any) -> bool:
    """Whether it is an s3fs whose client was made without keys, by itself."""
    known = any(
        base.__name__ == "S3FileSystem" and base.__module__.startswith("s3fs.")
        for base in type(fs).__mro__
    )
    if not known or getattr(fs, "anon", False):
        return False
    given = getattr(fs, "key", None) or getattr(fs, "secret", None)
    owned = getattr(fs, "session", None) is None or getattr(fs, "_session_is_owned", False)
    return bool(owned and not given and callable(getattr(fs, "connect", None)))


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_PREFIX)}


def _state_of_file(variable: str, default: str) -> tuple[int, ...] | None:
    path = os.path.expanduser(os.environ.get(variable, default))
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_mtime_ns, found.st_size, found.st_ino
    return None
