"""Files of paramiko whose writes do not wait for the answers to earlier ones.

Runs in: both. Torch-free; imports no paramiko.

By default paramiko sends 32 KiB and waits for the answer, so that a file gets 32 KiB a round trip;
on top of it Nagle's algorithm waits for the acknowledgement of a packet that the server delays. One
MB/s is what is left even without any distance.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PipelinedFile", "pipelined"]


def pipelined(file: Any) -> Any:
    """Wrap a file that was opened for writing, where it can be pipelined."""
    return PipelinedFile(file) if callable(getattr(file, "set_pipelined", None)) else file


class PipelinedFile:
    """A file of paramiko, opened for writing. An error may show in a later write or in `flush`.

    paramiko drops the answers that have not come when the file is closed, errors among them. Only a
    write that is not pipelined waits for those of the writes before it: so `flush` repeats the last
    byte as one.
    Source: SFTPFile._write; _finish_responses looks for requests that _write enters under no file.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._unanswered = b""  # the last byte of what has been written since a flush
        file.set_pipelined(True)

    def write(self, chunk: Any) -> None:
        """Send all of `chunk`.

        Raises:
            OSError: the server's answer to this write or an earlier one.
        """
        self._unanswered = bytes(chunk[-1:]) or self._unanswered
        self._file.write(chunk)

    def flush(self) -> None:
        """Wait until the server has taken everything.

        Raises:
            OSError: it has not.
        """
        self._file.flush()
        if self._unanswered:
            self._file.set_pipelined(False)
            self._file.seek(self._file.tell() - 1)
            self._file.write(self._unanswered)
            self._file.flush()
            self._file.set_pipelined(True)
            self._unanswered = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
