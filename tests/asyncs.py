"""Asynchronous saves, for tests and for the trainers that they start."""

from __future__ import annotations

import os
import threading
import warnings
from concurrent.futures import Future
from inspect import signature
from typing import Any

import torch.distributed.checkpoint as dcp

from mpwriter import MPFsspecWriter
from mpwriter._arena import get_arena
from tests.trainers import wait_until

__all__ = ["ALONE", "async_save", "leased_bytes", "save_threads", "settled", "wait_for_saves"]

# torch 2.7 has no such option: it looks whether there is a process group.
ALONE = {"no_dist": True} if "no_dist" in signature(dcp.async_save).parameters else {}
# A hang is a failure; nothing here waits longer.
WATCHDOG_S = 50.0


def async_save(
    state: dict[str, Any],
    path: str | os.PathLike[str] | None = None,
    *,
    writer: Any = None,
    num_workers: int = 2,
    dcp_options: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """`dcp.async_save` in this process alone.

    Args:
        path: of a writer made for it; with `writer`, the checkpoint id.
        writer: in place of a new one.
        dcp_options: of `dcp.async_save`.
        options: of the new writer; files are not synced unless told so.
    """
    of_dcp = {**ALONE, **(dcp_options or {})}
    if writer is None:
        assert path is not None
        options.setdefault("sync_files", False)
        writer = MPFsspecWriter(path, num_workers=num_workers, **options)
    elif path is not None:
        of_dcp["checkpoint_id"] = path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dcp.async_save(state, storage_writer=writer, **of_dcp)


def settled(future: Future[Any]) -> BaseException | None:
    """Wait for a save and for what its thread has held; its exception stays in the future."""
    error = future.exception(WATCHDOG_S)
    wait_for_saves()
    return error


def wait_for_saves() -> None:
    """Until every save is over, and nothing is leased by one.

    A thread is listed no more before it has let go of its own variables, so this looks at both.
    """
    wait_until(lambda: not save_threads() and not leased_bytes(), _story)


def save_threads() -> list[threading.Thread]:
    """The threads in which torch saves."""
    return [t for t in threading.enumerate() if t.name.startswith("AsyncCheckpointExecutor")]


def _story() -> str:
    return f"saves: {save_threads()}, leased: {leased_bytes()} bytes"


def leased_bytes() -> int:
    """What is leased in the arena of this process."""
    return get_arena().stats().leased_bytes
