"""What one step of the soak does: what is saved where and how, and what goes wrong meanwhile.

All of it follows from the seed of the run and the number of the step, so that the ranks and
whoever checks them need to tell each other nothing but the number.
"""

from __future__ import annotations

import errno
import random
import signal
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["NUM_RANKS", "Fault", "PlannedSave", "Step", "step_of", "values_of", "whole_state"]

NUM_RANKS = 2

# Places that are saved to again and again; every other place is used once.
_KEPT_PLACES = [f"kept{number}" for number in range(5)]

# What a worker does to a file, in this order, by the fake filesystem (see tests/fakes).
_STEPS = {
    "fault": ("open", "write", "flush", "close", "mv"),
    "objectlike": ("open", "write", "create_upload", "upload_part", "close", "commit", "cp"),
    "commitlike": ("open", "write", "create_upload", "upload_part", "close", "commit"),
    "closelike": ("open", "write", "create_upload", "upload_part", "close", "commit"),
}

# How often each kind of fault is drawn.
_KINDS = {
    "none": 35,
    "killed at": 12,
    "killed at any time": 10,
    "exits at": 3,
    "crashes at": 2,
    "disk": 10,
    "transient": 8,
    "slow": 6,
    "short writes": 3,
    "writes that lie": 2,
    "blocked": 3,
    "exception": 4,
    "bad value": 3,
    "bad handler": 3,
}
# Of these a save must not even notice, as far as its outcome goes.
_HARMLESS = {"none", "transient", "slow", "short writes"}

_DISK_ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES, errno.EROFS)
_TRANSIENT_ERRORS = (errno.ETIMEDOUT, errno.ECONNRESET, errno.EBUSY, errno.EPIPE)
_EXCEPTIONS = ("ValueError", "RuntimeError", "MemoryError", "AttributeError", "UnicodeError")

# A retried file fails at most as often as this.
RETRIES = 3

