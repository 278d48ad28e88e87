"""What an exception of a filesystem means, and what an old checkpoint names.

Runs in: both. Torch-free.
"""

from __future__ import annotations

import errno as _errno
import os
import re
import traceback
from collections.abc import Iterator
from typing import Any

from mpwriter._redact import scrub, secrets_of
from mpwriter._types import ErrorRecord
from mpwriter.errors import StorageError

__all__ = [
    "ToldError",
    "as_storage_error",
    "error_record",
    "is_absence",
    "is_transient",
    "stale_shard_names",
]

_TRANSIENT_ERRNOS = frozenset(
    {
        _errno.EAGAIN,
        _errno.EINTR,
        _errno.EBUSY,  # s3fs gives it for SlowDown and ServiceUnavailable
        _errno.EPIPE,
        _errno.ESTALE,  # NFS: the handle is gone, a new open gets a new one
        _errno.ETIMEDOUT,
        _errno.ECONNRESET,
        _errno.ECONNABORTED,
        _errno.ECONNREFUSED,
        _errno.ENETDOWN,
        _errno.ENETUNREACH,
        _errno.ENETRESET,
        _errno.EHOSTDOWN,
        _errno.EHOSTUNREACH,
    }
)
# EIO, EREMOTEIO and EINVAL are in neither set: s3fs gives them to errors of its own that it has
# no number for, so what lies beneath decides.
_PERMANENT_ERRNOS = frozenset(
    {
        _errno.EACCES,
        _errno.EPERM,
        _errno.ENOSPC,
        _errno.EDQUOT,
        _errno.EFBIG,
        _errno.EROFS,
        _errno.ENOENT,
        _errno.ENOTDIR,
        _errno.EISDIR,
        _errno.EEXIST,
        _errno.ENOTEMPTY,
        _errno.ENAMETOOLONG,
        _errno.EMSGSIZE,
    }
)

# s3fs and others raise these with a text and no number.
_ERRNO_OF_CLASS: dict[type[OSError], int] = {
    PermissionError: _errno.EACCES,
    FileNotFoundError: _errno.ENOENT,
    FileExistsError: _errno.EEXIST,
    IsADirectoryError: _errno.EISDIR,
    NotADirectoryError: _errno.ENOTDIR,
    TimeoutError: _errno.ETIMEDOUT,
}

# Classes of libraries that may not be installed, hence by name.
_PERMANENT_CLASSES = frozenset(
    {
        "AuthenticationException",  # paramiko; a child of SSHException
        "BadHostKeyException",
        "ClientAuthenticationError",  # azure.core
        "NoCredentialsError",  # botocore; a child of BotoCoreError
        "ParamValidationError",
        "PermissionDenied",  # asyncssh
    }
)
_TRANSIENT_CLASSES = frozenset(
    {
        "ChannelException",  # paramiko
        "SSHException",
        "ConnectionLost",  # asyncssh
        "DisconnectError",
        "ClientConnectionError",  # aiohttp
        "ClientPayloadError",
        "HTTPClientError",  # botocore
        "ConnectionError",  # builtin, requests
        "IncompleteReadError",  # asyncio, botocore
        "ProtocolError",  # urllib3
        "ServiceRequestError",  # azure.core: the request did not get there
        "ServiceResponseError",
        "Timeout",  # requests
        "TimeoutError",  # builtin, asyncio (its own before 3.11), fsspec.FSTimeoutError
        "EOFError",  # paramiko: the server hung up
    }
)

_FORBIDDEN_STATUSES = frozenset({401, 403})
_TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 509})
_TRANSIENT_CODES = re.compile(
    r"slow ?down|throttl|too ?many ?requests|request ?limit ?exceeded|reduce your request rate"
    r"|service ?unavailable|server ?busy|internal ?(server ?)?error|bandwidth ?limit ?exceeded"
    r"|request ?time(d ?)?out|operation ?aborted|temporar(il)?y (unavailable|failure)|try again",
    re.IGNORECASE,
)

_PART_LIMIT = re.compile(r"part ?number|too many parts|maximum number of (parts|blocks)", re.I)
_PART_HINT = (
    " (the file has more parts than the store takes: raise the filesystem's block size, for s3"
    " the storage option default_block_size, or num_workers for smaller files)"
)
_MAX_TEXT_CHARS = 4_000
_MAX_TRACEBACK_CHARS = 20_000

_SHARD_NAME = re.compile(rb"__\d+_\d+(?:\.[0-9A-Za-z_\-]{8})?\.(?:distcp|safetensors)")


class ToldError(Exception):
    """What a call raised in another process, which has told of it by `record`."""

    def __init__(self, record: ErrorRecord) -> None:
        super().__init__(f"{record.type_name}: {record.text}")
        self.record = record


def is_transient(exc: BaseException) -> bool:
    """Whether a further try of the same operation may succeed.

    The exception and then what it was raised from are looked at; the first that says something
    decides. Says no in doubt: a permission or a full disk is not retried for minutes.

    Args:
        exc: what a filesystem call raised.

    Returns:
        True for timeouts, lost connections, EAGAIN, throttling and a server's 5xx.

    Raises:
        Nothing.
    """
    if isinstance(exc, ToldError):
        return exc.record.transient
    for link in _chain(exc):
        verdict = _verdict(link)
        if verdict is not None:
            return verdict
    return False


def is_absence(exc: BaseException) -> bool:
    """Whether a filesystem says by it that there is no such file.

    adlfs lets azure.core's own ResourceNotFoundError through, which is no OSError.
    """
    if isinstance(exc, (FileNotFoundError, NotADirectoryError)):
        return True
    if isinstance(exc, ToldError):
        return exc.record.absent
    return any(base.__name__ == "ResourceNotFoundError" for base in type(exc).__mro__)


