#!/usr/bin/env python
"""Checks on a real GPU what the tests check against a stand-in, and prints one table.

    copy     GB/s of copies to the host: into plain page-locked memory, into the arena's memory
             page-locked and not
    save     states on the GPU, saved blocking, in the background and with overlapped staging, come
             back bit for bit although the trainer overwrites them as soon as it may
    load     states loaded into the GPU's memory are what was saved; GB/s of large tensors, beside
             the stock reader
    streams  values that are still being computed, on the current and on another stream, are saved
             as they will be
    locks    the arena page-locks a segment once, however often it is used, and unlocks it (D11)

Usage: device_check.py [--device cuda] [--mib 1024] [--directory DIR] [--benchmark]
Exit code: 0 if everything held, or where there is no GPU; else 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mpwriter.bench.device_checks import check_all
from mpwriter.bench.device_rig import Rig, results_table
from mpwriter.bench.machine import describe_machine
from mpwriter.bench.main import main as run_benchmark


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Checks of mpwriter on a real GPU.")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--mib", type=int, default=1024, help="size of the copies (%(default)s)")
    parser.add_argument("--directory", help="for checkpoints (default: the temporary directory)")
    parser.add_argument("--benchmark", action="store_true", help="run that of async saves, too")
    given = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(f"No GPU here (torch {torch.__version__}): nothing was checked.")
        return 0
    for name, text in describe_machine(None).items():
        print(f"{name + ':':12} {text}")
    print(f"{'GPU:':12} {torch.cuda.get_device_name(given.device)}\n")
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        results = check_all(Rig(given.device, Path(folder), given.mib << 20))
    print(results_table(results))
    if given.benchmark:
        url = ["--url", given.directory] if given.directory else []
        run_benchmark(["--mode", "async", "--device", given.device, "--rounds", "3", *url])
    return 0 if all(result.held for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
