"""The simulation of a large job's coordinator."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "simulate.py"


@pytest.fixture(scope="module")
def simulate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulate", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["simulate"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_simulate_grows_with_the_job(writer: str, simulate: ModuleType) -> None:
    small, large = (simulate.simulate(writer, num_ranks, 5) for num_ranks in (2, 32))
    assert small.writer == writer and large.num_ranks == 32
    # 16 times the shards, and what is there once for each tensor.
    assert 4 < large.metadata_bytes / small.metadata_bytes < 16
    assert 15 < large.gathered_bytes / small.gathered_bytes < 17
    text = simulate.table([small, large])
    assert f"32 x 5 {writer:>11}".split() == text.splitlines()[-1].split()[:4]
