"""What an exception means, and what of it is told."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

import pytest
from fsspec.exceptions import FSTimeoutError

from mpwriter._faults import error_record, is_transient
from mpwriter._redact import scrub
from mpwriter._storage import locate


def _oserror(number: int, text: str = "") -> OSError:
    return OSError(number, text)


def _client_error(status: int, code: str) -> Exception:
    """As botocore.exceptions.ClientError."""
    error = Exception(f"An error occurred ({code})")
    error.response = {  # type: ignore[attr-defined]
        "ResponseMetadata": {"HTTPStatusCode": status},
        "Error": {"Code": code},
    }
    return error


def _named(name: str, base: type[Exception] = Exception, **attributes: Any) -> Exception:
    return type(name, (base,), attributes)("text")


def _caused(outer: Exception, cause: Exception) -> Exception:
    outer.__cause__ = cause
    return outer


TRANSIENT = [
    TimeoutError(),
    FSTimeoutError(),
    asyncio.TimeoutError(),
    ConnectionResetError(),
    BrokenPipeError(),
    EOFError(),
    _oserror(errno.EAGAIN),
    _oserror(errno.EINTR),
    _oserror(errno.ETIMEDOUT),
    _oserror(errno.ESTALE),
    _oserror(errno.EBUSY, "Please reduce your request rate."),
    _oserror(errno.EIO, "SlowDown"),
    OSError("SlowDown: please try again"),
    socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    _client_error(503, "SlowDown"),
    _client_error(500, "InternalError"),
    _client_error(429, "TooManyRequests"),
    _client_error(400, "RequestTimeout"),
    _caused(_oserror(errno.EIO), _client_error(500, "InternalError")),
    _caused(RuntimeError("Failed to upload block"), _named("ServiceResponseError")),
    _named("HttpResponseError", status_code=503),
    _named("HttpError", code="502"),
    _named("ClientConnectorError", type("ClientConnectionError", (OSError,), {})),
    _named("ReadTimeoutError", type("HTTPClientError", (Exception,), {})),
    _named("SSHException"),
]

PERMANENT = [
    PermissionError(),
    FileNotFoundError("The specified bucket does not exist"),
    IsADirectoryError(errno.EISDIR, ""),
    _oserror(errno.ENOSPC),
    _oserror(errno.EDQUOT),
    _oserror(errno.EROFS),
    _oserror(errno.ENOENT),
    _oserror(errno.EIO),
    _oserror(errno.EINVAL, "bad"),
    ValueError("x"),
    KeyError("x"),
    KeyboardInterrupt(),
    SystemExit(1),
    MemoryError(),
    _client_error(403, "AccessDenied"),
    _client_error(404, "NoSuchBucket"),
    _client_error(501, "NotImplemented"),
    _named("HttpResponseError", status_code=403),
    _named("AuthenticationException", type("SSHException", (Exception,), {})),
    _caused(PermissionError(), TimeoutError()),
    _caused(_oserror(errno.EIO), PermissionError()),
]


@pytest.mark.parametrize("exc", TRANSIENT, ids=lambda exc: repr(exc)[:60])
def test_is_transient_says_yes_when_a_further_try_may_succeed(exc: BaseException) -> None:
    """F06, F12."""
    assert is_transient(exc)
    assert error_record(exc, "/x").transient


@pytest.mark.parametrize("exc", PERMANENT, ids=lambda exc: repr(exc)[:60])
def test_is_transient_says_no_when_it_is_of_no_use(exc: BaseException) -> None:
    """F12."""
    assert not is_transient(exc)


def test_is_transient_ends_when_causes_form_a_circle() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_transient(first)


def test_error_record_tells_everything_of_an_oserror() -> None:
    """A05."""
    try:
        raise OSError(errno.ENOSPC, "No space left on device", "/ckpt/.x.tmp")
    except OSError as exc:
        record = error_record(exc, "/ckpt/x")
    assert record.type_name == "OSError"
    assert record.errno == errno.ENOSPC
    assert record.path == "/ckpt/x"
    assert "No space left on device" in record.text
    assert "test_error_record_tells_everything" in record.traceback
    assert not record.transient


def test_error_record_says_where_it_was_raised_when_the_message_is_huge() -> None:
    """Some libraries quote a whole body: of a message of megabytes the beginning is kept."""
    try:
        raise RuntimeError("denied: " + "x" * 10_000_000)
    except RuntimeError as exc:
        record = error_record(exc, "/ckpt/x")
    assert record.text.startswith("denied: xx")
    assert record.traceback.startswith("Traceback")
    assert "test_error_record_says_where" in record.traceback
    assert len(record.text) + len(record.traceback) < 50_000


@pytest.mark.parametrize("status", [401, 403])
def test_error_record_says_eacces_when_the_service_forbids_it(status: int) -> None:
    """Where the client has no PermissionError for it, as that of Azure: it says so in a cause."""
    forbidden = Exception("AuthorizationPermissionMismatch")
    forbidden.status_code = status  # type: ignore[attr-defined]
    record = error_record(_caused(RuntimeError("Failed to upload block"), forbidden), "/x")
    assert record.errno == errno.EACCES and not record.transient


def test_error_record_finds_the_errno_of_a_cause() -> None:
    """A16: a writer that hides the number behind an error of its own."""
    try:
        try:
            raise OSError(errno.EDQUOT, "quota")
        except OSError as exc:
            raise RuntimeError("unexpected pos 64 vs 0") from exc
    except RuntimeError as exc:
        record = error_record(exc, None)
    assert record.type_name == "RuntimeError"
    assert record.errno == errno.EDQUOT
    assert "unexpected pos" in record.text
    assert "Disk quota exceeded" in record.text
    assert record.path is None


def test_error_record_finds_an_errno_when_the_class_alone_says_it() -> None:
    """s3fs raises PermissionError with the service's text and no number."""
    record = error_record(_caused(RuntimeError("x"), PermissionError("bad signature")), "/x")
    assert record.errno == errno.EACCES
    assert error_record(FileNotFoundError("no bucket"), "/x").errno == errno.ENOENT


