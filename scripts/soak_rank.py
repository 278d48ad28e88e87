"""One rank of the soak: saves what it is told to, and says what came of it and what it holds.

Started by soak.py: soak_rank.py RANK SEED FOLDER. Reads numbers of steps, a line each; answers each
with a line of JSON.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from soak_steps import NUM_RANKS, Fault, PlannedSave, Step, step_of, values_of

import mpwriter
from mpwriter import MPFsspecWriter
from mpwriter._arena import get_arena
from mpwriter._pool import get_pool
from tests.fakes import FaultPlan

# A hang of one rank is seen by soak.py first.
_GROUP_TIMEOUT_S = 300.0

# What a save has ended with must be given back within this time.
_SETTLE_S = 5.0


class BadValueError(Exception):
    """What a value raises that cannot be pickled."""


class BadHandlerError(Exception):
    """What an event handler raises."""


class BadValue:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise BadValueError("this value cannot be pickled")


class Rank:
    """Carries out the steps of one rank."""

    def __init__(self, rank: int, seed: int, folder: Path) -> None:
        self._rank = rank
        self._seed = seed
        self._folder = folder
        # One for all steps: a filesystem instance for each would be kept by fsspec for ever.
        self._plan = FaultPlan(folder / f"plan{rank}")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=NUM_RANKS,
            timeout=timedelta(seconds=_GROUP_TIMEOUT_S),
        )
        # Saves that run at the same time need a group each.
        self._side_group = dist.new_group()

    def carry_out(self, number: int) -> dict[str, Any]:
        """One step.

        Returns:
            outcomes: by save, None or what was raised; fired: faults that have struck; facts:
            what this process holds now.
        """
        step = step_of(self._seed, number)
        mine = step.fault.rank == self._rank
        if mine and step.fault.rule:
            self._plan.add(**step.fault.rule)
        killer = self._killer(step.fault) if mine and step.fault.kind in _KILLED else None
        outcomes = self._save_all(step)
        fired = 0
        if killer is not None:
            killer.join()
            fired = len(self._killed)
        elif mine and step.fault.kind in ("bad value", "bad handler"):
            fired = 1
        fired += self._clear_plan()
        return {"outcomes": outcomes, "fired": fired, "facts": facts()}

    def _save_all(self, step: Step) -> list[str | None]:
        outcomes: list[str | None] = []
        futures: dict[int, Any] = {}
        for position, save in enumerate(step.saves):
            outcome = None
            state = values_of(save, self._rank)
            # On every rank where it is staged: DCP tells no other rank of an error in there.
            if step.fault.kind == "bad value" and (save.is_async or self._mine(step.fault)):
                state["bad"] = BadValue()
            try:
                future = self._begin(step, save, state)
                if future is not None:
                    futures[position] = future
            except BaseException as exc:
                outcome = _told(exc)
            _wipe(state)
            outcomes.append(outcome)
        for position, future in futures.items():
            try:
                future.result()
            except BaseException as exc:
                outcomes[position] = _told(exc)
        return outcomes

    def _begin(self, step: Step, save: PlannedSave, state: dict[str, Any]) -> Any:
        """Save, or begin to; a future where it is asynchronous."""
        writer = MPFsspecWriter(
            f"{save.protocol}://{self._folder}/{save.place}",
            event_handler=self._handler(step.fault),
            plan=str(self._plan.folder),
            **step.options,
        )
        if save.is_async:
            return dcp.async_save(state, storage_writer=writer, process_group=self._side_group)
        dcp.save(state, storage_writer=writer)
        return None

    def _handler(self, fault: Fault) -> Any:
        def handle(event: Any) -> None:
            if event.name == fault.event:
                raise BadHandlerError(f"at {event.name}")

        return handle if fault.event and self._mine(fault) else None

    def _mine(self, fault: Fault) -> bool:
        return fault.rank == self._rank

    def _killer(self, fault: Fault) -> threading.Thread:
        """Kills one worker after a while, whatever it is doing then."""
        self._killed: list[int] = []

        def kill() -> None:
            time.sleep(fault.delay_s)
            for pid in get_pool().pids()[:1]:
                os.kill(pid, signal.SIGKILL)
                self._killed.append(pid)

        thread = threading.Thread(target=kill)
        thread.start()
        return thread

    def _clear_plan(self) -> int:
        """Let everything go well again; how often the rule has struck."""
        self._plan.clear()
        self._plan.release()
        fired = list(self._plan.folder.glob("fired.*"))
        for path in [*fired, self._plan.folder / "released", self._plan.folder / "log.jsonl"]:
            path.unlink(missing_ok=True)
        return len(fired)


_KILLED = {"killed at any time"}


def _told(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}"[-2000:]


def _wipe(state: dict[str, Any]) -> None:
    """What was saved must not be what the tensors hold later."""
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.zero_()


# -- what this process holds ----------------------------------------------------------------


def facts() -> dict[str, Any]:
    """Counts that have to stay flat; looked at when nothing is under way any more."""
    gc.collect()
    end_s = time.monotonic() + _SETTLE_S
    found = _facts()
    while (found["leases"] or found["strays"] or found["savers"]) and time.monotonic() < end_s:
        time.sleep(0.01)
        gc.collect()
        found = _facts()
    return found


def _facts() -> dict[str, Any]:
    workers = get_pool().pids()
    children = psutil.Process().children(recursive=True)
    stats = get_arena().stats()
    own = _links("self")
    memfds = sum(link.startswith("/memfd:") for link in own)  # a segment has two: torch has its own
    return {
        "workers": workers,
        "strays": [child.pid for child in children if child.pid not in workers],
        "savers": sum(t.name.startswith("AsyncCheckpoint") for t in threading.enumerate()),
        "leases": stats.num_leases,
        "claimed_bytes": stats.claimed_bytes,
        "memfds_beyond_segments": max(0, memfds - 2 * stats.num_segments),
        "threads": threading.active_count(),
        "fds": len(own) - memfds - len(workers),  # there is a socket to each worker
        "links": sorted(link.split("[")[0] for link in own if not link.startswith("/memfd:")),
        "worker_fds": max(map(_own_fds, workers), default=0),
        "rss_bytes": _private_bytes(),
    }


def _links(pid: int | str) -> list[str]:
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return links


def _own_fds(pid: int) -> int:
    """Descriptors of a worker; those of the segments that it has mapped are the arena's affair."""
    try:
        return sum(not link.startswith("/memfd:") for link in _links(pid))
    except OSError:
        return 0  # it has just ended


def _private_bytes() -> int:
    """Resident memory without the shared memory, which has its own figure."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = [int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssFile:"))]
    return sum(kib) << 10


def main(arguments: list[str]) -> None:
    warnings.simplefilter("ignore")
    faulthandler.register(signal.SIGUSR1)  # soak.py asks for the stacks where a step hangs
    # Whatever else prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    rank = Rank(int(arguments[0]), int(arguments[1]), Path(arguments[2]))
    for line in sys.stdin:
        print(json.dumps(rank.carry_out(int(line))), file=answers, flush=True)
    mpwriter.shutdown()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