def error_record(exc: BaseException, path: str | None, *, fs: Any = None) -> ErrorRecord:
    """Put an exception into plain text.

    Args:
        exc: any exception; it need not be picklable and its `__str__` may fail.
        path: the file that was being worked on, as its filesystem names it.
        fs: its filesystem; the secrets among its storage options are struck out of the texts.

    Returns:
        The record. `errno` is the first one found along the chain of causes; its text is in
        `text` even where the exception's own does not say it.

    Raises:
        Nothing.
    """
    if isinstance(exc, ToldError):
        return exc.record
    number = _first_errno(exc)
    text = _text(exc)
    if number is not None and os.strerror(number) not in text:
        text = f"{text} [Errno {number}: {os.strerror(number)}]"
    if _PART_LIMIT.search(text):
        text += _PART_HINT
    secrets = secrets_of(fs)
    return ErrorRecord(
        type_name=_type_name(type(exc)),
        text=scrub(text, secrets),
        errno=number,
        path=None if path is None else scrub(path, secrets),
        traceback=scrub(_formatted(exc), secrets),
        transient=is_transient(exc),
        absent=is_absence(exc),
    )


def as_storage_error(exc: BaseException, action: str, path: str, fs: Any) -> StorageError:
    """Tell an exception of a filesystem as ours: it can be pickled, and names the path.

    Args:
        exc: what a call of `fs` raised in this process.
        action: what was being done to `path`, as in "cannot <action> <path>".
        path: as `fs` names it; fs: its filesystem, whose secrets are kept out of the text.

    Raises:
        Nothing.
    """
    record = error_record(exc, path, fs=fs)
    return StorageError(
        f"cannot {action} {record.path}: {record.type_name}: {record.text}",
        errno=record.errno,
        path=record.path,
        original_type=record.type_name,
        worker_traceback="",
    )


def stale_shard_names(old_metadata: bytes) -> set[str]:
    """Shard files that a pickled `.metadata` names, without unpickling it.

    Args:
        old_metadata: a whole `.metadata` of this package or of the stock writers. What cannot be
            understood names nothing.

    Returns:
        File names such as `__0_0.distcp`, `__0_1.0f3a9c2e.distcp`.

    Raises:
        Nothing.
    """
    names = set()
    for match in _SHARD_NAME.finditer(old_metadata):
        start, nbytes = match.start(), match.end() - match.start()
        # Only a whole string counts, by the opcode and length before it: a key may contain such
        # a name. SHORT_BINUNICODE (protocol 4) and BINUNICODE (protocol 2).
        if old_metadata[start - 2 : start] == b"\x8c" + bytes([nbytes]) or (
            old_metadata[start - 5 : start] == b"X" + nbytes.to_bytes(4, "little")
        ):
            names.add(match[0].decode("ascii"))
    return names


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while exc is not None and id(exc) not in seen:
        seen.add(id(exc))
        yield exc
        if exc.__cause__ is not None or exc.__suppress_context__:
            exc = exc.__cause__
        else:
            exc = exc.__context__


def _verdict(exc: BaseException) -> bool | None:
    """True: transient; False: permanent; None: this exception alone does not say."""
    if not isinstance(exc, Exception):
        return False
    number = exc.errno if isinstance(exc, OSError) else None
    if number in _PERMANENT_ERRNOS or isinstance(exc, (PermissionError, FileNotFoundError)):
        return False
    names = {base.__name__ for base in type(exc).__mro__}
    if names & _PERMANENT_CLASSES:
        return False
    if number in _TRANSIENT_ERRNOS:
        return True
    status, code = _status(exc)
    if status is not None and status >= 400:
        return status in _TRANSIENT_STATUSES or bool(_TRANSIENT_CODES.search(code))
    if names & _TRANSIENT_CLASSES or _TRANSIENT_CODES.search(code):
        return True
    return None


def _status(exc: Exception) -> tuple[int | None, str]:
    """The HTTP status and the service's own code or text, wherever the library keeps them."""
    response = getattr(exc, "response", None)
    if isinstance(response, dict):  # botocore.exceptions.ClientError
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return _as_status(status), str(response.get("Error", {}).get("Code", ""))
    for name in ("status", "status_code", "code"):  # aiohttp, azure.core, gcsfs
        status = _as_status(getattr(exc, name, None))
        if status is not None:
            return status, _text(exc)
    return None, _text(exc)


def _as_status(value: Any) -> int | None:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    return value if isinstance(value, int) and 100 <= value <= 599 else None


def _first_errno(exc: BaseException) -> int | None:
    for link in _chain(exc):
        number = getattr(link, "errno", None)
        if isinstance(link, OSError) and isinstance(number, int) and number > 0:
            return number  # resolver errors are negative and no errno
    for link in _chain(exc):
        for cls, number in _ERRNO_OF_CLASS.items():
            if isinstance(link, cls):
                return number
        if is_absence(link):
            return _errno.ENOENT
        if isinstance(link, Exception) and _status(link)[0] in _FORBIDDEN_STATUSES:
            return _errno.EACCES  # azure.core and others have no class of their own for it
    return None


def _text(exc: BaseException) -> str:
    try:
        return str(exc)[:_MAX_TEXT_CHARS] or type(exc).__name__
    except Exception:
        return f"{type(exc).__name__} (its text cannot be read)"


def _type_name(cls: type) -> str:
    if cls.__module__ == "builtins":
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"


def _formatted(exc: BaseException) -> str:
    try:
        lines = traceback.format_exception(type(exc), exc, exc.__traceback__)
    except Exception:
        return ""
    # Cut line by line: a message of megabytes would push out where it was raised.
    return "".join(line[:_MAX_TEXT_CHARS] for line in lines)[-_MAX_TRACEBACK_CHARS:]
