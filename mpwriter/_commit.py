"""The commit of a checkpoint: how the new one takes the place of the old.

Runs in: trainer, in the thread that saves. On the coordinator; with use_collectives=False on every
rank, for a metadata file of its own.

    state       in the directory                                    what a load finds
    ---------   -------------------------------------------------   -----------------
    begun       old metadata, old shards                            old, or none
      |         every rank writes its shards, under names of this save
    written     + new shards, complete; durable with sync_files     old, or none
      |         every rank's results are at the coordinator
    swapping    + the new metadata under a hidden name, durable     old, or none
      |         one rename, or one put: the swap
    committed   new metadata, new shards; old shards unnamed        new
      |         old shards go, then what killed saves have left
    clean       new metadata, new shards                            new

    An error up to `written`: each rank removes its own new shards; `begun` again.
    An error in `swapping`: whose metadata is there now? The old one: the shards of every rank go.
    The new one: only the word of it was lost, and nothing is removed.
    From `committed` on nothing can fail any more: what cannot be removed is logged.

A process that is killed leaves the directory in the state that it was in.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from mpwriter import _metadata
from mpwriter._compat import DCP_VERSION
from mpwriter._faults import stale_shard_names
from mpwriter._filesystems import is_local
from mpwriter._leftovers import sweep
from mpwriter._multipart import abort_uploads
from mpwriter._storage import (
    Location,
    as_storage_error,
    file_exists,
    make_directories,
    read_file,
    remove_files,
    warn_unless_atomic,
)
from mpwriter.errors import CheckpointExistsError, MPWriterError

__all__ = ["Commit", "complete_metadata"]

logger = logging.getLogger(__name__)


def complete_metadata(
    metadata: Metadata, results: Iterable[Iterable[WriteResult]], storage_meta: StorageMeta
) -> None:
    """Put in what only the writer knows: where each item lies, and of which save it is."""
    metadata.version = DCP_VERSION
    metadata.storage_data = {
        result.index: result.storage_data for rank in results for result in rank
    }
    metadata.storage_meta = storage_meta
    _metadata.share_equal_parts(metadata)


class Commit:
    """One save's way from `begun` to `clean`, as far as the directory is concerned.

    Args:
        location: the checkpoint's directory.
        rank: whose metadata file; None for that of all ranks.
        overwrite: whether a checkpoint that is there may be replaced.
        swap: writes a file of this path and content; the old one stays until the new one is
            complete, and durable with sync_files.
        spared: first letters of the ids of the saves that are under way in this process.
    """

    def __init__(
        self,
        location: Location,
        rank: int | None,
        *,
        overwrite: bool,
        swap: Callable[[str, bytes], None],
        spared: Callable[[], set[str]] = set,
    ) -> None:
        self._location = location
        self._path = location.child(_metadata.metadata_name(rank))
        self._rank = rank
        self._overwrite = overwrite
        self._swap = swap
        self._spared = spared

    def begin(self, *, sync_files: bool) -> None:
        """Refuse what may not be overwritten, before anything is touched; make the directory.

        Raises:
            CheckpointExistsError: there is a checkpoint that may not be replaced.
            StorageError: the directory cannot be made, or not be looked into.
        """
        fs = self._location.fs
        try:
            warn_unless_atomic(fs)
            self._refuse_existing()
            make_directories(self._location, sync_files=sync_files)
        except (MPWriterError, KeyboardInterrupt):
            raise
        except Exception as exc:
            # DCP sends it to the other ranks: what cannot be pickled would leave them waiting.
            raise as_storage_error(exc, "make the directory", self._location.root, fs) from exc

    def run(self, metadata: Metadata, rank: int) -> None:
        """From `written` to `clean`.

        Args:
            metadata: complete.
            rank: this one; its shards are looked for once more.

        Raises:
            MPWriterError: the swap failed; a previous checkpoint is as before, and nothing is
                left of this one.
        """
        named = {place.relative_path for place in metadata.storage_data.values()}
        stale = self._stale_names(named) if self._overwrite else []
        try:
            self._look_for(named, rank)
            self._swap(self._path, _metadata.dumps(metadata))
        except BaseException:
            self._take_back(named)
            raise
        # Only now: until the swap they belonged to the checkpoint that was loadable.
        self.remove(*stale)
        fs, root, where = self._location.fs, self._location.root, self._location.display
        removed = sweep(fs, root, named, rank=self._rank)
        if removed:
            logger.info("Removed %d files that earlier saves have left in %s", len(removed), where)
        aborted = abort_uploads(fs, root, self._spared(), rank=self._rank)
        if aborted:
            logger.info(
                "Aborted %d uploads that earlier saves have left in %s", len(aborted), where
            )

    def remove(self, *names: str) -> None:
        """Remove shards that nothing names (any more)."""
        for name in remove_files(self._location, names):
            path = self._location.child(name)
            logger.warning("%s is not needed any more and could not be removed", path)

    def _refuse_existing(self) -> None:
        location = self._location
        of_all_ranks = location.child(_metadata.METADATA_NAME)
        if self._rank is not None and file_exists(location.fs, of_all_ranks):
            self._refuse(
                "it holds a checkpoint of all ranks, which would be loaded instead of one "
                "saved with use_collectives=False"
            )
        if self._overwrite:
            return
        # A commit of all ranks would take the place of those that ranks have made on their own.
        of_first_rank = location.child(_metadata.metadata_name(0))
        for path in {self._path, of_first_rank} if self._rank is None else {self._path}:
            if file_exists(location.fs, path):
                self._refuse("overwrite=False and it holds a checkpoint already")

    def _refuse(self, why: str) -> None:
        where = self._location.display
        raise CheckpointExistsError(f"Checkpoint already exists: {where}: {why}", path=where)

    def _look_for(self, named: set[str], rank: int) -> None:
        """Look for the shards, where a look costs nothing: on a local filesystem.

        This rank's own must be there: a clean-up of old checkpoints may have removed them. Those
        of other ranks may lie on disks of their own, on purpose or by mistake.
        """
        fs, root = self._location.fs, self._location.root
        if not is_local(fs):
            return
        own = {name for name in named if name.startswith(f"__{rank}_")}
        for path in map(self._location.child, sorted(own)):
            if not os.path.lexists(fs._strip_protocol(path)):
                gone = FileNotFoundError(errno.ENOENT, "it was removed before the commit", path)
                raise as_storage_error(gone, "commit", path, fs)
        try:
            unseen = sorted(named - own - set(os.listdir(fs._strip_protocol(root))))
        except OSError as exc:  # it may be written to, and not be listed
            logger.debug("cannot list %s: %s", self._location.display, exc)
            return
        if unseen:
            logger.warning(
                "%d shards that other ranks have written (%s first) cannot be seen in %s: if the "
                "ranks do not share that directory, this checkpoint cannot be loaded from it",
                len(unseen),
                unseen[0],
                self._location.display,
            )

    def _stale_names(self, named: set[str]) -> list[str]:
        try:
            before = read_file(self._location.fs, self._path)
        except Exception as exc:  # none, or not to be read: then there is nothing to clean up
            logger.debug("no earlier checkpoint at %s: %s", self._path, exc)
            return []
        return sorted(stale_shard_names(before) - named)

    def _take_back(self, named: set[str]) -> None:
        """The swap has failed: remove the shards of every rank, unless the new metadata is there.

        Then it did get its name, and only the word of it was lost.
        """
        try:
            current = read_file(self._location.fs, self._path)
        except (FileNotFoundError, IsADirectoryError):
            current = b""
        except Exception as exc:
            logger.debug("cannot tell what %s holds: %s", self._path, exc)
            return
        if named.isdisjoint(stale_shard_names(current)):
            remove_files(self._location, named)
