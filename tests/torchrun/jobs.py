"""Jobs that a test starts: torchrun with its ranks, or two nodes of them.

    job = start(["--nproc-per-node=2", *TRAIN, "--checkpoints", folder])
    job.assert_succeeded()
    losses(job.stdout)

A job leads a session; its output goes to files. `close` ends whatever is left of its tree.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.trainers import REPOSITORY, tree, wait_until

__all__ = [
    "GLOO_AVERAGES",
    "TRAIN",
    "TRAIN_ON_FAULTS",
    "Job",
    "complete_steps",
    "copy_checkpoint",
    "losses",
    "torchrun",
    "two_nodes",
    "values_in",
]

# A hang is a failure; nothing here takes longer, on a busy machine either.
WATCHDOG_S = 240.0

# The training script with a model of 5,000 parameters, which saves every second step.
_SIZE = "--width 16 --layers 1 --heads 4 --length 16 --save-every 2 --timeout-s 60"
TRAIN = [str(REPOSITORY / "scripts" / "train.py"), *_SIZE.split()]
# The same on the fake filesystems.
TRAIN_ON_FAULTS = [str(Path(__file__).with_name("train_on_faults.py")), *_SIZE.split()]

# See scripts/train_model.py: no HSDP there, and losses depend on the number of ranks.
GLOO_AVERAGES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)

# The second: see scripts/train.py.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Job:
    """A running or ended job.

    Args:
        command: of its first process.
        folder: for its output.
        environment: on top of that of the tests.
    """

    def __init__(
        self, command: Sequence[Any], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        with open(folder / "stdout", "wb") as stdout, open(folder / "stderr", "wb") as stderr:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=REPOSITORY,
                env={
                    **os.environ,
                    # torchrun's --log-dir, which it would leave behind in /tmp.
                    "PET_LOG_DIR": str(folder / "logs"),
                    **_ENVIRONMENT,
                    **(environment or {}),
                },
                start_new_session=True,
            )

    @property
    def stdout(self) -> str:
        return (self._folder / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self._folder / "stderr").read_text(errors="replace")

    def ended(self) -> int:
        """Wait for its end; the exit code."""
        try:
            return self._process.wait(WATCHDOG_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job hangs\n{self.story()}") from None

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait for something that the job does; it may not end before."""

        def met() -> bool:
            ended = self._process.poll() is not None
            found = bool(condition())
            assert found or not ended, f"the job has ended before\n{self.story()}"
            return found

        wait_until(met, self.story)

    def assert_succeeded(self) -> None:
        assert self.ended() == 0, self.story()

    def close(self) -> None:
        for process in tree(self._process.pid):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()

    def story(self) -> str:
        return f"--- stdout\n{self.stdout[-20000:]}\n--- stderr\n{self.stderr[-20000:]}"


def torchrun(num_ranks: int, *arguments: Any) -> list[Any]:
    """The command line of a job on one node; `arguments` begin with options or the script."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launch, f"--nproc-per-node={num_ranks}", *arguments]


def two_nodes(*arguments: Any) -> list[Any]:
    """The command line of a job on two nodes, with a rank each."""
    return [sys.executable, REPOSITORY / "scripts" / "multinode.py", "--limit-s=120", *arguments]


# -- what the training script says and leaves ----------------------------------------------------


def losses(output: str) -> list[tuple[int, float]]:
    """Step and loss, to the last bit, in the order in which they were printed."""
    return [
        (int(step), float(loss))
        for step, loss in re.findall(r"step (\d+) loss (\S+)$", output, re.MULTILINE)
    ]


def complete_steps(run: Path) -> list[int]:
    """Steps of the checkpoints that have their `.metadata`."""
    return sorted(int(path.parent.name[5:]) for path in run.glob("step-*/.metadata"))


def copy_checkpoint(source: Path, step: int, run: Path, *, unfinished: int | None = None) -> None:
    """Lay out a run that was killed: a complete checkpoint, and a later one without its end."""
    name = f"step-{step:08}"
    shutil.copytree(source / name, run / name)
    if unfinished is not None:
        name = f"step-{unfinished:08}"
        shutil.copytree(source / name, run / name, ignore=shutil.ignore_patterns(".metadata"))


def values_in(run: Path, step: int, scratch: Path) -> dict[str, Any]:
    """Everything of a checkpoint, read by torch's own reader."""
    file = scratch / f"{run.name}-{step}.pt"
    dcp_to_torch_save(run / f"step-{step:08}", file)
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found
