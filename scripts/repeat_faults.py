"""Run the checks of reliability many times in a row and add up what they have counted.

    python scripts/repeat_faults.py --repeat 20

Stops at the first run that fails. Every other run swaps the turns of the fault table: what was
tried over an old checkpoint is tried without one, and the other way round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests import counts  # noqa: E402
from tests.fault_table import ROUND_VARIABLE  # noqa: E402

CHECKS = (
    "tests/fault/test_fault_*.py",
    "tests/dist/test_fault_*.py",
    "tests/fault/test_replay*.py",
)


def main() -> int:
    """Run, and print the totals; the exit status is that of the last run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=20, help="how many runs (default: 20)")
    repeat = parser.parse_args().repeat
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as told:
        begin_s = time.monotonic()
        status = num_runs = 0
        while num_runs < repeat and not status:
            print(f"=== run {num_runs + 1} of {repeat}", flush=True)
            status = run_once(num_runs, told.name)
            num_runs += 1
        totals = add_up(told.read())
    took_s = time.monotonic() - begin_s
    print(f"=== {num_runs} runs in {took_s:.0f} s, {'FAILED' if status else 'all passed'}")
    print("\n".join(counts.lines(totals)))
    return status


def run_once(number: int, counts_path: str) -> int:
    """One run of all checks in a process of its own."""
    files = sorted(str(path) for pattern in CHECKS for path in REPOSITORY.glob(pattern))
    environment = {
        **os.environ,
        ROUND_VARIABLE: str(number % 2),
        counts.FILE_VARIABLE: counts_path,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", *files]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode


def add_up(told: str) -> dict[str, Counter[str]]:
    """The counts of all runs by name, from a line of JSON each."""
    totals: dict[str, Counter[str]] = {}
    for line in told.splitlines():
        for name, figures in json.loads(line).items():
            # update, not +: that would drop the zeros.
            totals.setdefault(name, Counter()).update(figures)
    return totals


if __name__ == "__main__":
    sys.exit(main())
