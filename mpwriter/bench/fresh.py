"""Saves in a process of their own: the first one from cold, and memory.

Runs in: trainer (`FreshProcess`, `cold_save`, `measure_memory`), and the fresh process (`main`).

    benchmark                        fresh process             sampler (memory only)
        | request: JSON on stdin         |
        |------------------------------->| imports torch, builds the state
        |<------------------------ ready |
        | begin ---------------------------------------------------->|  baseline
        | go --------------------------->| saves
        |<---------------- samples: JSON |
        | end ------------------------------------------------------>|
        |<------------------------------------------- peaks: JSON ---|
        | (stdin closed) --------------->| ends
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from mpwriter.bench import process_tree
from mpwriter.bench.places import Place
from mpwriter.bench.states import build_state
from mpwriter.bench.subjects import Subject
from mpwriter.bench.timing import Sample, timed_save

__all__ = ["ColdSave", "FreshProcess", "MemoryUse", "cold_save", "measure_memory"]

# The request also carries sys.path: the package may come from a checkout, not an installation.
_CHILD = (
    "import json, sys; request = json.loads(sys.stdin.readline()); sys.path[:] = request['path'];"
    "from mpwriter.bench.fresh import main; main(request)"
)


@dataclass(frozen=True)
class ColdSave:
    """Seconds of a process's first save, and of those after it."""

    first_s: float
    warm_s: list[float]


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a process tree while it saved, over that before its first save.

    Attributes:
        extra_pss_bytes: peak of the PSS, less the baseline.
        shared_memory_bytes: peak of what its memfd files held.
        baseline_pss_bytes: the state itself, torch and Python.
        num_samples: looks that were taken at it, 20 a second.
    """

    extra_pss_bytes: int
    shared_memory_bytes: int
    baseline_pss_bytes: int
    num_samples: int


class FreshProcess:
    """A Python that has built a state and waits for the word to save it.

    Used as a context manager, from one thread; leaving it ends the process.

    Args:
        subject: what saves.
        state_name: one of `states.STATE_NAMES`.
        place: where to.
        quick: the small state.
        num_saves: how many, each to a checkpoint of its own, removed after it.

    Raises:
        RuntimeError: the process ended early; its own message is on standard error.
    """

    def __init__(
        self, subject: Subject, state_name: str, place: Place, *, quick: bool, num_saves: int
    ) -> None:
        self._label = subject.label
        self._child = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        request = {
            "path": sys.path,
            "subject": asdict(subject),
            "state": state_name,
            "quick": quick,
            "url": place.url,
            "storage_options": dict(place.storage_options),
            "num_saves": num_saves,
        }
        self._send(json.dumps(request))  # not on the command line: options may hold keys

    @property
    def pid(self) -> int:
        return self._child.pid

    def wait_until_ready(self) -> None:
        self._receive()

    def save(self) -> list[Sample]:
        """Let it save, and wait for all of its saves."""
        self._send("go")
        return [Sample(**sample) for sample in self._receive()]

    def __enter__(self) -> FreshProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._child.kill()
        self._child.communicate()

    def _send(self, line: str) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(line + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            self._raise_ended()

    def _receive(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            self._raise_ended()
        return json.loads(line)

    def _raise_ended(self) -> None:
        status = self._child.wait()
        raise RuntimeError(f"{self._label}: the fresh process ended early, status {status}")


def cold_save(
    subject: Subject, state_name: str, place: Place, *, quick: bool, num_warm: int
) -> ColdSave:
    """Save in a new process, whose first save starts everything that a save needs.

    Imports are done by then; a trainer imports its writer long before.

    Raises:
        RuntimeError: see FreshProcess.
    """
    with FreshProcess(subject, state_name, place, quick=quick, num_saves=1 + num_warm) as fresh:
        fresh.wait_until_ready()
        first, *warm = (sample.wall_s for sample in fresh.save())
    return ColdSave(first, warm)


def measure_memory(
    subject: Subject, state_name: str, place: Place, *, quick: bool, num_saves: int
) -> MemoryUse:
    """Save in a new process while another one samples the memory of its tree.

    Raises:
        RuntimeError: see FreshProcess; or the sampler ended.
    """
    with FreshProcess(subject, state_name, place, quick=quick, num_saves=num_saves) as fresh:
        fresh.wait_until_ready()
        with subprocess.Popen(
            [sys.executable, "-S", process_tree.__file__, str(fresh.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as sampler:
            assert sampler.stdout is not None
            try:
                _tell(sampler, "begin")
                sampler.stdout.readline()
                fresh.save()
                _tell(sampler, "end")
                answer = sampler.stdout.readline()
            finally:
                sampler.kill()
    if not answer:
        raise RuntimeError("the memory sampler ended early")
    return MemoryUse(**json.loads(answer))


def _tell(sampler: subprocess.Popen[str], word: str) -> None:
    assert sampler.stdin is not None
    sampler.stdin.write(word + "\n")
    sampler.stdin.flush()


def main(request: dict[str, Any]) -> None:
    """The fresh process, after its request was read."""
    # Whatever a library prints goes to standard error; the pipe carries our lines only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    subject = Subject(**request["subject"])
    place = Place(request["url"], request["storage_options"])
    state = build_state(request["state"], quick=request["quick"])
    subject.prepare()
    print(json.dumps("ready"), file=answers, flush=True)
    if not sys.stdin.readline():
        return
    samples = []
    for _ in range(request["num_saves"]):
        url = place.fresh_url()
        samples.append(asdict(timed_save(subject, state, place, url)))
        place.remove(url)
    print(json.dumps(samples), file=answers, flush=True)
    sys.stdin.readline()  # stay alive until the last sample of memory is taken
