"""Checks on a device: rates of copies, saves bit for bit, streams.

Runs in: trainer.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from mpwriter import FsspecReader, MPFsspecWriter
from mpwriter._arena import Arena
from mpwriter._compat import HAS_ASYNC_STAGING, StockFsspecReader
from mpwriter.bench.device_locks import check_locks
from mpwriter.bench.device_rig import Result, Rig, State, checked, make_state, map_tensors
from mpwriter.bench.verify import differences, load_into

__all__ = [
    "check_all",
    "check_copies",
    "check_loads",
    "check_saves",
    "check_streams",
    "copy_rate",
]

_NUM_COPIES = 7
_LATE_NUMEL, _NUM_LATE = 1 << 18, 8
_NUM_LOADS, _NUM_LOADED = 3, 16


def check_all(rig: Rig) -> list[Result]:
    """Every check there is."""
    results: list[Result] = []
    for check in (check_copies, check_saves, check_loads, check_streams, check_locks):
        results += check(rig)
    return results


# -- copies ------------------------------------------------------------------------------


def check_copies(rig: Rig) -> list[Result]:
    """GB/s of a copy to the host, in ways that differ in the memory only."""
    source = torch.randint(0, 255, (rig.nbytes,), dtype=torch.uint8, device=rig.device)
    plain = rig.plain_memory(rig.nbytes)
    plain_rate, held = copy_rate(rig, plain, source)
    results = [Result("copy into plain page-locked memory", held, f"{plain_rate:.1f} GB/s")]
    for label, pinner in (("page-locked", rig.pinner), ("not page-locked", None)):
        arena = Arena(pinner=rig.pinner)
        extent = arena.lease(rig.nbytes)
        locked = pinner is None or arena.pin(extent.segment)
        rate, held = copy_rate(rig, arena.tensor(extent), source)
        share = f"{rate:.1f} GB/s, {rate / plain_rate:.2f}x plain"
        results.append(Result(f"copy into the arena, {label}", held and locked, share))
        arena.release(extent)
        arena.close()
    return results


def copy_rate(rig: Rig, target: torch.Tensor, source: torch.Tensor) -> tuple[float, bool]:
    """GB/s (10^9), median of some copies on a side stream; and whether the bytes are right."""
    target.zero_()  # every page is there before the clock runs
    times_s = []
    for _ in range(_NUM_COPIES):
        stream = rig.stream_for()(source)
        assert stream is not None
        began = time.perf_counter()
        stream.copy(target, source)
        stream.record().synchronize()
        times_s.append(time.perf_counter() - began)
    return source.nbytes / median(times_s) / 1e9, torch.equal(target, source.cpu())


# -- saves -------------------------------------------------------------------------------


def check_saves(rig: Rig) -> list[Result]:
    """What was saved comes back bit for bit."""
    results = [checked("blocking save", partial(_save_blocking, rig))]
    modes = [("save in the background", False)]
    if HAS_ASYNC_STAGING:
        modes.append(("save with overlapped staging", True))
    for label, overlapped in modes:
        results.append(checked(label, partial(_save_in_background, rig, overlapped)))
    return results


def _save_blocking(rig: Rig) -> str:
    state, path = make_state(rig.device), rig.fresh_path()
    with _without_warnings():
        save(state, storage_writer=MPFsspecWriter(path, num_workers=2))
    return _compare_saved(path, state)


def _save_in_background(rig: Rig, overlapped: bool) -> str:
    """Overwrites the tensors as soon as the trainer may; twice, since memory is used again."""
    for seed in range(2):
        state = make_state(rig.device, seed)
        expected = map_tensors(state, lambda tensor: tensor.cpu().clone())
        path = rig.fresh_path()
        writer = MPFsspecWriter(path, num_workers=2, async_staging=overlapped)
        with _without_warnings():
            response: Any = async_save(state, storage_writer=writer)
            if overlapped:
                response.staging_completion.result()
            map_tensors(state, torch.Tensor.zero_)
            getattr(response, "upload_completion", response).result()
        writer.close()
        figure = _compare_saved(path, expected)
    return figure


def _compare_saved(path: str, expected: State) -> str:
    """Raises AssertionError where the checkpoint holds anything else than `expected`."""
    blank = map_tensors(expected, lambda tensor: torch.zeros_like(tensor, device="cpu"))
    return _compare_loaded(expected, blank, FsspecReader(path))


# -- loads -------------------------------------------------------------------------------


def check_loads(rig: Rig) -> list[Result]:
    """What is loaded into the device's memory is what was saved, and how fast that is."""
    return [
        checked("load of a state of many kinds", partial(_load_kinds, rig)),
        checked("load of large tensors", partial(_load_large, rig)),
    ]


