"""Which worker a save gets, and what becomes of it afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mpwriter import _pool
from mpwriter._pool import WorkerPool, default_num_workers
from mpwriter.errors import WorkerDiedError, WorkerStartError


class FakeWorker:
    """A worker without a process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pid = 1000 + number
        self.ready = False
        self.living = True
        self.obeys = True  # ends when it is asked to
        self.calls: list[str] = []

    def alive(self) -> bool:
        return self.living

    def kill(self) -> None:
        self.calls.append("kill")
        self.living = False

    def close(self) -> None:
        self.calls.append("close")
        self.living = self.living and not self.obeys

    def wait(self, timeout_s: float) -> bool:
        self.calls.append("wait")
        return not self.living

    def forget(self) -> None:
        self.calls.append("forget")


class Started(list[FakeWorker]):
    """Every worker that was started; `refusal` is raised instead of starting the next."""

    refusal: Exception | None = None

    def start(self, number: int) -> FakeWorker:
        if self.refusal is not None:
            raise self.refusal
        self.append(FakeWorker(number))
        return self[-1]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    workers = Started()
    monkeypatch.setattr(_pool, "start_worker", workers.start)
    return workers


@pytest.fixture
def pool(started: Started) -> Any:
    return WorkerPool()


def lease_all(pool: Any, limit: int) -> list[FakeWorker]:
    """As a save of `limit` workers does."""
    taken: list[FakeWorker] = []
    while len(taken) < limit and (worker := pool.lease(limit, own=len(taken))) is not None:
        taken.append(worker)
    return taken


def test_lease_starts_workers_up_to_the_limit(pool: Any, started: Started) -> None:
    taken = lease_all(pool, 3)
    assert taken == started and len(started) == 3
    assert [worker.number for worker in taken] == [0, 1, 2]
    assert sorted(pool.pids()) == [1000, 1001, 1002]


def test_lease_takes_idle_workers_before_it_starts_others(pool: Any, started: Started) -> None:
    for worker in lease_all(pool, 2):
        pool.give_back(worker, usable=True)
    assert set(lease_all(pool, 3)) == set(started)
    assert len(started) == 3


def test_lease_gives_one_when_another_save_holds_all(pool: Any, started: Started) -> None:
    """No save waits for another's upload; it gets one worker, and goes on with that."""
    lease_all(pool, 2)
    assert len(lease_all(pool, 2)) == 1
    assert len(started) == 3
    assert len(lease_all(pool, 4)) == 1  # four are out: the limit of this save, too
    assert len(lease_all(pool, 6)) == 2


def test_lease_reaps_workers_when_they_have_died_while_idle(pool: Any, started: Started) -> None:
    first, second = lease_all(pool, 2)
    for worker in (first, second):
        pool.give_back(worker, usable=True)
    second.living = False
    assert set(lease_all(pool, 2)) == {first, started[2]}
    assert second.calls == ["kill"] and first.calls == []


def test_lease_leaves_the_pool_as_it_was_when_no_worker_starts(pool: Any, started: Started) -> None:
    started.refusal = WorkerStartError("no more")
    with pytest.raises(WorkerStartError, match="no more"):
        pool.lease(2, own=0)
    assert pool.pids() == []
    started.refusal = None
    assert len(lease_all(pool, 2)) == 2


@pytest.mark.parametrize(("usable", "living"), [(False, True), (True, False), (False, False)])
def test_give_back_kills_a_worker_when_it_is_in_an_unknown_state(
    usable: bool, living: bool, pool: Any, started: Started
) -> None:
    (worker,) = lease_all(pool, 1)
    worker.living = living
    pool.give_back(worker, usable=usable)
    assert worker.calls == ["kill"]
    assert pool.pids() == []
    assert lease_all(pool, 1) == [started[1]]


def test_give_back_keeps_as_many_as_the_largest_save_has_asked_for(
    pool: Any, started: Started
) -> None:
    first, second = lease_all(pool, 3), lease_all(pool, 1)
    assert len(started) == 4
    for worker in (*second, *first):
        pool.give_back(worker, usable=True)
    assert len(pool.pids()) == 3
    killed = [worker for worker in started if "kill" in worker.calls]
    assert killed == second  # the first to come back while three others were out
    assert len(lease_all(pool, 1)) == 1
    assert len(started) == 4


def test_start_waits_for_the_report_of_each(pool: Any, started: Started, ready: Any) -> None:
    pool.start(3)
    assert len(started) == 3 and all(worker.ready for worker in started)
    pool.start(2)
    assert len(started) == 3
    assert len(lease_all(pool, 3)) == 3 and len(started) == 3


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> dict[int, Exception]:
    """Workers report at once; those whose number is in here bring an exception."""
    errors: dict[int, Exception] = {}

    def report(worker: FakeWorker, deadline_s: float) -> None:
        if worker.number in errors:
            raise errors[worker.number]
        worker.ready = True

    monkeypatch.setattr(_pool, "_await_ready", report)
    return errors


