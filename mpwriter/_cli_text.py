"""What `mpwriter.cli` prints, as text and for machines.

Runs in: trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mpwriter._inspect import Checkpoint, StoredFile, StoredKey
from mpwriter._verify import VerifyReport
from mpwriter.bench.table import format_bytes

__all__ = ["as_json", "report_as_json", "report_lines", "tree"]


def tree(checkpoint: Checkpoint, keys: Sequence[StoredKey], *, parts: bool) -> Iterator[str]:
    """The lines of `inspect`; with `parts`, each chunk too."""
    state = "complete" if checkpoint.is_complete else "INCOMPLETE"
    yield _one_line(checkpoint.url)
    yield f"  {state}, written by {checkpoint.writer}, save {checkpoint.save_id or 'unknown'}"
    stored = format_bytes(sum(file.nbytes or 0 for file in checkpoint.files))
    yield f"  {len(checkpoint.keys)} keys, {len(checkpoint.files)} files, {stored}"
    for problem in checkpoint.problems:
        yield _one_line(f"  ! {problem}")
    yield f"keys ({len(keys)} of {len(checkpoint.keys)})"
    shown: tuple[str, ...] = ()
    for key in keys:
        *above, last = key.key.split(".")
        shared = 0
        while shared < min(len(shown), len(above)) and shown[shared] == above[shared]:
            shared += 1
        for depth in range(shared, len(above)):
            yield _one_line("  " * (depth + 1) + above[depth])
        shown = tuple(above)
        yield _one_line("  " * (len(above) + 1) + f"{last}  {_described(key)}")
        if parts:
            for number in range(len(key.parts)):
                yield _one_line("  " * (len(above) + 2) + _located(key, number))
    yield "files"
    for file in (*checkpoint.files, *checkpoint.others):
        yield _one_line(f"  {_file_line(file)}")


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")


def _described(key: StoredKey) -> str:
    if key.shape is None:
        return f"object, {format_bytes(key.nbytes)}"
    shards = f", {len(key.parts)} shards" if len(key.parts) != 1 else ""
    return f"{key.dtype} {list(key.shape)}{shards}, {format_bytes(key.nbytes)}"


def _located(key: StoredKey, number: int) -> str:
    part = key.parts[number]
    chunk = "" if key.shape is None else f"{list(part.offsets)} {list(part.sizes)} "
    return f"{chunk}in {part.file}, {part.nbytes} bytes at {part.start}"


def _file_line(file: StoredFile) -> str:
    size = "size unknown" if file.nbytes is None else format_bytes(file.nbytes)
    items = f", {file.num_parts} items" if file.num_parts else ""
    return f"{file.name}  {size if file.exists else 'missing'}{items}, {file.kind}"


def report_lines(report: VerifyReport) -> Iterator[str]:
    """The lines of `verify`: what is wrong, what is not named, the sum."""
    checkpoint = report.checkpoint
    for finding in report.damage:
        yield _one_line(f"! {finding}")
    for file in checkpoint.others:
        yield _one_line(f"? {_file_line(file)}: no metadata names it, it was not read")
    if not checkpoint.metadata_checked and checkpoint.writer != "unknown":
        yield "? the metadata is unverified: it has no checksum"
    unverified = f", {report.num_unverified} unverified (they have no checksum)"
    yield _one_line(
        f"{checkpoint.url}: {'sound' if report.is_sound else 'DAMAGED'}: "
        f"{report.num_verified} items verified{unverified if report.num_unverified else ''}, "
        f"{len(report.damage)} findings, {format_bytes(report.nbytes)} read"
    )


def as_json(checkpoint: Checkpoint, keys: Sequence[StoredKey]) -> dict[str, Any]:
    """What `inspect --json` prints."""
    return {
        "url": checkpoint.url,
        "complete": checkpoint.is_complete,
        "problems": list(checkpoint.problems),
        "writer": checkpoint.writer,
        "save_id": checkpoint.save_id,
        "keys": {key.key: _key_as_json(key) for key in keys},
        "files": _files_as_json((*checkpoint.files, *checkpoint.others)),
    }


def _key_as_json(key: StoredKey) -> dict[str, Any]:
    return {
        "shape": None if key.shape is None else list(key.shape),
        "dtype": key.dtype,
        "nbytes": key.nbytes,
        "parts": [
            {
                "offsets": list(part.offsets),
                "sizes": list(part.sizes),
                "file": part.file,
                "start": part.start,
                "nbytes": part.nbytes,
                "transforms": list(part.descriptors),
            }
            for part in key.parts
        ],
    }


def _files_as_json(files: Sequence[StoredFile]) -> dict[str, Any]:
    return {
        file.name: {
            "exists": file.exists,
            "nbytes": file.nbytes,
            "needed_bytes": file.needed_bytes,
            "items": file.num_parts,
            "kind": file.kind,
        }
        for file in files
    }


def report_as_json(report: VerifyReport) -> dict[str, Any]:
    """What `verify --json` prints."""
    return {
        "url": report.checkpoint.url,
        "sound": report.is_sound,
        "writer": report.checkpoint.writer,
        "verified": report.num_verified,
        "unverified": report.num_unverified,
        "metadata_verified": report.checkpoint.metadata_checked,
        "nbytes": report.nbytes,
        "damage": [finding._asdict() for finding in report.damage],
        "others": _files_as_json(report.checkpoint.others),
    }
