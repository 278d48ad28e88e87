"""Every store that the suite runs on; a test that takes `store` runs on each of them.

A server starts with the first test on it and ends with the last. One that is not there fails its
tests.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator

import pytest

from tests import leaks
from tests.integration.conftest import start_trainer, trainer_host
from tests.servers import Store, start_azure, start_gcs, start_s3, start_sftp

__all__ = ["start_trainer", "trainer_host"]

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
        before = leaks.snapshot()
        with _SERVERS[request.param]() as started:
            # Not left to the hook: pytest calls none of a subfolder for fixtures of the session.
            leaks.long_lived |= leaks.snapshot() - before
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