def test_start_keeps_what_has_started_when_one_fails(
    pool: Any, started: Started, ready: dict[int, Exception]
) -> None:
    ready[1] = WorkerDiedError("it died", worker=1)
    with pytest.raises(WorkerDiedError, match="it died"):
        pool.start(3)
    # The third was never waited for: its state is not known.
    assert [worker.calls for worker in started] == [[], ["kill"], ["kill"]]
    assert pool.pids() == [1000]


def test_await_ready_gives_up_when_nothing_is_said(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 8, with a real process that never reports."""
    monkeypatch.undo()
    monkeypatch.setattr(_pool, "_WARM_UP_TIMEOUT_S", 0.1)
    monkeypatch.setattr("mpwriter._process.BOOTSTRAP", "import time; time.sleep(60)")
    silent = WorkerPool()
    with pytest.raises(WorkerStartError, match="did not start within"):
        silent.start(1)
    assert silent.pids() == []


def test_prepare_starts_what_is_missing_and_waits_for_nothing(pool: Any, started: Started) -> None:
    (held,) = lease_all(pool, 1)
    pool.prepare(3)
    assert len(started) == 3
    pool.prepare(3)
    pool.prepare(1)
    assert len(started) == 3
    pool.give_back(held, usable=True)
    assert len(pool.pids()) == 3
    assert sorted(worker.number for worker in lease_all(pool, 3)) == [0, 1, 2]
    started.refusal = WorkerStartError("no more")
    pool.prepare(4)  # the save will find out, and say it
    assert len(pool.pids()) == 3


def test_shutdown_ends_idle_workers_and_leaves_leased_ones(pool: Any, started: Started) -> None:
    leased, idle = lease_all(pool, 2)
    pool.give_back(idle, usable=True)
    pool.shutdown(1.0)
    assert idle.calls == ["close", "wait"] and leased.calls == []
    assert pool.pids() == [leased.pid]
    pool.shutdown(1.0)
    assert idle.calls == ["close", "wait"]
    pool.give_back(leased, usable=True)
    assert pool.pids() == [leased.pid]


def test_shutdown_asks_all_before_it_waits_and_kills_who_stays(
    pool: Any, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C19: one timeout for all of them together."""
    order: list[str] = []
    monkeypatch.setattr(FakeWorker, "close", lambda worker: order.append("close"))
    waits: list[float] = []
    monkeypatch.setattr(
        FakeWorker,
        "wait",
        lambda worker, timeout_s: order.append("wait") or waits.append(timeout_s),
    )
    for worker in lease_all(pool, 3):
        pool.give_back(worker, usable=True)
    pool.shutdown(0.0)
    assert order == ["close"] * 3 + ["wait"] * 3
    assert waits == [0.0] * 3
    assert [worker.calls for worker in started] == [["kill"]] * 3


def test_forget_lets_go_of_every_worker(pool: Any, started: Started) -> None:
    """In a fork of the trainer."""
    _, idle = lease_all(pool, 2)
    pool.give_back(idle, usable=True)
    pool.forget()
    assert [worker.calls for worker in started] == [["forget"], ["forget"]]


def test_pool_counts_right_when_many_threads_use_it(pool: Any, started: Started) -> None:
    """No worker is ever in two hands, and none is lost."""
    in_use: set[int] = set()
    clashes: list[int] = []
    begin = threading.Barrier(8)

    def use() -> None:
        begin.wait()
        for _ in range(200):
            taken = lease_all(pool, 2)
            for worker in taken:
                if worker.pid in in_use:
                    clashes.append(worker.pid)
                in_use.add(worker.pid)
            for worker in taken:
                in_use.discard(worker.pid)
                pool.give_back(worker, usable=True)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes
    living = [worker.pid for worker in started if worker.living]
    assert sorted(pool.pids()) == sorted(living) and 1 <= len(living) <= 2


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [
        (1, None, 1),
        (6, None, 6),
        (64, None, 8),
        (64, "8", 8),
        (64, "16", 4),
        (4, "8", 1),
        (6, "", 6),
        (6, "0", 6),
        (6, "many", 6),
    ],
)
def test_default_num_workers_is_the_ranks_share_of_the_cores(
    cores: int, ranks: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_pool, "usable_cores", lambda: cores)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert default_num_workers() == expected


def test_shutdown_makes_no_pool_when_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pool, "_pool", None)
    monkeypatch.setattr(_pool, "WorkerPool", lambda: pytest.fail("made a pool"))
    _pool.shutdown()


@pytest.mark.parametrize("cores", [1, 2, 3, 8, 64, 192])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 64])
def test_default_num_workers_of_all_ranks_fit_the_node_when_it_has_a_core_for_each(
    cores: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_pool, "usable_cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert ranks * default_num_workers() <= max(cores, ranks)
