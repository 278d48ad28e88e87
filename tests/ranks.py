"""Two ranks of a gloo group, for many test cases.

    results = ranks.run(case, directory, 3)     case(directory, 3) on both ranks at once

A case is a module-level function; what it takes and returns is pickled. It may use
`torch.distributed` and asks `dist.get_rank()` who it is. Importing torch and joining a group take
seconds, so the two processes serve every case of the session. After a case each rank looks for
what it has left behind.

A case that hangs ends both processes, with the stacks of all threads on stderr; the next case gets
new ones.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh

from mpwriter import FsspecReader, MPFsspecWriter
from tests import leaks

__all__ = ["Failure", "RankPair", "caught", "group", "load", "mesh", "save"]

REPOSITORY = Path(__file__).parents[1]
NUM_RANKS = 2

# A hang is a failure; nothing here takes longer.
WATCHDOG_S = 40.0

_RANK = "from tests.ranks import _serve; _serve()"


class RankPair:
    """The trainer's side: starts the ranks at the first case."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ends: list[Connection] = []

    def run(self, case: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a case on both ranks.

        Returns:
            What it returned, by rank.

        Raises:
            AssertionError: a rank raised, hung, died or left something behind.
        """
        if not self._processes:
            self._start()
        for end in self._ends:
            end.send_bytes(pickle.dumps((case, args)))
        answers = self._answers()
        stories = [f"rank {rank}:\n{story}" for rank, (story, _) in enumerate(answers) if story]
        assert not stories, "\n".join(stories)
        return [result for _, result in answers]

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        if self._processes:
            self._folder.cleanup()
        self._processes, self._ends = [], []

    def _start(self) -> None:
        before = leaks.snapshot()
        # The store in it is used again by every further group.
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(NUM_RANKS):
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-c", _RANK, str(theirs.fileno()), str(rank)]
            self._processes.append(
                subprocess.Popen(
                    [*command, self._folder.name],
                    stdin=subprocess.DEVNULL,
                    cwd=REPOSITORY,
                    pass_fds=[theirs.fileno()],
                )
            )
            theirs.close()
            self._ends.append(Connection(ours.detach()))
        ready = self._answers()
        assert ready == [("", rank) for rank in range(NUM_RANKS)]
        leaks.long_lived |= leaks.snapshot() - before

    def _answers(self) -> list[tuple[str, Any]]:
        answers: dict[int, tuple[str, Any]] = {}
        while len(answers) < NUM_RANKS:
            waiting = [end for rank, end in enumerate(self._ends) if rank not in answers]
            # The ranks' own watchdogs come first.
            ready = wait(waiting, WATCHDOG_S + 10)
            try:
                assert ready, "the ranks do not answer"
                for end in ready:
                    assert isinstance(end, Connection)
                    answers[self._ends.index(end)] = pickle.loads(end.recv_bytes())
            except (EOFError, OSError, AssertionError) as exc:
                done = sorted(answers)
                self.close()
                raise AssertionError(f"hung or died; only {done} had finished") from exc
        return [answers[rank] for rank in range(NUM_RANKS)]


# -- for cases ----------------------------------------------------------------------------------


class Failure(NamedTuple):
    """What DCP raised on this rank, fit to be sent: the exceptions may not be.

    Attributes:
        text: what a user sees.
        kinds: by failed rank, the names of its exception's classes.
        errnos, paths: by failed rank, None where the exception has none.
    """

    text: str
    kinds: dict[int, list[str]]
    errnos: dict[int, int | None]
    paths: dict[int, str | None]


def caught(action: Callable[..., Any], *args: Any, **kwargs: Any) -> Failure | None:
    """Run something of DCP that may fail; None where it does not."""
    try:
        action(*args, **kwargs)
    except CheckpointException as exc:
        text, raised = str(exc), {rank: failure[0] for rank, failure in exc.failures.items()}
    except Exception as exc:
        text, raised = str(exc), {dist.get_rank(): exc}
    else:
        return None
    return Failure(
        text,
        {rank: [cls.__name__ for cls in type(exc).__mro__] for rank, exc in raised.items()},
        {rank: getattr(exc, "errno", None) for rank, exc in raised.items()},
        {rank: getattr(exc, "path", None) for rank, exc in raised.items()},
    )


_groups: dict[Any, Any] = {}


def mesh(*shape: int) -> Any:
    """A device mesh of both ranks. Made once: every one makes groups, which live on."""
    return _made_once(shape, lambda: init_device_mesh("cpu", shape))


def group(*members: int, number: int = 0) -> Any:
    """A group, and with other numbers further ones of the same ranks.

    Every rank has to ask for it, in the same order, also one that is no member.
    """
    return _made_once(("group", number, *members), lambda: dist.new_group(list(members)))


def _made_once(key: Any, make: Callable[[], Any]) -> Any:
    if key not in _groups:
        before = leaks.snapshot()
        _groups[key] = make()
        leaks.long_lived |= leaks.snapshot() - before
    return _groups[key]


def save(path: str, state: dict[str, Any], **options: Any) -> MPFsspecWriter:
    """Save with a writer of its own, one worker a rank.

    Args:
        options: of the writer; `process_group`, `planner` and `use_collectives` go to dcp.save.
    """
    of_dcp = {
        name: options.pop(name)
        for name in ("process_group", "planner", "use_collectives")
        if name in options
    }
    writer = MPFsspecWriter(path, num_workers=options.pop("num_workers", 1), **options)
    dcp.save(state, storage_writer=writer, **of_dcp)
    return writer


def load(path: str, target: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Load into `target`, which is returned.

    Args:
        options: of the reader; `process_group` and `planner` go to dcp.load.
    """
    of_dcp = {name: options.pop(name) for name in ("process_group", "planner") if name in options}
    dcp.load(target, storage_reader=FsspecReader(path, **options), **of_dcp)
    return target


# -- in the ranks -------------------------------------------------------------------------------


def _serve() -> None:
    number, rank, folder = sys.argv[1:]
    end = Connection(int(number))
    with contextlib.suppress(EOFError):
        _join_group(int(rank), folder)
        end.send_bytes(pickle.dumps(("", int(rank))))
        while True:
            case, args = pickle.loads(end.recv_bytes())
            faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
            answer = _answer(case, args)
            faulthandler.cancel_dump_traceback_later()
            # Not `send`: torch would hand tensors over as shared memory.
            end.send_bytes(pickle.dumps(answer))
    leaks.shut_down()
    # The peer may be gone, so the group is not taken apart.
    os._exit(0)


def _join_group(rank: int, folder: str) -> None:
    warnings.filterwarnings("ignore", module="torch")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=WATCHDOG_S),
    )
    dist.barrier()


def _answer(case: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any]:
    """What went wrong ("" if nothing) and the result."""
    before = leaks.snapshot()
    try:
        result = case(*args)
    except BaseException:
        return traceback.format_exc(), None
    found = leaks.left_behind(before)
    return "\n".join(["left behind:", *found] if found else []), result
