"""The device that `scripts/device_check.py` checks, and what its checks share.

Runs in: trainer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from mpwriter._pinning import CudaPinner, Pinner
from mpwriter._streams import StreamFactory, accelerator_stream
from mpwriter.bench.table import render_table

__all__ = ["Result", "Rig", "State", "checked", "make_state", "map_tensors", "results_table"]

# Products of such matrices keep a GPU busy for longer than a save takes to begin.
_QUEUED_WIDTH, _NUM_QUEUED = 8192, 40

State = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    check: str
    held: bool
    figure: str = ""


@dataclass
class Rig:
    """The device under check; a test puts a stand-in here.

    Attributes:
        device: where the tensors are.
        directory: for checkpoints.
        nbytes: size of the copies.
        stream_for: makes the arena's copy streams.
        pinner: locks pages.
        plain_memory: a page-locked tensor of so many bytes.
    """

    device: str
    directory: Path
    nbytes: int
    stream_for: Callable[[], StreamFactory] = accelerator_stream
    pinner: Pinner = field(default_factory=CudaPinner)
    plain_memory: Callable[[int], torch.Tensor] = lambda nbytes: torch.empty(
        nbytes, dtype=torch.uint8, pin_memory=True
    )

    def fresh_path(self) -> str:
        """Where no checkpoint is."""
        return tempfile.mkdtemp(dir=self.directory)

    def queue_work(self) -> None:
        """Keep the current stream busy, and return before it is done."""
        if self.device == "cpu":
            return
        matrix = torch.ones(_QUEUED_WIDTH, _QUEUED_WIDTH, device=self.device)
        for _ in range(_NUM_QUEUED):
            matrix = matrix @ matrix * 1e-4

    @contextmanager
    def other_stream(self) -> Iterator[None]:
        """A stream beside the current one, which waits for it afterwards."""
        if self.device == "cpu":
            yield
            return
        module: Any = torch.get_device_module(self.device)
        stream = module.Stream()
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            yield
        module.current_stream().wait_stream(stream)


def make_state(device: str, seed: int = 0) -> State:
    """Tensors of many kinds, some MiB."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(3, 256, 1024, generator=generator).to(device)
    return {
        "model": {
            "float32": noise.clone(),
            "bfloat16": noise.bfloat16(),
            "float8": noise.to(torch.float8_e4m3fn),
            "bool": noise > 0,
            "complex": torch.complex(noise[0], noise[1]),
            "transposed": noise[0].t(),
            "strided": noise[:, ::3, 1:500:2],
            "empty": noise[:0],
            "small": [noise[0, n, :7].clone() for n in range(200)],
        },
        "step": torch.tensor(seed, device=device),
        "name": f"state {seed}",
    }


def map_tensors(state: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same structure with `change(tensor)` for every tensor."""
    if isinstance(state, torch.Tensor):
        return change(state)
    if isinstance(state, dict):
        return {name: map_tensors(value, change) for name, value in state.items()}
    if isinstance(state, list):
        return [map_tensors(value, change) for value in state]
    return state


def checked(label: str, check: Callable[[], str]) -> Result:
    """Run one check; what it raises is its result."""
    try:
        return Result(label, True, check())
    except (Exception, CheckpointException) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return Result(label, False, f"{type(error).__name__}: {first}"[:100])


def results_table(results: Sequence[Result]) -> str:
    """A line a result."""
    cells = [[r.check, "held" if r.held else "FAILED", r.figure] for r in results]
    return render_table(["check", "result", "figure"], cells)
