"""Staging beside the next step: the thread that copies, and who waits for it.

Runs in: trainer.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from mpwriter._staged_state import StagedState
from mpwriter._state_staging import StateStaging

__all__ = ["StagingThread"]


class StagingThread:
    """Of one writer; starts with the first copy. Used by the thread that calls `stage`."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._copies: list[Future[None]] = []

    def copy(self, staging: StateStaging) -> Future[StagedState]:
        """Copy after what was given before.

        Args:
            staging: prepared.
        """
        self._copies = [copy for copy in self._copies if not copy.done()]
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="mpwriter-staging")
        future = self._thread.submit(staging.copy)
        self._copies.append(_without_result(future))
        return future

    def wait(self) -> None:
        """Wait for every copy so far.

        Raises:
            StagingError: one has failed.
        """
        copies, self._copies = self._copies, []
        for copy in copies:
            copy.result()

    def close(self) -> None:
        """Complete what was given, and end the thread. A later copy starts a new one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=True)


def _without_result(future: Future[StagedState]) -> Future[None]:
    """The same outcome without the staged state, which would be kept from giving memory back."""
    outcome: Future[None] = Future()

    def pass_on(done: Future[StagedState]) -> None:
        error = done.exception()
        outcome.set_result(None) if error is None else outcome.set_exception(error)

    future.add_done_callback(pass_on)
    return outcome
