"""Fixtures of the tests under torchrun."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fakes import FaultPlan
from tests.torchrun.jobs import GLOO_AVERAGES, TRAIN, Job, losses, torchrun


class Reference(NamedTuple):
    """A run of 8 steps that nothing has disturbed, with all of its checkpoints."""

    run: Path
    losses: dict[int, float]
    output: str


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start a job: `start(command)`; it does not outlive the test."""
    started: list[Job] = []

    def run(command: Sequence[Any], environment: Mapping[str, str] | None = None) -> Job:
        started.append(Job(command, tmp_path / f"job{len(started)}", environment))
        return started[-1]

    yield run
    for job in started:
        job.close()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Reference]:
    """The undisturbed run on a number of ranks; each is made once, that of 4 with HSDP."""
    made: dict[int, Reference] = {}

    def of(num_ranks: int) -> Reference:
        if num_ranks not in made:
            folder = tmp_path_factory.mktemp("reference")
            options = ["--steps=8", "--keep=9", "--checkpoints", folder / "run"]
            if num_ranks == 4 and GLOO_AVERAGES:
                options.append("--hsdp")
            job = Job(torchrun(num_ranks, *TRAIN, *options), folder / "job")
            try:
                job.assert_succeeded()
            finally:
                job.close()
            output = job.stdout + job.stderr
            made[num_ranks] = Reference(folder / "run", dict(losses(job.stdout)), output)
        return made[num_ranks]

    return of


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "plan")
