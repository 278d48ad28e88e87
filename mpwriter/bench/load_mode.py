"""Loads: of a checkpoint that lies ready, into memory that is there.

Runs in: trainer.

Everybody loads the same checkpoint, in rounds as in `mpwriter.bench.timing`. On a local disk it is
in the page cache: what is compared is the readers, not the disk.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from mpwriter import FsspecReader, MPFsspecWriter
from mpwriter._compat import StockFsspecReader
from mpwriter.bench.options import Options
from mpwriter.bench.peer import PEER, peer_environment, peer_missing, peer_reader, serves
from mpwriter.bench.places import Place
from mpwriter.bench.progress import ProgressBar
from mpwriter.bench.states import BenchState, build_state, local_part
from mpwriter.bench.verify import differences, load_into

__all__ = ["LOADERS", "LoadFigures", "LoadSample", "measure_loads"]

_NUM_WORKERS = 2  # that save what is loaded

# Reads of the plain loader; the pieces of a tensor.
_PLAIN_FILE = "plain"


@dataclass(frozen=True)
class LoadSample:
    """One load.

    Attributes:
        wall_s: seconds the caller waited.
        cpu_s: CPU seconds of this process, all threads.
    """

    wall_s: float
    cpu_s: float


@dataclass
class LoadFigures:
    """Everything measured with one state, by the label of who loads."""

    name: str
    num_tensors: int
    nbytes: int
    samples: dict[str, list[LoadSample]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # who cannot take part, and why
    ranks: Sequence[LoadFigures] = ()  # under torchrun, each one's own; the rest is the job's


class _Nothing(FsspecReader):
    """Reads the metadata, and nothing else: DCP's own share of a load."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done


# Label, family of the options, what makes the reader; None: the plain one, which is no reader.
LOADERS: tuple[tuple[str, str, Callable[[str, dict[str, Any]], StorageReader] | None], ...] = (
    ("FsspecReader (ours)", "ours", lambda url, options: FsspecReader(url, **options)),
    ("ours, verify=False", "ours", lambda url, options: FsspecReader(url, verify=False, **options)),
    ("stock FsspecReader", "fsspec", lambda url, options: StockFsspecReader(url, **options)),
    ("FileSystemReader", "filesystem", lambda url, options: FileSystemReader(url)),
    (PEER, PEER, peer_reader),
    ("plain readinto", "plain", None),
    ("reads nothing", "planning", lambda url, options: _Nothing(url, **options)),
)


def measure_loads(
    options: Options, place: Place, report: Callable[[LoadFigures], None]
) -> list[LoadFigures]:
    """Load every state with everybody.

    Args:
        options: what to measure.
        place: where the checkpoints are saved first, with MPFsspecWriter.
        report: called with a state's figures as soon as they are complete.

    Raises:
        Whatever a reader raises; RuntimeError when `verify` finds a difference.
    """
    local = place.local_path is not None
    loaders = [
        loader
        for loader in LOADERS
        if loader[1] in options.families
        and (local or loader[1] not in ("filesystem", "plain"))
        and (loader[1] != PEER or serves(place.url))
    ]
    why = peer_missing()
    missing = {label: why for label, family, _ in loaders if why and family == PEER}
    loaders = [loader for loader in loaders if loader[0] not in missing]
    figures = []
    num_steps = len(options.states) * len(loaders) * (options.num_rounds + 1)
    with ProgressBar(num_steps, silent=not place.ranks.is_first) as bar:
        for name in options.states:
            state = build_state(name, quick=options.quick, ranks=place.ranks)
            of_state = LoadFigures(name, state.num_tensors, state.nbytes, missing=missing)
            url = place.fresh_url()
            _save(state, place, url)
            for label, sample in _rounds(state, place, url, loaders, options, bar):
                of_state.samples.setdefault(label, []).append(sample)
            place.remove(url)
            bar.clear()
            report(of_state)
            figures.append(of_state)
    return figures


def _save(state: BenchState, place: Place, url: str) -> None:
    writer = MPFsspecWriter(url, num_workers=_NUM_WORKERS, **place.storage_options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_save(state.state_dict, storage_writer=writer)
    if place.local_path is not None:
        with open(place.own_file(os.path.join(url, _PLAIN_FILE)), "wb") as file:
            for tensor in state.tensors():
                file.write(_memory(tensor))


def _rounds(
    state: BenchState,
    place: Place,
    url: str,
    loaders: Sequence[Any],
    options: Options,
    bar: ProgressBar,
) -> Iterator[tuple[str, LoadSample]]:
    """Counted samples; the first round warms up, and is compared with what was saved."""
    target = _like(state.state_dict)
    shuffler = random.Random(options.seed)
    for number in range(options.num_rounds + 1):
        for label, _, make in shuffler.sample(list(loaders), len(loaders)):
            bar.show(f"{state.name}: {label}")
            if not number:
                _fill(target, 77)
            sample = _timed(make, target, place, url)
            if not number and options.verify and label != "reads nothing":
                different = differences(state.state_dict, target)
                if different:
                    raise RuntimeError(f"{label} has not loaded {', '.join(different[:5])}")
            bar.step()
            if number:
                yield label, sample


def _load(make: Any, target: dict[str, Any], place: Place, url: str) -> None:
    if make is None:
        _read_plain(target, place.own_file(os.path.join(url, _PLAIN_FILE)))
        return
    keys = place.storage_options if make is peer_reader else {}
    with peer_environment(keys):
        load_into(target, make(url, dict(place.storage_options)))


def _read_plain(target: dict[str, Any], path: str) -> None:
    """One thread, one file, the tensors' bytes one after another into place."""
    with open(path, "rb", buffering=0) as file:
        for tensor in _tensors(target):
            view = memoryview(_memory(tensor))
            while view:
                view = view[file.readinto(view) :]


def _timed(make: Any, target: dict[str, Any], place: Place, url: str) -> LoadSample:
    gc.collect()
    place.ranks.barrier()
    cpu, began = _cpu_s(), time.perf_counter()
    _load(make, target, place, url)
    return LoadSample(time.perf_counter() - began, _cpu_s() - cpu)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _like(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    return {key: _like(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield local_part(value)
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)


def _fill(target: Any, number: int) -> None:
    for tensor in _tensors(target):
        tensor.detach().fill_(number)


def _memory(tensor: torch.Tensor) -> Any:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
