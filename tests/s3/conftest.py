"""One S3 server for all tests of this folder, and what each of them begins with.

It starts with the first test; where it is not there, they fail.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from scripts.wan_proxy import WanProxy
from tests import leaks
from tests.fakes.plan import FaultPlan
from tests.servers import S3Store, ServerError, start_s3

_numbers = itertools.count()


@contextlib.contextmanager
def _started(actions: Sequence[str]) -> Iterator[S3Store]:
    with contextlib.ExitStack() as stack:
        before = leaks.snapshot()
        try:
            store = stack.enter_context(start_s3(actions))
        except ServerError as error:
            pytest.fail(str(error), pytrace=False)
        # Not left to the hook: pytest calls none of a subfolder for fixtures of the session.
        leaks.long_lived |= leaks.snapshot() - before
        yield store


@pytest.fixture(scope="session")
def store() -> Iterator[S3Store]:
    """The server; its second identity may read and list."""
    with _started(("Read", "List")) as store:
        yield store


@pytest.fixture(scope="module")
def start_store() -> Iterator[Callable[[Sequence[str]], S3Store]]:
    """Start a server of which the second identity may do other things."""
    with contextlib.ExitStack() as stack:
        yield lambda actions: stack.enter_context(_started(actions))


@pytest.fixture
def url(store: S3Store) -> str:
    """A place for one checkpoint; nothing is there yet."""
    return f"{store.root}/run{next(_numbers)}/step"


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "plan")


@pytest.fixture
def proxy(store: S3Store) -> Iterator[WanProxy]:
    """A network between, without delay, that can break."""
    before = leaks.snapshot()
    with WanProxy(store.endpoint.removeprefix("http://")) as started:
        leaks.long_lived |= leaks.snapshot() - before
        yield started


@pytest.fixture
def far(store: S3Store, proxy: WanProxy) -> S3Store:
    """The server, as it is reached through the network."""
    return store.at(f"http://127.0.0.1:{proxy.port}")


@pytest.fixture(scope="module", autouse=True)
def _no_leaks_in_module() -> Iterator[None]:
    """As for all tests, but the client keeps connections."""
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
