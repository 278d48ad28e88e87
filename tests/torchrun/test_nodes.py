"""Two nodes with an address each, on a network of their own: scripts/multinode.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.torchrun.conftest import Reference
from tests.torchrun.jobs import TRAIN, Job, complete_steps, losses, two_nodes, values_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def _lines_of(node: str, output: str) -> str:
    return "\n".join(line for line in output.splitlines() if line.startswith(f"{node}|"))


@pytest.mark.parametrize("store", ["shared directory", "s3"])
def test_nodes_resume_with_the_losses_of_one_node_when_their_ranks_are_swapped(
    store: str,
    reference: Callable[[int], Reference],
    start: Callable[..., Job],
    tmp_path: Path,
) -> None:
    """Each loads what the other has saved."""
    run = "s3://checkpoints/run" if store == "s3" else str(tmp_path / "run")
    options = ["--s3"] if store == "s3" else []
    job = start(two_nodes(*options, "--then=--steps=8", *TRAIN, "--steps=4", "--checkpoints", run))
    job.assert_succeeded()
    whole = reference(2).losses
    first, second = (losses(_lines_of(node, job.stdout)) for node in ("node0", "node1"))
    assert first == [(n, whole[n]) for n in (1, 2, 3, 4)], job.story()
    assert second == [(n, whole[n]) for n in (5, 6, 7, 8)], job.story()
    assert f"Saved {run}/step-00000008: " in job.stdout
    assert job.stdout.count("of 2 ranks") == 4


def test_nodes_end_with_an_error_when_one_is_cut_off(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    """C01: its link goes down; both wait for each other no longer than they were told to."""
    run = tmp_path / "run"
    job = start(
        two_nodes(
            "--cut=1", "--when=step-00000100: ", "--store-timeout-s=5", *TRAIN,
            "--save-every=100", "--steps=1000000", "--timeout-s=5", "--checkpoints", run,
        )
    )  # fmt: skip
    assert job.ended() == 1, job.story()
    assert "node1 is cut off" in job.stdout
    for rank in range(2):
        assert f"rank {rank} failed" in _lines_of(f"node{rank}", job.stdout), job.story()
        assert f"node{rank} ended with 1" in job.stdout
    # Whatever looks like a checkpoint is one.
    steps = complete_steps(run)
    assert steps
    for step in steps:
        assert values_in(run, step, tmp_path)["train"]["step"] == step
