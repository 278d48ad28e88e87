"""Fixtures of the tests with whole processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpwriter._compat import HAS_ASYNC_STAGING
from tests import leaks
from tests.trainers import Trainer, TrainerHost

# Each is for one kind of torch only.
collect_ignore = ["test_without_async_staging.py" if HAS_ASYNC_STAGING else "test_async_modes.py"]


@pytest.fixture(scope="session")
def trainer_host() -> Iterator[TrainerHost]:
    before = leaks.snapshot()
    host = TrainerHost()
    # Not left to the hook: pytest calls none of a subfolder for fixtures of the session.
    leaks.long_lived |= leaks.snapshot() - before
    yield host
    host.close()


@pytest.fixture
def start_trainer(trainer_host: TrainerHost, tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Start a trainer of this test: `start_trainer(source, *args, cwd=, env=)`."""

    started: list[Trainer] = []

    def start(*args: object, **options: object) -> Trainer:
        trainer = trainer_host.start(*args, folder=tmp_path / "output", **options)  # type: ignore
        started.append(trainer)
        return trainer

    yield start
    for trainer in started:
        trainer.close()
