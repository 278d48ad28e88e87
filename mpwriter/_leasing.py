"""Leasing shared memory: who gets it, who waits, and what is opened and dropped for it.

Runs in: trainer. The lower half of the arena; what is behind an extent is the upper one (_arena).

    make a plan (_admission)  ->  enter it into the books (_holdings)    with the lock
    drop what has to go, claim what is new (_segment)                    without it
    install what is new                                                  with the lock

An exception at any point, KeyboardInterrupt included, takes the plan back.

Lock: `_changed` guards the books. It is held for short steps without system calls, except for the
look at the headroom (0.1 ms); claiming takes 0.3 s a GiB, freeing 0.2 s.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from mpwriter._admission import Plan, plan_staged, plan_window
from mpwriter._allocator import slot_bytes
from mpwriter._holdings import Holdings
from mpwriter._memory import Headroom, default_budget_bytes, headroom
from mpwriter._segment import ClaimError, Segment
from mpwriter._shortage import cannot_claim, not_admitted
from mpwriter._types import Extent
from mpwriter.errors import StagingMemoryError

__all__ = ["DEFAULT_LEASE_TIMEOUT_S", "MIN_WINDOW_BYTES", "Leasing"]

logger = logging.getLogger(__name__)

# How long a staged lease waits for earlier saves where the caller says nothing.
DEFAULT_LEASE_TIMEOUT_S = 300.0

# The least that a window gets where the caller says nothing: what a write call takes.
MIN_WINDOW_BYTES = 1 << 20

# A waiting lease looks this often for what finalizers have dropped meanwhile.
_TICK_S = 0.5

# A waiting lease goes before later ones, so that it cannot starve. Those that need less than this
# part of the budget may pass: they belong to saves whose end the waiting one may depend on.
_PASSING_DIVISOR = 16


class Leasing:
    """See `Arena`, which is the only one of its kind."""

    def __init__(
        self, budget_bytes: int | None = None, *, look: Callable[[], Headroom] = headroom
    ) -> None:
        self._budget_bytes = budget_bytes
        self._look = look
        self._reset(Holdings())

    def _reset(self, holdings: Holdings) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._queue: deque[object] = deque()  # staged leases that wait, in their order
        self._dropped: deque[Sequence[Extent]] = deque()  # by finalizers, not yet taken back
        self._listeners: list[Callable[[list[int]], None]] = []
        self._holdings = holdings

    # -- leases ------------------------------------------------------------------------------

    def lease(
        self,
        nbytes: int,
        *,
        kind: Literal["staged", "window"] = "staged",
        min_nbytes: int = MIN_WINDOW_BYTES,
        budget_bytes: int | None = None,
        timeout_s: float | None = None,
    ) -> Extent:
        """Lease one extent; its start is a multiple of 64 bytes, its content is undefined.

        Args:
            nbytes: bytes wanted; 0 gives an empty extent that must be released like any other.
            kind: "staged" gets all of `nbytes`, waiting if it must. "window" never waits: where the
                budget leaves less it gets less, at least `min_nbytes`, those even above the budget.
            min_nbytes: the least that is of use; for windows only.
            budget_bytes: the budget of this lease's writer; None for the arena's own.
            timeout_s: how long a staged lease waits for others; None for 300 s, 0 not at all.

        Raises:
            StagingMemoryError: the memory is not to be had, or not in time.
        """
        if kind == "staged":
            return self.lease_many([nbytes], budget_bytes=budget_bytes, timeout_s=timeout_s)[0]
        budget = self._budget(budget_bytes)
        try:
            return self._lease_window(nbytes, min_nbytes, budget, grow=True)
        except ClaimError as exc:
            # The budget has room but the system has not: use what is there already.
            logger.info("no new memory for a copy-ahead window: %s", exc)
        try:
            return self._lease_window(nbytes, min_nbytes, budget, grow=False)
        except ClaimError as exc:
            least = slot_bytes(min(nbytes, min_nbytes))
            raise cannot_claim(least, budget, exc) from exc

    def lease_many(
        self,
        sizes: Sequence[int],
        *,
        budget_bytes: int | None = None,
        timeout_s: float | None = None,
    ) -> list[Extent]:
        """Lease one extent for each of `sizes`, all or none; under 1 us each where sizes recur.

        What released memory does not hold goes into one new segment. The same sizes get the same
        places again when everything was released in between.

        Args:
            sizes: bytes of each extent. Every extent lies in one segment.
            budget_bytes: the budget of these leases' writer; None for the arena's own.
            timeout_s: how long to wait for others to release; None for 300 s, 0 not at all.

        Raises:
            StagingMemoryError: at once where the budget or the system cannot hold the sizes
                whatever others release; after `timeout_s` where they do not release in time.

        A save that leases more while it holds extents can wait for a save that does the same: lease
        everything that is staged in one call, and windows after it.
        """
        slots = [slot_bytes(nbytes) for nbytes in sizes]
        budget = self._budget(budget_bytes)
        timeout_s = DEFAULT_LEASE_TIMEOUT_S if timeout_s is None else timeout_s
        try:
            return self._serve(lambda: self._admit(sizes, slots, budget, timeout_s))
        except ClaimError as exc:
            raise cannot_claim(sum(slots), budget, exc) from exc

    def release(self, extent: Extent) -> None:
        """Give one extent back. See `release_many`."""
        self.release_many((extent,))

    def release_many(self, extents: Iterable[Extent]) -> None:
        """Give extents back, in any order, together or one by one; waiting leases wake.

        Nobody may write to them any more, and nobody who still reads them may rely on what is
        there: the memory is handed out again, or freed.

        Raises:
            ValueError: one of them is not leased; then none of them is released.
        """
        with self._changed:
            over_budget = self._holdings.release(extents)
            self._holdings.remove(over_budget)
            self._wake()
        self._drop(over_budget)

    def release_soon(self, extents: Sequence[Extent]) -> None:
        """Give extents back from a finalizer, which may run in a thread that holds the lock.

        Where somebody holds it, the next lease does it, or one that waits, within half a second.
        """
        self._dropped.append(extents)
        if self._changed.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._changed.release()

    def _take_back(self) -> None:
        """With the lock: release what finalizers have dropped (staged extents only)."""
        while self._dropped:
            self._holdings.release(self._dropped.popleft())
            self._wake()

    # -- the whole ---------------------------------------------------------------------------

    def trim(self, keep_bytes: int = 0) -> int:
        """Drop idle segments, the largest first, until at most `keep_bytes` are claimed.

        Returns:
            The bytes given back to the system.
        """
        with self._changed:
            self._take_back()
            victims = self._holdings.idle_beyond(keep_bytes)
            self._holdings.remove(victims)
        self._drop(victims)
        return sum(segment.nbytes for segment in victims)

    def close(self) -> None:
        """Drop everything; a later lease begins anew.

        Extents that are still leased stay mapped for whoever views them, and releasing them later
        does nothing.
        """
        with self._changed:
            victims = list(self._holdings.segments.values())
            self._holdings.remove(victims)
        self._drop(victims)

    def add_listener(self, listener: Callable[[list[int]], None]) -> None:
        """Call `listener` with the numbers of segments that were dropped, so workers unmap them.

        It runs in the thread that made them go, without any lock of the arena, after their pages
        are freed. What it raises is logged. A fork of the process has no listeners.
        """
        self._listeners.append(listener)

    def forget_in_child(self) -> None:
        """In a fork: let go of the parent's memory without touching it."""
        segments = self._holdings.all_segments()
        forgotten = {segment.number for segment in segments} | self._holdings.forgotten
        # A new lock, too: a thread that the child does not have may hold the old one.
        self._reset(Holdings(forgotten))
        for segment in segments:
            segment.forget()

    # -- admission ---------------------------------------------------------------------------

    def _budget(self, budget_bytes: int | None) -> int:
        if budget_bytes is not None:
            return budget_bytes
        if self._budget_bytes is not None:
            return self._budget_bytes
        return default_budget_bytes(self._holdings.claimed_bytes)

    def _lease_window(self, nbytes: int, least: int, budget: int, *, grow: bool) -> Extent:
        def plan() -> Plan:
            ledger = self._holdings.ledger(budget, self._look)
            return plan_window(nbytes, least, ledger, frugal=bool(self._queue), grow=grow)

        return self._serve(plan)[0]

    def _admit(
        self, sizes: Sequence[int], slots: Sequence[int], budget: int, timeout_s: float
    ) -> Plan:
        """Wait, with the lock, until the lease can be served."""
        total = sum(slots)
        deadline_s = time.monotonic() + timeout_s
        ticket = object()
        self._queue.append(ticket)
        try:
            while True:
                self._take_back()
                first = self._queue[0] is ticket
                if first or total <= budget // _PASSING_DIVISOR:
                    plan = self._try_staged(sizes, slots, total, budget)
                    if plan is not None:
                        return plan
                left_s = deadline_s - time.monotonic()
                books = self._holdings
                hopeless = first and not books.leased_bytes and not books.dropping
                if hopeless or left_s <= 0:
                    raise self._not_admitted(total, budget, 0 if hopeless else timeout_s)
                self._changed.wait(min(left_s, _TICK_S))
        finally:
            self._queue.remove(ticket)
            self._wake()  # another one is the first now

    def _try_staged(
        self, sizes: Sequence[int], slots: Sequence[int], total: int, budget: int
    ) -> Plan | None:
        holdings = self._holdings
        if total > budget:
            raise self._not_admitted(total, budget, 0)
        # Leases do not move, so this is reason enough to wait. It is looked at for every extent
        # that another save releases; a plan for 20,000 sizes takes 10 ms.
        if total + holdings.leased_bytes > budget:
            return None
        ledger = holdings.ledger(budget, self._look)
        plan = plan_staged(sizes, slots, ledger)
        if plan is None and total > ledger.system_room_bytes(holdings.held_bytes()):
            raise self._not_admitted(total, budget, 0)
        return plan

    def _not_admitted(self, total: int, budget: int, waited_s: float) -> StagingMemoryError:
        return not_admitted(total, budget, self._holdings.leased_bytes, self._look(), waited_s)

    # -- carrying a plan out -----------------------------------------------------------------

    def _serve(self, make_plan: Callable[[], Plan]) -> list[Extent]:
        plan: Plan | None = None
        try:
            with self._changed:
                self._take_back()
                plan = make_plan()
                self._holdings.book(plan)
            self._drop(plan.victims)
            if plan.new is not None:
                plan.new.open(self._look)
                with self._changed:
                    self._holdings.install(plan.new)
        except BaseException:
            if plan is not None:
                self._undo(plan)
            raise
        return plan.extents

    def _undo(self, plan: Plan) -> None:
        with self._changed:
            self._holdings.undo(plan)
            self._wake()
        self._drop(plan.victims)
        if plan.new is not None:
            plan.new.forget()

    def _drop(self, victims: Sequence[Segment]) -> None:
        """Give removed segments back to the system; without the lock, as it takes 0.2 s a GiB."""
        if not victims:
            return
        for segment in victims:
            segment.drop()
        with self._changed:
            self._holdings.dropped(victims)
            self._wake()
        numbers = [segment.number for segment in victims]
        for listener in self._listeners:
            try:
                listener(numbers)
            except Exception:
                logger.exception("a listener failed for dropped segments %s", numbers)

    def _wake(self) -> None:
        if self._queue:
            self._changed.notify_all()
