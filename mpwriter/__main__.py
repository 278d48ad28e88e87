"""`python -m mpwriter`: see `mpwriter.cli`.

Runs in: trainer.
"""

from __future__ import annotations

import sys

from mpwriter.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
