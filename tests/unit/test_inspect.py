"""What `inspect` and `verify` say of sound, unfinished and damaged checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from mpwriter import MPFsspecWriter, cli
from mpwriter._compat import HAS_RANK_METADATA, SerializationFormat, StockFsspecWriter
from mpwriter._inspect import Checkpoint, inspect_checkpoint
from mpwriter._verify import verify_checkpoint
from mpwriter.errors import CorruptCheckpointError, IncompleteCheckpointError
from tests.states import save_with, shard_names

MIB = 2**20


def state() -> dict[str, Any]:
    weight = torch.randn(300, 5)
    return {
        "model": {"embedding": weight, "head": weight, "bias": torch.randn(7).to(torch.bfloat16)},
        "large": torch.randn(5 * MIB // 4),
        "empty": torch.empty(0, 3),
        "step": 17,
        "names": ["a", "b"],
    }


WRITERS: dict[str, Any] = {
    "ours": lambda path: MPFsspecWriter(path, num_workers=2),
    "ours, many files": lambda path: MPFsspecWriter(path, single_file_per_rank=False),
    "stock, 1 thread": lambda path: StockFsspecWriter(path),
    "stock, 4 threads": lambda path: StockFsspecWriter(path, thread_count=4),
    "filesystem": lambda path: FileSystemWriter(path),
}


@pytest.fixture(params=WRITERS)
def saved(request: pytest.FixtureRequest, checkpoint_dir: Path) -> Path:
    save_with(WRITERS[request.param](checkpoint_dir), state())
    return checkpoint_dir


@pytest.fixture
def ours(checkpoint_dir: Path) -> Path:
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=2), state())
    return checkpoint_dir


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def part_of(checkpoint: Checkpoint, key: str) -> Any:
    (found,) = [found for found in checkpoint.keys if found.key == key]
    return found.parts[0]


# -- inspect ------------------------------------------------------------------------------------


def test_inspect_tells_keys_and_files(saved: Path) -> None:
    checkpoint = inspect_checkpoint(saved)
    assert checkpoint.is_complete
    assert {key.key: (key.shape, key.dtype) for key in checkpoint.keys} == {
        "model.embedding": ((300, 5), "float32"),
        "model.head": ((300, 5), "float32"),
        "model.bias": ((7,), "bfloat16"),
        "large": ((5 * MIB // 4,), "float32"),
        "empty": ((0, 3), "float32"),
        "step": (None, None),
        "names": (None, None),
    }
    assert [file.name for file in checkpoint.files] == shard_names(saved)
    for file in checkpoint.files:
        assert file.nbytes == (saved / file.name).stat().st_size >= file.needed_bytes > 0
    assert checkpoint.others == ()
    assert checkpoint.save_id is not None


def test_inspect_tells_who_wrote_it(checkpoint_dir: Path, tmp_path: Path) -> None:
    save_with(MPFsspecWriter(checkpoint_dir), state())
    assert inspect_checkpoint(checkpoint_dir).writer == "mpwriter"
    save_with(StockFsspecWriter(tmp_path / "stock"), state())
    assert inspect_checkpoint(tmp_path / "stock").writer == "stock"
    save_with(MPFsspecWriter(tmp_path / "empty"), {})
    assert inspect_checkpoint(tmp_path / "empty").writer == "mpwriter"


def test_inspect_says_what_is_missing(saved: Path) -> None:
    """B02."""
    lost, *rest = shard_names(saved)
    os.truncate(saved / rest[0], 10) if rest else None
    (saved / lost).unlink()
    checkpoint = inspect_checkpoint(saved)
    assert not checkpoint.is_complete
    assert any(lost in problem and "missing" in problem for problem in checkpoint.problems)
    assert not rest or any(rest[0] in p and "cut off" in p for p in checkpoint.problems)


def test_inspect_takes_a_directory_without_metadata(ours: Path) -> None:
    """B02: what a save that was killed has left."""
    (ours / ".metadata").unlink()
    (ours / "notes.txt").touch()
    checkpoint = inspect_checkpoint(ours)
    assert checkpoint.problems == ("there is no .metadata",)
    kinds = {file.name: file.kind for file in checkpoint.others}
    assert kinds.pop("notes.txt") == "other"
    assert set(kinds.values()) == {"shard of another save"}


@pytest.mark.parametrize("there", [False, True])
def test_inspect_raises_when_there_is_nothing(there: bool, checkpoint_dir: Path) -> None:
    if there:
        checkpoint_dir.mkdir()
    with pytest.raises(IncompleteCheckpointError, match=str(checkpoint_dir)):
        inspect_checkpoint(checkpoint_dir)


@pytest.mark.skipif(not HAS_RANK_METADATA, reason="this torch always uses collectives")
def test_inspect_reads_the_metadata_of_ranks(checkpoint_dir: Path) -> None:
    """Invariant 17."""
    writer = MPFsspecWriter(checkpoint_dir)
    dcp.save(state(), storage_writer=writer, no_dist=True, use_collectives=False)
    assert not (checkpoint_dir / ".metadata").exists()
    assert inspect_checkpoint(checkpoint_dir).is_complete
    assert verify_checkpoint(checkpoint_dir).is_sound


# -- verify -------------------------------------------------------------------------------------


def test_verify_finds_a_sound_checkpoint_sound(saved: Path) -> None:
    told: list[tuple[int, int]] = []
    report = verify_checkpoint(saved, on_bytes=lambda done, total: told.append((done, total)))
    assert report.is_sound and report.num_unverified == 0
    assert report.num_verified == len(told) > 0
    assert told[-1][0] == told[-1][1] == report.nbytes


# Not everywhere: padding, times and attributes of a zip mean nothing.
@pytest.mark.parametrize(
    ("key", "where"),
    [("large", 0.0), ("large", 0.25), ("large", 0.99), ("model.bias", 0.0), ("step", 0.0)],
)
def test_verify_names_the_key_when_a_bit_is_wrong(key: str, where: float, saved: Path) -> None:
    part = part_of(inspect_checkpoint(saved), key)
    flip(saved / part.file, part.start + int(where * part.nbytes))
    report = verify_checkpoint(saved)
    assert [(finding.file, finding.key) for finding in report.damage] == [(part.file, key)]
    assert report.num_verified > 0


def test_verify_tells_missing_and_short_files(saved: Path) -> None:
    """A08."""
    names = shard_names(saved)
    os.truncate(saved / names[-1], (saved / names[-1]).stat().st_size - 1)
    if len(names) > 1:
        (saved / names[0]).unlink()
    report = verify_checkpoint(saved)
    texts = [str(finding) for finding in report.damage]
    assert any(names[-1] in text and "cut off" in text for text in texts)
    assert len(names) == 1 or any(names[0] in text and "missing" in text for text in texts)


def test_verify_raises_when_the_metadata_is_damaged(ours: Path) -> None:
    flip(ours / ".metadata", 100)
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata"):
        verify_checkpoint(ours)


def test_verify_counts_as_unverified_what_has_no_checksum(checkpoint_dir: Path) -> None:
    """Stock with CRCs switched off: its files say 0 everywhere, which is not damage."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        save_with(StockFsspecWriter(checkpoint_dir), state())
    finally:
        torch.serialization.set_crc32_options(before)
    report = verify_checkpoint(checkpoint_dir)
    assert report.is_sound and report.num_verified == 0 and report.num_unverified > 0


def test_verify_reads_safetensors_as_unverified(checkpoint_dir: Path) -> None:
    options = {"serialization_format": SerializationFormat.SAFETENSORS}
    save_with(MPFsspecWriter(checkpoint_dir, **options), state())
    report = verify_checkpoint(checkpoint_dir)
    assert report.is_sound and report.num_unverified >= 4 and report.num_verified == 2


def test_verify_holds_a_few_pieces_only(checkpoint_dir: Path) -> None:
    """Of our large containers and of stock's."""
    for writer in (MPFsspecWriter(checkpoint_dir / "a"), StockFsspecWriter(checkpoint_dir / "b")):
        save_with(writer, {"large": torch.zeros(64 * MIB // 4)})
    verify_checkpoint(checkpoint_dir / "a")  # imports
    tracemalloc.start()
    try:
        for name in ("a", "b"):
            assert verify_checkpoint(checkpoint_dir / name).is_sound
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


def test_verify_works_where_one_thread_has_to_read() -> None:
    save_with(MPFsspecWriter("memory://inspected"), state())
    assert verify_checkpoint("memory://inspected").is_sound


# -- the command --------------------------------------------------------------------------------


def test_command_prints_a_tree(ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(ours), "--keys", "model.*", "--parts"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(ours) and "complete" in lines[1]
    assert "    bias  bfloat16 [7], 700 B" in [line.split(",")[0] + ", 700 B" for line in lines]
    assert not [line for line in lines if line.startswith("  step")]
    assert [line for line in lines if line.startswith("      [0] [7] in __0_")]


def test_command_speaks_json(ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(ours), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["complete"] and told["keys"]["large"]["shape"] == [5 * MIB // 4]
    assert cli.main(["verify", str(ours), "--json", "--workers", "1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["sound"] and told["damage"] == []


@pytest.mark.parametrize(
    ("damage", "status"), [("none", 0), ("bit", 1), ("lost", 1), ("metadata", 1), ("all", 2)]
)
def test_command_ends_with_its_status(
    damage: str, status: int, ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = ours / shard_names(ours)[0]
    if damage == "bit":
        flip(shard, 300)
    elif damage == "lost":
        shard.unlink()
    elif damage == "metadata":
        flip(ours / ".metadata", 50)
    elif damage == "all":
        for path in ours.iterdir():
            path.unlink()
    assert cli.main(["verify", str(ours)]) == status
    told = capsys.readouterr()
    if damage in ("bit", "lost"):
        assert shard.name in told.out
    assert str(ours) in told.out + told.err


def test_command_refuses_what_makes_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "nosuchprotocol://x"]) == 2
    assert cli.main(["verify", "/x", "--storage-option", "nothing"]) == 2
    assert cli.main(["verify", "/x", "--workers", "0"]) == 2
    with pytest.raises(SystemExit) as ended:
        cli.main(["look"])
    assert ended.value.code == 2
    assert "nosuchprotocol" in capsys.readouterr().err


def test_command_is_also_a_module(ours: Path) -> None:
    command = [sys.executable, "-m", "mpwriter", "inspect", str(ours), "--json"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=50)
    assert json.loads(ran.stdout)["writer"] == "mpwriter"
