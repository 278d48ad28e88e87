"""Fixtures of the tests with two ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fault.conftest import place, plan
from tests.integration.conftest import start_trainer, trainer_host
from tests.ranks import RankPair

__all__ = ["place", "plan", "rank_pair", "start_trainer", "trainer_host"]


@pytest.fixture(scope="session")
def rank_pair() -> Iterator[RankPair]:
    """Two ranks of a gloo group, started by the first test that runs a case on them."""
    pair = RankPair()
    yield pair
    pair.close()
