"""Every store that the suite runs on; a test that takes `store` runs on each of them.

A server starts with the first test on it and ends with the last. One that is not there fails its
tests.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import leaks
from tests.elsewhere import OtherProcess
from tests.servers import (
    ServerError,
    Store,
    start_azure,
    start_gcs,
    start_s3,
    start_sftp,
)
from tests.trainers import Trainer, TrainerHost

Start = Callable[[], contextlib.AbstractContextManager[Store]]

_SERVERS: dict[str, Start] = {
    "s3": start_s3,
    "gcs": start_gcs,
    "azure": start_azure,
    "sftp": start_sftp,
}

_numbers = itertools.count()


@pytest.fixture(scope="session", params=["local", "memory", *_SERVERS])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    """A place for checkpoints."""
    if request.param == "local":
        yield Store("local", str(tmp_path_factory.mktemp("local")), has_directories=True)
    elif request.param == "memory":
        yield Store("memory", "memory://checkpoints", serves_workers=False, has_directories=True)
    else:
        with contextlib.ExitStack() as stack:
            before = leaks.snapshot()
            try:
                started = stack.enter_context(_SERVERS[request.param]())
            except ServerError as error:
                pytest.fail(str(error), pytrace=False)
            # Not left to the hook: pytest calls none of a subfolder for fixtures of the session.
            leaks.long_lived |= leaks.snapshot() - before
            # Workers have the environment of the time when they were started.
            leaks.shut_down()
            yield started


@pytest.fixture(scope="module", autouse=True)
def _no_leaks_in_module() -> Iterator[None]:
    """As for all tests, but the clients of stores keep connections; see test_connections.py."""
    before = leaks.snapshot(mappings=True)
    yield
    leaks.shut_down()
    found = leaks.left_behind(before, strict=True, connections=True)
    assert not found, "\n".join(found)


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    before = leaks.snapshot()
    yield
    found = leaks.left_behind(before, connections=True)
    assert not found, "\n".join(found)


@pytest.fixture(autouse=True)
def _dcp_logs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest keeps what is logged, so it would keep the frames of every exception that DCP logs."""
    for name in logging.root.manager.loggerDict:
        if "dcp_logger" in name:
            monkeypatch.setattr(logging.getLogger(name), "disabled", True)


@pytest.fixture
def url(store: Store) -> str:
    """A place for one checkpoint; nothing is there yet."""
    return f"{store.root}/run{next(_numbers)}/step"


@pytest.fixture(scope="session")
def elsewhere() -> Iterator[OtherProcess]:
    """Another process, which saves to the same stores."""
    before = leaks.snapshot()
    other = OtherProcess()
    leaks.long_lived |= leaks.snapshot() - before
    yield other
    other.close()


@pytest.fixture(scope="session")
def trainer_host() -> Iterator[TrainerHost]:
    """Where trainers come from that a test may kill."""
    before = leaks.snapshot()
    host = TrainerHost()
    leaks.long_lived |= leaks.snapshot() - before
    yield host
    host.close()


@pytest.fixture
def start_trainer(
    trainer_host: TrainerHost, store: Store, url: str, tmp_path: Path
) -> Iterator[Callable[..., Trainer]]:
    """Start a trainer: `start_trainer(source, *args)`.

    Its arguments are the URL, the storage options as JSON, and `args`.
    """
    started: list[Trainer] = []

    def start(source: str, *args: Any) -> Trainer:
        # What a server has put there counts in the trainers, too.
        environment = {n: v for n, v in os.environ.items() if n.startswith(("GCSFS", "FETCH"))}
        options = json.dumps(dict(store.options))
        trainer = trainer_host.start(
            source, url, options, *args, folder=tmp_path / "output", env=environment
        )
        started.append(trainer)
        return trainer

    yield start
    for trainer in started:
        trainer.close()
