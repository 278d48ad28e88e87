"""What the clients of stores keep open does not grow with the saves."""

from __future__ import annotations

import gc
import threading

from tests.saves import open_fds, small_state, worker_pids
from tests.servers import Store
from tests.stores import assert_holds, save

_NUM_SAVES = 8


def save_and_load(store: Store, url: str, number: int) -> None:
    save(store, url, small_state(number), num_workers=1)
    assert_holds(store, url, small_state(number))


def held() -> tuple[int, int, int]:
    """Descriptors of this process and of its workers, and threads."""
    gc.collect()
    return open_fds(), sum(map(open_fds, worker_pids())), threading.active_count()


def test_connections_are_no_more_when_saves_and_loads_go_on(store: Store, url: str) -> None:
    """C23, invariant 10: new writers and readers, one directory after the other."""
    for number in range(_NUM_SAVES):
        save_and_load(store, f"{url}{number}", number)
    before = held()
    for number in range(_NUM_SAVES, 3 * _NUM_SAVES):
        save_and_load(store, f"{url}{number}", number)
    # Pools of connections breathe; a leak would be one a save at least.
    grown = [now - then for now, then in zip(held(), before)]
    assert max(grown) < _NUM_SAVES, f"descriptors, those of workers, threads: {grown}"
