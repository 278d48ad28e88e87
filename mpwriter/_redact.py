"""Keeps credentials out of messages and logs.

Runs in: both. Torch-free.
"""

from __future__ import annotations

import re
from typing import Any

from mpwriter._filesystems import attributes_of

__all__ = ["scrub", "secrets_of"]

# Bounded repeats: these run over whole tracebacks.
_USER_INFO = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]{0,30}://)[^\s/@'\"]+@")
_SECRET_PARAMETER = re.compile(
    r"([?&;,\s]|\b)([\w.\-]{0,40}(?:signature|sig|token|secret|passw(?:or)?d|account_?key|credential)"
    r"[\w.\-]{0,40})=[^&\s'\";,]+",
    re.IGNORECASE,
)
_SECRET_OPTION = re.compile(r"key|secret|token|pass|sas|credential|connection_string", re.I)


def scrub(text: str, secrets: tuple[str, ...] = ()) -> str:
    """Strike user info of URLs, signed parameters and `secrets` out of `text`."""
    for secret in secrets:
        text = text.replace(secret, "***")
    text = _USER_INFO.sub(r"\1***@", text)
    return _SECRET_PARAMETER.sub(r"\1\2=***", text)


def secrets_of(fs: Any) -> tuple[str, ...]:
    """Values of the storage options that an error's text may quote, longest first."""
    found: list[str] = []
    while fs is not None:
        attributes = attributes_of(fs)
        _gather_secrets(attributes.get("storage_options"), found)
        fs = attributes.get("fs")  # what a wrapper such as dir:: wraps
    return tuple(sorted(found, key=len, reverse=True))


def _gather_secrets(options: Any, found: list[str]) -> None:
    if not isinstance(options, dict):
        return
    for name, value in options.items():
        if isinstance(value, dict):
            _gather_secrets(value, found)
        elif isinstance(value, str) and len(value) >= 6 and _SECRET_OPTION.search(str(name)):
            found.append(value)
