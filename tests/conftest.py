"""Fixtures for all tests, and the guard against leaks.

A test that takes longer than the `timeout` of pytest.ini fails with the stacks of all threads.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import counts, leaks

# No deadline: this code waits for disks and processes, and a test never judges by the clock.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# A shell lets what it starts in the background ignore Ctrl-C, and so would all children of ours.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.failed:
        # What a failed test leaves behind says nothing new.
        for node in item.listchain():
            node.stash[_failed] = True
    return report


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Any:
    """Let pass what a fixture for several tests (a server, a process group) holds on purpose."""
    if fixturedef.scope == "function" or fixturedef.argname.startswith("_no_leaks"):
        return (yield)
    before = leaks.snapshot()
    result = yield
    leaks.long_lived |= leaks.snapshot() - before
    return result


@pytest.fixture(scope="module", autouse=True)
def _no_leaks_in_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a module after which something is left although mpwriter is shut down."""
    before = leaks.snapshot(mappings=True)
    yield
    leaks.shut_down()
    if not request.node.stash.get(_failed, False):
        found = leaks.left_behind(before, strict=True)
        if found:
            pytest.fail("left behind by this module:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(autouse=True)
def _no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves behind a child process, a descriptor, a thread or shared memory."""
    before = leaks.snapshot()
    yield
    if not request.node.stash.get(_failed, False):
        found = leaks.left_behind(before)
        if found:
            request.node.getparent(pytest.Module).stash[_failed] = (
                True  # the module's own look would repeat it
            )
            pytest.fail("left behind by this test:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture
def checkpoint_dir(tmp_path: Path) -> Path:
    """A place for one checkpoint; does not exist yet."""
    return tmp_path / "checkpoint"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the checks of reliability have counted, if they have run."""
    found = list(counts.lines())
    if found:
        terminalreporter.section("reliability")
        for line in found:
            terminalreporter.write_line(line)
    counts.write_out()
