"""The state dicts that the benchmark saves.

Runs in: trainer. Pure but for the memory it fills.

| name  | what it stands for                                       | full size                    |
|-------|----------------------------------------------------------|------------------------------|
| large | bandwidth: few large tensors                             | 1 GiB in 32 float32 tensors  |
| medium | bandwidth of a far store                                | 128 MiB in 32 tensors        |
| small | cost per item                                            | 20,000 tensors of 4 KiB      |
| model | a training job: GPT-2 (124M parameters) with AdamW state | 592 tensors, 1.39 GiB        |
| tiny  | fixed cost of a save                                     | one scalar                   |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mpwriter.bench.ranks import ALONE, Ranks

__all__ = [
    "STATE_NAMES",
    "BenchState",
    "build_state",
    "gpt2_shapes",
    "local_part",
    "measure_state",
    "nested",
    "on_device",
]

STATE_NAMES = ("large", "medium", "small", "model", "tiny")
_FLOAT32_BYTES = 4
_NOISE_ELEMENTS = 2**20


@dataclass(frozen=True)
class BenchState:
    """A state dict with what is known about it.

    Attributes:
        name: one of STATE_NAMES, or the caller's own.
        state_dict: what `dcp.save` gets.
        num_tensors: tensors in it, at any depth.
        nbytes: bytes of these tensors; over ranks, of this rank's parts of them.
    """

    name: str
    state_dict: dict[str, Any] = field(repr=False)
    num_tensors: int
    nbytes: int

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor, in the order of the dict; over ranks, this rank's part of each."""
        return map(local_part, _tensors_of(self.state_dict))


def build_state(name: str, *, quick: bool = False, ranks: Ranks = ALONE) -> BenchState:
    """Make the state `name` anew, on the CPU, filled with noise.

    Args:
        name: one of STATE_NAMES.
        quick: a small one of the same shape, for a run of seconds.
        ranks: among which it is divided.

    Raises:
        ValueError: there is no such state.
    """
    builders = {"large": _large, "medium": _medium, "small": _small, "model": _model, "tiny": _tiny}
    if name not in builders:
        raise ValueError(f"no state is called {name!r}; there are {', '.join(STATE_NAMES)}")
    return measure_state(name, builders[name](quick, _Filler(ranks)))


def measure_state(name: str, state_dict: dict[str, Any]) -> BenchState:
    """Count the tensors of `state_dict` and their bytes.

    One that is not divided is stored once: its bytes count on the first rank.
    """
    tensors = list(_tensors_of(state_dict))
    counted = tensors if _on_first_rank() else [t for t in tensors if isinstance(t, DTensor)]
    parts = [local_part(tensor) for tensor in counted]
    nbytes = sum(part.numel() * part.element_size() for part in parts)
    return BenchState(name, state_dict, len(tensors), nbytes)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What of `tensor` is in this process; itself where it is not divided."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def nested(state: BenchState) -> BenchState:
    """The state as trainers save it, `{"model": {...}}`; unchanged where it is nested already."""
    if all(isinstance(member, Mapping) for member in state.state_dict.values()):
        return state
    return measure_state(state.name, {"model": state.state_dict})


def on_device(state: BenchState, device: str) -> BenchState:
    """The state with its tensors on `device`; itself where that is the CPU."""
    if device == "cpu":
        return state
    return measure_state(state.name, _moved(state.state_dict, device))


def gpt2_shapes(
    *,
    num_layers: int = 12,
    width: int = 768,
    vocabulary: int = 50257,
    context: int = 1024,
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of GPT-2's parameters; the defaults are those of the 124M one.

    The head is tied to `wte` and has no entry of its own: a second key for the same storage
    would be written twice by the stock writers and once by ours, which is another comparison.

    Source: Radford et al. 2019; names as in the published checkpoint (weights of its linear
    layers are stored input by output).
    """
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (vocabulary, width),
        "wpe.weight": (context, width),
    }
    for layer in range(num_layers):
        for part, shape in _block_shapes(width).items():
            shapes[f"h.{layer}.{part}.weight"] = shape
            shapes[f"h.{layer}.{part}.bias"] = shape[-1:]
    shapes["ln_f.weight"] = shapes["ln_f.bias"] = (width,)
    return shapes


def _block_shapes(width: int) -> dict[str, tuple[int, ...]]:
    return {
        "ln_1": (width,),
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "ln_2": (width,),
        "mlp.c_fc": (width, 4 * width),
        "mlp.c_proj": (4 * width, width),
    }


class _Filler:
    """Makes tensors of noise that differ from one another, faster than a random generator."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        generator = torch.Generator().manual_seed(0)
        self._noise = torch.randn(_NOISE_ELEMENTS, generator=generator)
        self._num_made = 0

    def tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        flat = torch.empty(math.prod(shape))
        for start in range(0, flat.numel(), _NOISE_ELEMENTS):
            part = flat[start : start + _NOISE_ELEMENTS]
            part.copy_(self._noise[: part.numel()])
        self._num_made += 1
        divided = self._ranks.divide(flat.view(shape))
        part = local_part(divided).view(-1)
        if part.numel():
            part[0] = self._num_made * self._ranks.num_ranks + self._ranks.rank
        return divided


def _large(quick: bool, filler: _Filler) -> dict[str, Any]:
    return _layers(32 * 2**20 if quick else 2**30, filler)


def _medium(quick: bool, filler: _Filler) -> dict[str, Any]:
    return _layers(8 * 2**20 if quick else 128 * 2**20, filler)


def _layers(total_bytes: int, filler: _Filler) -> dict[str, Any]:
    num_tensors = 32
    rows = total_bytes // num_tensors // _FLOAT32_BYTES // 1024
    return {f"layer_{i:02d}.weight": filler.tensor((rows, 1024)) for i in range(num_tensors)}


def _small(quick: bool, filler: _Filler) -> dict[str, Any]:
    return {f"tensor_{i:05d}": filler.tensor((1024,)) for i in range(500 if quick else 20_000)}


def _model(quick: bool, filler: _Filler) -> dict[str, Any]:
    """As `get_state_dict` of a model and its AdamW gives it."""
    shapes = (
        gpt2_shapes(num_layers=2, width=64, vocabulary=1000, context=128)
        if quick
        else gpt2_shapes()
    )
    moments = {
        name: {
            "step": torch.tensor(1000.0),
            "exp_avg": filler.tensor(shape),
            "exp_avg_sq": filler.tensor(shape),
        }
        for name, shape in shapes.items()
    }
    group = {"lr": 6e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    return {
        "model": {name: filler.tensor(shape) for name, shape in shapes.items()},
        "optim": {"state": moments, "param_groups": [{**group, "params": list(shapes)}]},
    }


def _tiny(quick: bool, filler: _Filler) -> dict[str, Any]:
    del quick, filler  # there is nothing smaller
    return {"step": torch.tensor(1000)}


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: _moved(member, device) for name, member in value.items()}
    return value


def _on_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for member in value.values():
            yield from _tensors_of(member)
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _tensors_of(member)
