"""The arguments of a writer or reader, checked once.

Runs in: trainer.
"""

from __future__ import annotations

import difflib
import inspect
import math
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpwriter._compat import StreamTransformExtension
from mpwriter._report import EventHandler

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "STOCK_NAMES",
    "WriterOptions",
    "at_least",
    "check_storage_options",
    "take_stock_name",
]

# The longest a worker may be silent where the user sets no timeout_s. Ten minutes: longer than
# the back-off of object-store clients and an fsync on a loaded shared disk, shorter than the
# watchdogs of collective libraries that would end the job instead (NCCL's default: 10 minutes).
DEFAULT_TIMEOUT_S = 600.0

# What the stock FsspecWriter calls some of our options.
STOCK_NAMES = {
    "num_workers": "thread_count",
    "per_worker_copy_ahead": "per_thread_copy_ahead",
}

# How alike a keyword must be to one of ours to be taken for a slip of the pen.
_SIMILARITY = 0.8


@dataclass(frozen=True)
class WriterOptions:
    """What `MPFsspecWriter` was told, with defaults filled in."""

    single_file_per_rank: bool
    sync_files: bool
    num_workers: int
    copy_ahead_bytes: int
    overwrite: bool
    extensions: Sequence[StreamTransformExtension]
    safetensors: bool
    budget_bytes: int | None
    timeout_s: float
    retries: int
    progress: bool
    background_priority: bool
    worker_cores: tuple[int, ...] | None
    event_handler: EventHandler | None

    def __post_init__(self) -> None:
        """Refuse what would only fail in the middle of a save.

        Raises:
            ValueError, TypeError: names the option.
        """
        if not isinstance(self.timeout_s, (int, float)) or not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s must be a positive number, got {self.timeout_s!r}")
        budget = self.budget_bytes
        if budget is not None and (not isinstance(budget, int) or budget < 0):
            raise ValueError(f"staging_budget_bytes must be a number of bytes, got {budget!r}")
        if self.event_handler is not None and not callable(self.event_handler):
            raise TypeError(f"event_handler must be callable, got {self.event_handler!r}")
        if self.worker_cores is not None:
            unusable = set(self.worker_cores) - os.sched_getaffinity(0)
            if unusable or not self.worker_cores:
                raise ValueError(f"worker_cores must be cores of this process, got {unusable}")

    @property
    def descriptors(self) -> list[str]:
        """Names of the transforms in the order a reader undoes them."""
        return [extension.get_descriptor() for extension in reversed(self.extensions)]

    @property
    def pickled_extensions(self) -> bytes | None:
        return pickle.dumps(tuple(self.extensions)) if self.extensions else None

    @property
    def extensions_refusal(self) -> str | None:
        """Why no worker can run the extensions; None when one can try."""
        for extension in self.extensions:
            kind = type(extension)
            if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
                return f"extension {kind.__qualname__} is not defined in an importable module"
        try:
            pickle.dumps(tuple(self.extensions))
        except Exception as exc:
            return f"the extensions cannot be pickled: {type(exc).__name__}: {exc}"
        return None


def take_stock_name(options: dict[str, Any], name: str, value: Any, default: Any) -> Any:
    """The value of option `name`, which may have been given by its stock name among `options`.

    Args:
        value: as given by our name; default: what that is where nothing was.

    Raises:
        TypeError: both were given.
    """
    stock_name = STOCK_NAMES[name]
    if stock_name not in options:
        return value
    if value != default:
        raise TypeError(f"{name} and {stock_name} are the same option: give one of them")
    return options.pop(stock_name)


def at_least(least: int, value: int, name: str) -> int:
    """`value`.

    Raises:
        ValueError: it is no integer, or less than that.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return value


def check_storage_options(
    options: Mapping[str, Any], filesystem: type, known: Iterable[str]
) -> None:
    """Refuse a misspelt option of ours before it is taken for a storage option.

    Raises:
        TypeError: a keyword is close to one of `known` and no parameter of the filesystem.
    """
    parameters = _parameters(filesystem)
    for name in options:
        if name in parameters:
            continue
        close = difflib.get_close_matches(name, known, n=1, cutoff=_SIMILARITY)
        if close:
            raise TypeError(
                f"unexpected keyword argument {name!r}: did you mean {close[0]!r}? "
                f"({filesystem.__name__} has no option of that name)"
            )


def _parameters(filesystem: type) -> set[str]:
    names: set[str] = set()
    for kind in filesystem.__mro__:
        if "__init__" in vars(kind):
            names.update(inspect.signature(vars(kind)["__init__"]).parameters)
    return names
