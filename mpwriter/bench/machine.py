"""What a figure must be read with: the machine, the versions, the command.

Runs in: trainer. Everything here is best effort: what cannot be found out is left out.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit, urlunsplit

import torch

from mpwriter.bench.table import format_bytes

__all__ = ["describe_load", "describe_machine", "redact_command", "redact_url"]

_HIDDEN = "***"
_SECRET_OPTION = "--storage-option"
_URL_OPTION = "--url"


def describe_machine(local_path: str | None) -> dict[str, str]:
    """What to print above a table, in that order.

    Args:
        local_path: a directory on the filesystem that is measured; None if it is remote.
    """
    facts = {
        "machine": f"{_cpu_model()}, {_cores()}, {_memory()}",
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load": describe_load(),
        "versions": ", ".join(
            [f"python {platform.python_version()}", f"torch {torch.__version__}"]
            + [f"{name} {version}" for name, version in _package_versions()]
        ),
    }
    if local_path is not None:
        facts["filesystem"] = _filesystem(local_path)
    return {name: text for name, text in facts.items() if text}


def redact_url(url: str) -> str:
    """`url` without user info and query, where credentials may stand."""
    if "://" not in url:
        return url
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def redact_command(argv: Sequence[str]) -> str:
    """The command line for print and JSON, without the values of storage options."""
    shown: list[str] = []
    previous = ""
    for argument in argv:
        option, equals, value = argument.partition("=")
        if previous == _SECRET_OPTION:
            shown.append(option + equals + (_HIDDEN if equals else ""))
        elif option == _SECRET_OPTION and equals:
            name = value.partition("=")[0]
            shown.append(f"{option}={name}={_HIDDEN}")
        elif previous == _URL_OPTION:
            shown.append(redact_url(argument))
        elif option == _URL_OPTION and equals:
            shown.append(f"{option}={redact_url(value)}")
        else:
            shown.append(argument)
        previous = argument
    return shlex.join(shown)


def _cores() -> str:
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    return f"{usable} of {total} cores" if usable != total else f"{total} cores"


def _cpu_model() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> str:
    sizes = {}
    for line in _lines("/proc/meminfo"):
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) * 1024
    if "MemTotal" not in sizes:
        return "memory unknown"
    available = format_bytes(sizes.get("MemAvailable"))
    return f"{format_bytes(sizes['MemTotal'])} memory ({available} available)"


def describe_load() -> str:
    """The load average; figures taken beside other work are worth less, and should say so."""
    try:
        return ", ".join(f"{load:.2f}" for load in os.getloadavg()) + " (1, 5, 15 minutes)"
    except OSError:
        return ""


def _package_versions() -> list[tuple[str, str]]:
    found = []
    for name in ("mpwriter", "fsspec", "s3fs", "gcsfs", "adlfs", "s3torchconnector"):
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _filesystem(path: str) -> str:
    """Type and device of the mount that holds `path`."""
    path = os.path.realpath(path)
    best = ("", "unknown")
    for line in _lines("/proc/self/mounts"):
        device, mount, kind = line.split()[:3]
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best[0]):
            best = (mount, f"{kind} on {device}")
    return best[1]


def _lines(path: str) -> list[str]:
    if sys.platform != "linux":
        return []
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []
