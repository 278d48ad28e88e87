"""The command as a process: exit status, pipes, memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from mpwriter import MPFsspecWriter
from tests.states import save_with, shard_names

MIB = 2**20


def mpwriter(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mpwriter", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50)


@pytest.fixture
def ours(checkpoint_dir: Path) -> Path:
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=2), {"a": torch.ones(100), "b": 1})
    return checkpoint_dir


@pytest.mark.parametrize(
    ("damage", "status"), [("none", 0), ("bit", 1), ("missing", 1), ("all", 2), ("usage", 2)]
)
def test_verify_ends_with_its_status_when_it_is_a_process(
    damage: str, status: int, ours: Path
) -> None:
    shard = ours / shard_names(ours)[0]
    if damage == "bit":
        content = bytearray(shard.read_bytes())
        content[1] ^= 1
        shard.write_bytes(content)
    elif damage == "missing":
        shard.unlink()
    elif damage == "all":
        for path in ours.iterdir():
            path.unlink()
    ran = mpwriter("verify", ours, *(["--no-such-option"] if damage == "usage" else []))
    assert ran.returncode == status, ran.stderr
    assert "Traceback" not in ran.stderr
    if damage in ("bit", "missing"):
        assert shard.name in ran.stdout
    assert damage != "none" or ran.stderr == ""


def test_inspect_keeps_its_status_when_nobody_reads_on(ours: Path) -> None:
    """As in `mpwriter inspect URL | head -1`."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "mpwriter", "inspect", str(ours)]
    with open(write, "wb") as pipe:
        ran = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, timeout=50)
    assert (ran.returncode, ran.stderr) == (0, b"")


PEAK_OF_VERIFY = """
import sys
from mpwriter import verify

def peak_kib():
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1])

small, *large = sys.argv[1:]
verify(small)
before = peak_kib()
for folder in large:
    assert verify(folder, num_workers=2).is_sound
print(peak_kib() - before)
"""


def test_verify_keeps_its_memory_when_shards_are_large(ours: Path, tmp_path: Path) -> None:
    """All memory of the process, mappings too: 200 MiB in one tensor, and in one object."""
    tensor = torch.zeros(200 * MIB // 4)
    save_with(MPFsspecWriter(tmp_path / "ours"), {"x": tensor})
    save_with(
        FileSystemWriter(tmp_path / "stock"), {"x": tuple(t.clone() for t in tensor.split(MIB))}
    )
    del tensor
    command = [sys.executable, "-c", PEAK_OF_VERIFY, ours, tmp_path / "ours", tmp_path / "stock"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    assert int(ran.stdout) < 32 * 1024
