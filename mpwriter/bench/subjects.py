"""What is compared: one way to store a state each.

Runs in: trainer.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from fsspec.core import url_to_fs
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageWriter

from mpwriter._compat import StockFsspecWriter
from mpwriter.bench.empty_writers import MetadataOnlyWriter, PlanningOnlyWriter
from mpwriter.bench.peer import PEER, peer_environment, peer_missing, peer_writer, serves
from mpwriter.bench.places import Place
from mpwriter.bench.states import BenchState

if TYPE_CHECKING:
    from mpwriter import MPFsspecWriter

__all__ = ["FAMILIES", "STOCK_FAMILIES", "Subject", "choose_subjects"]

STOCK_FAMILIES = ("fsspec", "filesystem")
FAMILIES = ("ours", *STOCK_FAMILIES, PEER, "plain", "planning", "metadata")


@dataclass(frozen=True)
class Subject:
    """One way to store a state.

    Attributes:
        family: one of FAMILIES.
        parallelism: workers or threads; 0 for a family that has none.
    """

    family: str
    parallelism: int = 0

    @property
    def label(self) -> str:
        """Its name in tables and JSON."""
        names = {
            "ours": "MPFsspecWriter",
            "fsspec": "FsspecWriter",
            "filesystem": "FileSystemWriter",
            PEER: "s3torchconnector",
            "plain": "plain write, fsync",
            "planning": "writes nothing",
            "metadata": "pickles .metadata",
        }
        return names[self.family] + (f" n={self.parallelism}" if self.parallelism else "")

    @property
    def writes_checkpoint(self) -> bool:
        return self.family in ("ours", PEER, *STOCK_FAMILIES)

    def missing(self) -> str | None:
        """Why it cannot save here, for its row of the table; None where it can."""
        return peer_missing() if self.family == PEER else None

    def prepare(self) -> None:
        """Import what `save` needs; starts nothing."""
        if self.family == "ours":
            _our_writer()

    def save(self, state: BenchState, place: Place, url: str) -> float:
        """Store `state` at `url`, durably, with a writer made for this save.

        Returns:
            Seconds that the pickling of the metadata took, where they are known, else 0.

        Raises:
            Whatever the writer raises.
        """
        return _SAVERS[self.family](self, state, place, url)


def choose_subjects(
    families: Sequence[str],
    workers: Sequence[int],
    threads: Sequence[int],
    *,
    local: bool,
    url: str = "",
) -> list[Subject]:
    """The subjects of a run.

    Args:
        families: which of FAMILIES; "filesystem" is left out where the place is not local, and
            the peer where it is not on S3.
        workers: numbers of worker processes for ours.
        threads: numbers of threads for the stock writers and the peer.
        local: whether the place is on a local filesystem.
        url: of the place.
    """
    chosen: list[Subject] = []
    for family in families:
        if (family == "filesystem" and not local) or (family == PEER and not serves(url)):
            continue
        if family == "ours":
            chosen += [Subject(family, number) for number in workers]
        elif family in (PEER, *STOCK_FAMILIES):
            chosen += [Subject(family, number) for number in threads]
        else:
            chosen.append(Subject(family))
    return chosen


def _our_writer() -> type[MPFsspecWriter]:
    """Imported late: a fresh process that measures a stock writer must not pay for ours."""
    from mpwriter import MPFsspecWriter

    return MPFsspecWriter


def _save_ours(subject: Subject, state: BenchState, place: Place, url: str) -> float:
    writer = _our_writer()(url, num_workers=subject.parallelism, **place.storage_options)
    return _dcp_save(state, writer)


def _save_fsspec(subject: Subject, state: BenchState, place: Place, url: str) -> float:
    writer = StockFsspecWriter(url, thread_count=subject.parallelism, **place.storage_options)
    return _dcp_save(state, writer)


def _save_filesystem(subject: Subject, state: BenchState, place: Place, url: str) -> float:
    path = url_to_fs(url, **place.storage_options)[1]
    return _dcp_save(state, FileSystemWriter(path, thread_count=subject.parallelism))


def _save_peer(subject: Subject, state: BenchState, place: Place, url: str) -> float:
    with peer_environment(place.storage_options):
        return _dcp_save(state, peer_writer(url, place.storage_options, subject.parallelism))


def _save_planning(subject: Subject, state: BenchState, place: Place, url: str) -> float:
    return _dcp_save(state, PlanningOnlyWriter())


def _save_metadata(subject: Subject, state: BenchState, place: Place, url: str) -> float:
    writer = MetadataOnlyWriter()
    _dcp_save(state, writer)
    return writer.pickle_s


def _dcp_save(state: BenchState, writer: StorageWriter) -> float:
    with warnings.catch_warnings():
        # DCP says at every save that there is no process group.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_save(state.state_dict, storage_writer=writer)
    return 0.0


def _save_plain(subject: Subject, state: BenchState, place: Place, url: str) -> float:
    """One thread, one file, the tensors' bytes one after another: no format, no planning."""
    fs, path = url_to_fs(place.own_file(url), **place.storage_options)
    if place.local_path is None:
        with fs.open(path, "wb") as stream:
            for tensor in state.tensors():
                stream.write(_bytes_of(tensor))
        return 0.0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for tensor in state.tensors():
            left = _bytes_of(tensor)
            while left:  # Linux writes at most 2 GiB less a page at once
                left = left[os.write(fd, left) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    return 0.0


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without numpy, which torch can do without."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("the plain write takes contiguous CPU tensors only")
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


_SAVERS: dict[str, Callable[[Subject, BenchState, Place, str], float]] = {
    "ours": _save_ours,
    "fsspec": _save_fsspec,
    "filesystem": _save_filesystem,
    PEER: _save_peer,
    "plain": _save_plain,
    "planning": _save_planning,
    "metadata": _save_metadata,
}
