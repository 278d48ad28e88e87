"""Copies from an accelerator on a side stream.

Runs in: trainer.

The stream loader sees an accelerator through two small protocols, so that the order "copy, record,
wait, hand over" can be tested without one: a stand-in whose copies land only when its event is
waited for turns a missing wait into wrong bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["CopyEvent", "CopyStream", "StreamFactory", "accelerator_stream"]


class CopyEvent(Protocol):
    """Marks the copies issued on a stream so far."""

    def query(self) -> bool:
        """Whether all of them have landed. Does not wait."""

    def synchronize(self) -> None:
        """Return when all of them have landed."""


class CopyStream(Protocol):
    """Issues copies to host memory that land some time later."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy; both tensors must live until an event recorded afterwards is complete."""

    def record(self) -> CopyEvent:
        """An event that completes after every copy issued so far."""


# Gives the stream for a tensor's device, or None where the copy is made by the CPU itself.
StreamFactory = Callable[[torch.Tensor], "CopyStream | None"]


class _SideStream:
    """A stream beside the trainer's current one, so that copies overlap with the file's start."""

    def __init__(self, device: torch.device, module: Any) -> None:
        self._module = module
        self._stream = module.Stream(device=device)
        # What the trainer has queued (an optimizer step) must be done before it is copied.
        self._stream.wait_stream(module.current_stream(device))

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        with self._module.stream(self._stream):
            destination.copy_(source, non_blocking=True)

    def record(self) -> CopyEvent:
        event: CopyEvent = self._module.Event()
        with self._module.stream(self._stream):
            event.record(self._stream)  # type: ignore[attr-defined]
        return event


class _BlockingEvent:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class _BlockingStream:
    """For devices without streams (MPS, XLA): the copy has landed when it returns."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)

    def record(self) -> CopyEvent:
        return _BlockingEvent()


def accelerator_stream() -> StreamFactory:
    """A factory that makes one side stream per device, at its first tensor.

    A save has a factory of its own: a stream waits for the trainer's work as of its creation.
    Nothing of an accelerator's runtime is touched while every tensor is on the CPU.
    """
    streams: dict[torch.device, CopyStream] = {}

    def stream_for(tensor: torch.Tensor) -> CopyStream | None:
        if tensor.is_cpu:
            return None
        device = tensor.device
        stream = streams.get(device)
        if stream is None:
            module = torch.get_device_module(device)
            has_streams = hasattr(module, "Stream") and hasattr(module, "current_stream")
            stream = _SideStream(device, module) if has_streams else _BlockingStream()
            streams[device] = stream
        return stream

    return stream_for