def test_error_record_ignores_a_context_that_was_suppressed() -> None:
    error = RuntimeError("other")
    error.__context__ = OSError(errno.ENOSPC, "full")
    assert error_record(error, None).errno == errno.ENOSPC
    error.__suppress_context__ = True
    assert error_record(error, None).errno is None


def test_error_record_survives_an_exception_that_cannot_be_shown() -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    record = error_record(SilentError(), "/x")
    assert "SilentError" in record.type_name
    assert "SilentError" in record.text
    assert error_record(ValueError(), "/x").text == "ValueError"
    assert len(error_record(ValueError("x" * 10**6), "/x").text) < 10_000


def test_error_record_names_the_option_when_parts_run_out() -> None:
    """F03."""
    text = "Part number must be an integer between 1 and 10000, inclusive"
    assert "default_block_size" in error_record(OSError(errno.EINVAL, text), "/x").text


def test_error_record_holds_no_credentials() -> None:
    secret = "wJalrXUtnFEMI"
    fs = locate(
        "dir::file:///tmp/a", {"file": {"secret": secret, "nested": {"sas_token": secret[::-1]}}}
    ).fs
    text = f"GET sftp://me:pw@host/a?sig={secret}&x=1 with {secret} and {secret[::-1]}"
    try:
        raise ValueError(text)
    except ValueError as exc:
        record = error_record(exc, f"sftp://me:pw@host/{secret}", fs=fs)
    for shown in (record.text, record.traceback, record.path or ""):
        assert secret not in shown
        assert secret[::-1] not in shown
        assert "me:pw" not in shown
    assert "x=1" in record.text


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("no secret at /a/b@c: x=1", "no secret at /a/b@c: x=1"),
        ("https://host/a?X-Amz-Signature=ab12&b=1", "https://host/a?X-Amz-Signature=***&b=1"),
        ("https://me@host/a", "https://***@host/a"),
        ("password=abc, user=me", "password=***, user=me"),
        ("key 'layers.0.key=3' of shape", "key 'layers.0.key=3' of shape"),
    ],
)
def test_scrub_strikes_out_credentials_only(text: str, scrubbed: str) -> None:
    assert scrub(text) == scrubbed
