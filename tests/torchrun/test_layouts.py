"""What is saved under one layout of ranks loads under every other, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.torchrun.jobs import Job, torchrun
from tests.torchrun.layouts import LAYOUTS, described, loads

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("num_ranks", sorted(LAYOUTS))
def test_load_gives_back_every_bit_when_the_layout_is_another(
    num_ranks: int, start: Callable[..., Job], tmp_path: Path
) -> None:
    """E01, E02, E03: FSDP2, HSDP, tensor parallelism and both; saved in every way."""
    job = start(torchrun(num_ranks, Path(__file__).with_name("layouts.py"), tmp_path / "saved"))
    job.assert_succeeded()
    for target in LAYOUTS[num_ranks]:
        for layout, way, reader in loads(target, list(LAYOUTS[num_ranks])):
            assert f"ok: {described(layout, way, target, reader)}\n" in job.stdout, job.story()
