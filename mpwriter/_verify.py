"""Reads every stored byte of a checkpoint and compares it with its checksum.

Runs in: trainer, in threads where the filesystem lets several read.

    inspect --> units --> threads: read, check --> results --> report
                one large item, or neighbours that are read at once

Nothing of it is held: a thread has one unit of small items, or one piece of a large one. What
cannot be checked, because its file has no checksums (safetensors, stock with CRCs switched off,
raw bytes, transformed streams), is read and counted as unverified.

Threads, not processes: reading and checksums do not hold the GIL, and a process has to import
torch first, which takes longer than to verify several GiB.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpwriter._fetch_plan import SAFETENSORS_SUFFIX
from mpwriter._inspect import Checkpoint, Finding, StoredPart, inspect_checkpoint
from mpwriter._verify_units import Item, check_units

__all__ = ["Finding", "VerifyReport", "verify", "verify_checkpoint"]


@dataclass(frozen=True)
class VerifyReport:
    """What `verify_checkpoint` found.

    Attributes:
        checkpoint: as `inspect_checkpoint` gives it.
        num_verified, num_unverified: items whose checksum was right; that have none.
        nbytes: read.
        damage: everything that is wrong, missing files included.
    """

    checkpoint: Checkpoint
    num_verified: int
    num_unverified: int
    nbytes: int
    damage: tuple[Finding, ...]

    @property
    def is_sound(self) -> bool:
        return not self.damage


def verify_checkpoint(
    url: str | os.PathLike[str],
    *,
    num_workers: int | None = None,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
    **storage_options: Any,
) -> VerifyReport:
    """Read all of a checkpoint and compare checksums.

    Args:
        url: its directory, any fsspec URL; ours or stock's.
        num_workers: reads at the same time; None: as FsspecReader.
        on_bytes: called, in this thread, with bytes read so far and in all.
        **storage_options: for the filesystem.

    Raises:
        As `inspect_checkpoint`: where nothing can be said about the checkpoint at all.

    Thread safety: any thread.
    """
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"num_workers is {num_workers}, not 1 or more")
    checkpoint = inspect_checkpoint(url, **storage_options)
    files = _items_by_file(checkpoint)
    damage = [*checkpoint.findings, *_misplaced(checkpoint, files)]
    files = {name: _inside(checkpoint, name, items) for name, items in files.items()}
    total = sum(part.nbytes for items in files.values() for _, part in items)
    sizes = {file.name: file.nbytes for file in checkpoint.files}
    done = verified = unverified = 0
    for result in check_units(checkpoint.location, files, sizes, num_workers):
        done += result.nbytes
        on_bytes(done, total)
        damage += result.findings
        verified += result.num_verified
        unverified += result.num_unverified
    order = {key.key: number for number, key in enumerate(checkpoint.keys)}
    damage.sort(key=lambda finding: (finding.file, order.get(finding.key, -1)))
    return VerifyReport(checkpoint, verified, unverified, done, tuple(dict.fromkeys(damage)))


verify = verify_checkpoint
"""Its public name."""


def _items_by_file(checkpoint: Checkpoint) -> dict[str, list[Item]]:
    """What each file that is there should hold, by offset. Tied tensors share one place."""
    missing = {file.name for file in checkpoint.files if not file.exists}
    by_file: dict[str, dict[tuple[Any, ...], Item]] = {}
    for key in checkpoint.keys:
        for part in key.parts:
            if part.file not in missing:
                # Of another kind in the same place: it is to be held against both.
                spot = (part.start, part.nbytes, part.is_object, part.dtype, part.sizes)
                by_file.setdefault(part.file, {}).setdefault(spot, (key.key, part))
    return {
        name: sorted(items.values(), key=lambda item: (item[1].start, item[1].stop))
        for name, items in by_file.items()
    }


def _is_inside(part: StoredPart, nbytes: int | None) -> bool:
    return part.start >= 0 and part.nbytes >= 0 and (nbytes is None or part.stop <= nbytes)


def _inside(checkpoint: Checkpoint, name: str, items: Sequence[Item]) -> list[Item]:
    sizes = {file.name: file.nbytes for file in checkpoint.files}
    return [item for item in items if _is_inside(item[1], sizes[name])]


def _misplaced(checkpoint: Checkpoint, files: Mapping[str, Sequence[Item]]) -> Iterator[Finding]:
    """Items that do not lie in their file, or in one another; and bytes that no item has."""
    for file in checkpoint.files:
        end = 0
        for key, part in files.get(file.name, ()):
            if not _is_inside(part, file.nbytes):
                held = max(0, (file.nbytes or 0) - max(0, part.start))
                text = f"cut off: expected {part.nbytes} bytes at {part.start}, found {held}"
                yield Finding(file.name, key, text)
            elif part.start < end and part.stop != end and part.nbytes:
                text = f"expected it behind the item before, at {end}, found it at {part.start}"
                yield Finding(file.name, key, text)
            elif part.start > end and not file.name.endswith(SAFETENSORS_SUFFIX):
                yield from _surplus(checkpoint, file.name, end, part.start)
            end = max(end, part.stop)
        if file.exists and file.nbytes is not None:
            yield from _surplus(checkpoint, file.name, end, file.nbytes)


def _surplus(checkpoint: Checkpoint, name: str, start: int, stop: int) -> Iterator[Finding]:
    """Bytes of a file of ours that no item has; other writers may leave gaps."""
    if start < stop and checkpoint.writer == "mpwriter":
        yield Finding(name, "", f"expected nothing, found {stop - start} bytes at {start}")
