"""scripts/train.py, with the fake filesystems known to fsspec; a script for torchrun."""

import runpy
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]

import tests.fakes  # noqa: E402, F401

if __name__ == "__main__":
    runpy.run_path(str(REPOSITORY / "scripts" / "train.py"), run_name="__main__")
