"""Page-locks shared memory for CUDA, so that copies into it run at full speed in the background.

Runs in: trainer. Touches CUDA only where the program has initialized it already.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch

__all__ = ["CudaPinner", "Pinner"]

logger = logging.getLogger(__name__)

# Source: torch/distributed/_state_dict_utils.py registers its shared buffers with the same flag,
# cudaHostRegisterPortable: pinned for every device's context.
_PORTABLE = 1

_cuda: Any = torch.cuda  # its functions have no annotations in some versions of torch


class Pinner(Protocol):
    """What locks and unlocks pages; a test gives the arena one of its own."""

    def register(self, address: int, nbytes: int) -> bool | None:
        """Lock the pages; None: there is nothing to lock them for, False: it failed."""

    def unregister(self, address: int) -> None:
        """Unlock what `register` locked."""


class CudaPinner:
    """Registers memory with the CUDA driver. Never raises: unpinned memory is slower, not wrong."""

    def register(self, address: int, nbytes: int) -> bool | None:
        if not _cuda.is_available() or not _cuda.is_initialized():
            return None
        try:
            error = int(_cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
        except RuntimeError as exc:
            logger.warning("cannot page-lock %d bytes of staging memory: %s", nbytes, exc)
            return False
        if error:
            logger.warning("cannot page-lock %d bytes of staging memory: CUDA %d", nbytes, error)
        return not error

    def unregister(self, address: int) -> None:
        try:
            error = int(_cuda.cudart().cudaHostUnregister(address))
        except RuntimeError as exc:
            logger.warning("cannot unlock staging memory: %s", exc)
            return
        if error:
            logger.warning("cannot unlock staging memory: CUDA error %d", error)
