"""One wrong bit anywhere in a checkpoint: an error that names the file, or the right values."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from mpwriter import FsspecReader, MPFsspecWriter
from mpwriter._fetch_place import MIN_PLACE_BYTES
from mpwriter.errors import MPWriterError
from tests import counts
from tests.saves import failure_of
from tests.states import assert_same, blank, save_with

NUM_FLIPS = 10_000
NUM_LARGE_FLIPS = 300

BIT_FLIPS = "bit flips"


def small() -> dict[str, Any]:
    """Many kinds in little space: most bits are of headers and directories."""
    return {
        "float": torch.randn(7, 3),
        "half": torch.randn(5).to(torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "number": torch.tensor(7),
        "view": torch.arange(12.0).reshape(3, 4).t(),
        "empty": torch.empty(0, 3),
        "complex": torch.randn(3, dtype=torch.complex64),
        "note": {"step": 3, "name": "one"},
        "text": "words",
    }


def large() -> dict[str, Any]:
    """What is read straight into its target."""
    return {"large": torch.randn(MIN_PLACE_BYTES // 4 + 5), "beside": torch.randn(9)}


class Flipper:
    """The bytes of a checkpoint, one of them changed at a time."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._random = random.Random(seed)
        self._files = {path: path.read_bytes() for path in sorted(folder.iterdir())}

    def flip(self) -> tuple[Path, int]:
        """Change one bit, by turns of a file's first, last or any bytes, and of `.metadata`."""
        paths = list(self._files)
        path = self._random.choice(paths)
        size = len(self._files[path])
        near = min(size, 1500)
        at = self._random.choice(
            (
                self._random.randrange(size),
                self._random.randrange(near),
                size - 1 - self._random.randrange(near),
            )
        )
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(bytes([self._files[path][at] ^ 1 << self._random.randrange(8)]))
        return path, at

    def restore(self, path: Path, at: int) -> None:
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(self._files[path][at : at + 1])


def outcome_of_load(folder: Path, state: dict[str, Any], path: Path, at: int) -> str:
    """ "right" or the name of the error's class.

    Raises:
        AssertionError: wrong values, or an error that does not say where.
    """
    target = blank(state)
    try:
        dcp.load(target, storage_reader=FsspecReader(folder, num_workers=1), no_dist=True)
    except CheckpointException as caught:
        error = failure_of(caught)
        assert isinstance(error, MPWriterError), f"{path.name} at {at}: {error!r}"
        assert path.name in str(error), f"{path.name} at {at}: {error}"
        return type(error).__name__
    try:
        assert_same(target, state)
    except AssertionError:
        counts.add(BIT_FLIPS, silent_losses=1)
        raise AssertionError(f"wrong values: {path.name} at {at}") from None
    return "right"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("make", "num_flips", "num_workers"),
    [(small, NUM_FLIPS, 2), (large, NUM_LARGE_FLIPS, 1)],
    ids=["small", "large"],
)
def test_load_gives_a_named_error_or_the_right_values_when_a_bit_is_wrong(
    make: Any, num_flips: int, num_workers: int, checkpoint_dir: Path
) -> None:
    """A08: over headers, payloads, directories and `.metadata` with its trailer."""
    torch.manual_seed(0)
    state = make()
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=num_workers, sync_files=False), state)
    flipper = Flipper(checkpoint_dir, seed=num_flips)
    outcomes: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(num_flips):
            path, at = flipper.flip()
            outcomes[outcome_of_load(checkpoint_dir, state, path, at)] += 1
            counts.add(BIT_FLIPS, faults=1)
            flipper.restore(path, at)
    # Padding, times and attributes of a zip mean nothing: a bit there changes no value.
    assert outcomes["CorruptCheckpointError"] > 0.5 * num_flips, outcomes
