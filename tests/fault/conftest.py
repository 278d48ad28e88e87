"""Fixtures of the tests with faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes import FaultPlan
from tests.integration.conftest import start_trainer, trainer_host

__all__ = ["start_trainer", "trainer_host"]


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "plan")


@pytest.fixture
def place(checkpoint_dir: Path) -> str:
    """`checkpoint_dir` as the filesystem with faults sees it."""
    return f"fault://{checkpoint_dir}"