_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)
_NUMELS = (0, 1, 7, 1000, 30_000, 150_000)


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Attributes:
        kind: one of `_KINDS`.
        rank: where.
        rule: for `FaultPlan.add`, where the filesystem is at fault.
        event: of the handler that raises.
        delay_s: from the begin of the save until a worker is killed, wherever it is.
    """

    kind: str
    rank: int
    rule: dict[str, Any] = field(default_factory=dict)
    event: str = ""
    delay_s: float = 0.0

    @property
    def must_succeed(self) -> bool:
        """Whether the save has to be completed all the same."""
        return self.kind in _HARMLESS

    @property
    def may_follow_the_swap(self) -> bool:
        """Whether the save may fail with the new checkpoint in place: only its word was lost."""
        return self.kind == "killed at any time" or self.rule.get("name") == ".metadata"


@dataclass(frozen=True)
class PlannedSave:
    """One save of a step; `key` is the seed of its values."""

    key: str
    place: str
    protocol: str
    is_async: bool


@dataclass(frozen=True)
class Step:
    """One save, or two at the same time.

    Attributes:
        options: of every rank's writer.
    """

    number: int
    saves: tuple[PlannedSave, ...]
    fault: Fault
    options: dict[str, Any]


def step_of(seed: int, number: int) -> Step:
    """Draw a step."""
    rng = random.Random(f"{seed}/{number}")
    protocol = rng.choice([*_STEPS, "fault", "fault"])
    fault = _fault(rng, protocol)
    modes = rng.choice([(False,), (False,), (True,), (True, False)])
    places = rng.sample(_KEPT_PLACES, len(modes))
    if rng.random() < 0.3:
        places[0] = f"fresh{number}"
    saves = tuple(
        PlannedSave(f"{seed}/{number}/{place}", place, protocol, is_async)
        for place, is_async in zip(places, modes)
    )
    options = {
        "num_workers": rng.choice([1, 2, 2, 3]),
        "per_worker_copy_ahead": rng.choice([256 << 10, 1 << 20, 64 << 20]),
        "single_file_per_rank": rng.random() < 0.8,
        "sync_files": rng.random() < 0.2,
        "retries": RETRIES,
        "timeout_s": 1.5 if fault.kind == "blocked" else 30.0,
    }
    return Step(number, saves, fault, options)


def _fault(rng: random.Random, protocol: str) -> Fault:
    (kind,) = rng.choices(list(_KINDS), list(_KINDS.values()))
    rank = rng.randrange(NUM_RANKS)
    if kind == "bad handler":
        events = ["save_started", "file_written", "shards_written"]
        return Fault(kind, rank, event=rng.choice(events))
    if kind == "killed at any time":
        return Fault(kind, rank, delay_s=rng.choice([0.0, rng.uniform(0, 0.15)]))
    action = _action(rng, kind)
    if not action:
        return Fault(kind, rank)
    op = "write" if "short" in action or "lie" in action else rng.choice(_STEPS[protocol])
    names = [f"__{rank}_*", f"__{rank}_0.*", f"__{rank}_1.*", *[".metadata"] * (rank == 0)]
    rule = {"op": op, "name": rng.choice(names), "times": _times(rng, kind), **action}
    if op == "write":
        rule.update(rng.choice([{}, {"nth": rng.randint(1, 3)}, {"after_bytes": 50_000}]))
    elif kind in ("killed at", "exits at", "disk", "transient"):
        # Between a step and the word of it.
        rule["after"] = rng.random() < 0.3
    return Fault(kind, rank, rule)


def _action(rng: random.Random, kind: str) -> dict[str, Any]:
    actions: dict[str, dict[str, Any]] = {
        "killed at": {"signal": int(signal.SIGKILL)},
        "crashes at": {"signal": int(signal.SIGSEGV)},
        "exits at": {"exit_code": rng.choice([0, 1, 3])},
        "disk": {"errno": rng.choice(_DISK_ERRORS)},
        "transient": {"errno": rng.choice(_TRANSIENT_ERRORS)},
        "slow": {"sleep_s": rng.choice([0.02, 0.2])},
        "short writes": {"short": rng.choice([20_000, 65_536])},
        "writes that lie": {"lie": 1000},
        "blocked": {"block": True},
        "exception": {"raises": rng.choice(_EXCEPTIONS)},
    }
    return actions.get(kind, {})


def _times(rng: random.Random, kind: str) -> int:
    if kind in ("killed at", "exits at", "crashes at"):
        return 1
    if kind == "transient":
        return rng.randint(1, RETRIES)
    return rng.choice([1, 5])


# -- values ---------------------------------------------------------------------------------


def values_of(save: PlannedSave, rank: int) -> dict[str, Any]:
    """The state of one rank: its own values, and some that all ranks have."""
    own = _some_values(f"{save.key}/{rank}", f"rank{rank}")
    return {**own, **_some_values(f"{save.key}/shared", "shared")}


def whole_state(save: PlannedSave) -> dict[str, Any]:
    """The state that the checkpoint of a save holds."""
    state: dict[str, Any] = {}
    for rank in range(NUM_RANKS):
        state.update(values_of(save, rank))
    return state


def _some_values(seed: str, prefix: str) -> dict[str, Any]:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    state: dict[str, Any] = {f"{prefix}.note": {"seed": seed, "number": rng.random()}}
    for number in range(rng.choice([0, 1, 3, 8, 25])):
        state[f"{prefix}.t{number}"] = _tensor(rng, generator)
    return state


def _tensor(rng: random.Random, generator: torch.Generator) -> torch.Tensor:
    dtype, numel = rng.choice(_DTYPES), rng.choice(_NUMELS)
    nbytes = numel * dtype.itemsize
    payload = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        return payload > 127
    tensor = payload.view(dtype)
    shapes: list[tuple[int, ...]] = [(numel,), (1, numel)]
    if numel == 1:
        shapes.append(())
    if numel % 10 == 0 and numel:
        shapes.append((10, numel // 10))
    tensor = tensor.reshape(rng.choice(shapes))
    return tensor.t() if tensor.dim() == 2 and rng.random() < 0.3 else tensor
