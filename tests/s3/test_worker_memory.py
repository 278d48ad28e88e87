"""What a worker holds while it uploads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mpwriter import warm_up
from tests import leaks
from tests.saves import small_state, worker_pids
from tests.servers import S3Store
from tests.stores import save

pytestmark = pytest.mark.slow  # hundreds of MiB

MIB = 1 << 20
_WINDOW_BYTES = 16 * MIB
# F17.
_OVER_STAGED_BYTES = 100 * 10**6


def peak_bytes(pid: int) -> int:
    """The most that a process has had in memory, what is shared with others included."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["VmHWM"].split()[0]) << 10


@pytest.mark.parametrize("options", [{}, {"default_block_size": 5_000_000}], ids=str)
def test_worker_holds_little_beside_what_is_staged(
    options: dict[str, Any], store: S3Store, url: str
) -> None:
    """F17: 320 MiB through one worker, of which it never sees more than the window at once."""
    leaks.shut_down()
    warm_up(1)
    (pid,) = worker_pids()
    save(store, f"{url}/first", small_state(1), num_workers=1)
    idle = peak_bytes(pid)
    state = {f"layer{n}": torch.full((4 * MIB,), n / 16) for n in range(20)}
    save(store, url, state, num_workers=1, per_worker_copy_ahead=_WINDOW_BYTES, **options)
    assert worker_pids() == [pid]
    grown = peak_bytes(pid) - idle
    print(f"idle {idle / MIB:.0f} MiB, {grown / MIB:.0f} MiB more")
    assert grown < _WINDOW_BYTES + _OVER_STAGED_BYTES
