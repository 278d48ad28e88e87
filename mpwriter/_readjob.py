"""Reads ranges of files for one load of the trainer.

Runs in: worker. Torch-free.

    StartReads -> ReadJob(...)     a few threads, for requests to be on their way side by side
    ReadRange  -> ReadJob.read()   one of them asks the store and fills the mapped segment
    EndReads   -> ReadJob.close()  nothing more is asked for

Answers come from the threads, in any order.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable

from mpwriter._faults import error_record
from mpwriter._ranges import RemoteFile
from mpwriter._types import Message, RangeFailed, RangeRead, ReadRange, StartReads

__all__ = ["ReadJob"]

_Entry = tuple[ReadRange, memoryview]


class ReadJob:
    """Serves the requests of one load.

    Args:
        start: which filesystem, and how many requests at once.
        answer: takes the answers; called from several threads.

    Raises:
        Exception: the filesystem is not to be had in this process.
    """

    def __init__(self, start: StartReads, answer: Callable[[Message], None]) -> None:
        self.number = start.job
        self._filesystem = pickle.loads(start.filesystem)
        self._answer = answer
        self._entries: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._closed = False
        self._num_threads = start.num_requests
        for number in range(self._num_threads):
            name = f"mpwriter-read-{number}"
            threading.Thread(target=self._serve, name=name, daemon=True).start()

    def read(self, request: ReadRange, view: memoryview) -> None:
        """Fill `view`; the answer comes later."""
        self._entries.put((request, view))

    def close(self) -> None:
        """Ask the store for nothing more. Every request is answered all the same."""
        self._closed = True
        for _ in range(self._num_threads):
            self._entries.put(None)

    def _serve(self) -> None:
        while (entry := self._entries.get()) is not None:
            self._answer(self._answer_to(*entry))
            del entry  # its view, which keeps a mapping alive

    def _answer_to(self, request: ReadRange, view: memoryview) -> Message:
        fs = self._filesystem
        if self._closed:
            return RangeRead(request.job, request.number, 0)
        try:
            count = RemoteFile(fs, request.path).read_into(request.start, view)
        except BaseException as exc:  # the trainer is the one to decide what becomes of it
            return RangeFailed(request.job, request.number, error_record(exc, request.path, fs=fs))
        return RangeRead(request.job, request.number, count)