def _load_kinds(rig: Rig) -> str:
    state, path = make_state(rig.device), rig.fresh_path()
    with _without_warnings():
        save(state, storage_writer=MPFsspecWriter(path, num_workers=2))
    return _compare_loaded(state, map_tensors(state, torch.zeros_like), FsspecReader(path))


def _load_large(rig: Rig) -> str:
    """The median of some loads, in turns with the stock reader's, of a file in the page cache."""
    numel = max(1, rig.nbytes // _NUM_LOADED // 4)
    state = {f"t{n}": torch.randn(numel, device=rig.device) for n in range(_NUM_LOADED)}
    path = rig.fresh_path()
    times_s: dict[str, list[float]] = {"ours": [], "stock": []}
    with _without_warnings():
        save(state, storage_writer=MPFsspecWriter(path, num_workers=2))
    for _ in range(_NUM_LOADS):
        for name, reader in (("ours", FsspecReader(path)), ("stock", StockFsspecReader(path))):
            target = map_tensors(state, torch.zeros_like)
            began = time.perf_counter()
            load_into(target, reader)
            target["t0"][0].item()  # what the reader has queued on the current stream is done
            times_s[name].append(time.perf_counter() - began)
            assert not differences(state, target), f"{name}: differs"
    ours_s, stock_s = median(times_s["ours"]), median(times_s["stock"])
    return f"{_NUM_LOADED * numel * 4 / ours_s / 1e9:.1f} GB/s, {stock_s / ours_s:.2f}x stock"


def _compare_loaded(expected: State, target: State, reader: Any) -> str:
    load_into(target, reader)
    different = differences(expected, target)
    assert not different, f"differs: {', '.join(different[:5])}"
    return "bit for bit"


# -- streams -----------------------------------------------------------------------------


def check_streams(rig: Rig) -> list[Result]:
    """Values that are still being computed when the save begins."""
    return [
        checked(f"computed on {label}, {kind}", partial(_save_late, rig, context, in_background))
        for label, context in (("the current stream", nullcontext), ("another", rig.other_stream))
        for kind, in_background in (("blocking", False), ("background", True))
    ]


def _save_late(rig: Rig, context: Callable[[], Any], in_background: bool) -> str:
    state = {f"t{n}": torch.zeros(_LATE_NUMEL, device=rig.device) for n in range(_NUM_LATE)}
    path = rig.fresh_path()
    with context():
        rig.queue_work()
        for number, tensor in enumerate(state.values()):
            tensor.fill_(number + 1)
    writer = MPFsspecWriter(path, num_workers=1)
    with _without_warnings():
        if in_background:
            response: Any = async_save(state, storage_writer=writer)
            map_tensors(state, torch.Tensor.zero_)
            response.result()
        else:
            save(state, storage_writer=writer)
    return _compare_saved(
        path, {f"t{n}": torch.full((_LATE_NUMEL,), n + 1.0) for n in range(_NUM_LATE)}
    )


@contextmanager
def _without_warnings() -> Iterator[None]:
    """DCP says at every save that there is no process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
