#!/usr/bin/env python
"""Benchmark of MPFsspecWriter beside torch's own writers; `--help` says what it can do.

Try `benchmark.py --quick` first; then, for instance,
`benchmark.py --states large small --rounds 7 --json out.json --plot out.png`, or
`benchmark.py --url s3://bucket/dir --storage-option anon=false`. Over ranks:
`torchrun --nproc-per-node 2 scripts/benchmark.py --mode sync --states large`.
"""

import sys
from pathlib import Path

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mpwriter.bench.main import main

if __name__ == "__main__":
    sys.exit(main())
