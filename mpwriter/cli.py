"""The command `mpwriter`: inspect, verify, bench.

Runs in: trainer.

    mpwriter inspect URL     what a checkpoint holds; no shard is read
    mpwriter verify URL      reads all of it and compares checksums
    mpwriter bench ...       the benchmark, as scripts/benchmark.py

Exit status of verify: 0 sound, 1 damaged or incomplete, 2 it cannot be read at all. Of inspect: 0,
1 where the checkpoint is incomplete, 2.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mpwriter._faults import error_record
from mpwriter._inspect import Checkpoint, StoredFile, StoredKey, inspect_checkpoint
from mpwriter._report import ProgressLine
from mpwriter._verify import VerifyReport, verify_checkpoint
from mpwriter.bench.main import main as bench_main
from mpwriter.bench.places import parse_storage_options
from mpwriter.bench.table import format_bytes
from mpwriter.errors import CorruptCheckpointError, MPWriterError

__all__ = ["main"]

SOUND, DAMAGED, UNREADABLE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the command line without the program's name; that of this process by default.

    Returns:
        Exit status.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "bench":
        return bench_main(argv[1:])
    given = _parser().parse_args(argv)
    try:
        options = parse_storage_options(given.storage_option)
        command: Callable[[Any, dict[str, Any]], int] = given.command
        return command(given, options)
    except CorruptCheckpointError as error:
        print(f"damaged: {error}", file=sys.stderr)
        return DAMAGED
    except MPWriterError as error:
        print(f"{error}", file=sys.stderr)
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"{given.url}: {error_record(error, None).text}", file=sys.stderr)
    return UNREADABLE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mpwriter", description="Checkpoints on any filesystem.")
    commands = parser.add_subparsers(required=True, metavar="inspect | verify | bench")
    inspect = commands.add_parser("inspect", help="what a checkpoint holds; no shard is read")
    inspect.add_argument("--keys", metavar="PATTERN", default="*", help="only these, as in a shell")
    inspect.add_argument("--parts", action="store_true", help="each chunk, with its file")
    inspect.set_defaults(command=_inspect)
    verify = commands.add_parser("verify", help="read all of it and compare checksums")
    verify.add_argument("--workers", type=int, metavar="N", help="reads at the same time")
    verify.set_defaults(command=_verify)
    for command in (inspect, verify):
        command.add_argument("url", help="directory of the checkpoint, any fsspec URL")
        command.add_argument("--json", action="store_true", help="for machines")
        command.add_argument(
            "--storage-option", action="append", default=[], metavar="KEY=VALUE",
            help="for the filesystem; dots nest: client_kwargs.endpoint_url=http://...",
        )  # fmt: skip
    commands.add_parser("bench", help="the benchmark", add_help=False)
    return parser


def _inspect(given: Any, options: dict[str, Any]) -> int:
    checkpoint = inspect_checkpoint(given.url, **options)
    keys = [key for key in checkpoint.keys if fnmatch.fnmatchcase(key.key, given.keys)]
    if given.json:
        print(json.dumps(_as_json(checkpoint, keys), indent=1))
    else:
        for line in _tree(checkpoint, keys, parts=given.parts):
            print(line)
    return SOUND if checkpoint.is_complete else DAMAGED


def _verify(given: Any, options: dict[str, Any]) -> int:
    if given.workers is not None and given.workers < 1:
        raise ValueError("--workers is 1 or more")
    line: ProgressLine | None = None
    told = 0

    def show(done: int, total: int) -> None:
        nonlocal line, told
        if line is None:
            line = ProgressLine("verifying", total, sys.stderr.isatty())
        line.advance(done - told)
        told = done

    try:
        report = verify_checkpoint(given.url, num_workers=given.workers, on_bytes=show, **options)
    finally:
        if line is not None:
            line.close()
    if given.json:
        print(json.dumps(_report_as_json(report), indent=1))
    else:
        print("\n".join(_report_lines(report)))
    return SOUND if report.is_sound else DAMAGED


# -- text ---------------------------------------------------------------------------------------


def _tree(checkpoint: Checkpoint, keys: Sequence[StoredKey], *, parts: bool) -> list[str]:
    state = "complete" if checkpoint.is_complete else "INCOMPLETE"
    lines = [
        checkpoint.url,
        f"  {state}, written by {checkpoint.writer}, save {checkpoint.save_id or 'unknown'}",
        f"  {len(checkpoint.keys)} keys, {len(checkpoint.files)} files, "
        f"{format_bytes(sum(file.nbytes or 0 for file in checkpoint.files))}",
    ]
    lines += [f"  ! {problem}" for problem in checkpoint.problems]
    lines.append("keys")
    shown: tuple[str, ...] = ()
    for key in keys:
        *above, last = key.key.split(".")
        shared = 0
        while shared < min(len(shown), len(above)) and shown[shared] == above[shared]:
            shared += 1
        for depth in range(shared, len(above)):
            lines.append("  " * (depth + 1) + above[depth])
        shown = tuple(above)
        lines.append("  " * (len(above) + 1) + f"{last}  {_described(key)}")
        if parts:
            lines += ["  " * (len(above) + 2) + _located(key, n) for n in range(len(key.parts))]
    lines.append("files")
    lines += [f"  {_file_line(file)}" for file in (*checkpoint.files, *checkpoint.others)]
    return lines


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
    size = "missing" if file.nbytes is None else format_bytes(file.nbytes)
    items = f", {file.num_parts} items" if file.num_parts else ""
    return f"{file.name}  {size}{items}, {file.kind}"


def _report_lines(report: VerifyReport) -> list[str]:
    lines = [f"! {finding}" for finding in report.damage]
    lines += [f"  {_file_line(file)}" for file in report.checkpoint.others if file.kind != "other"]
    unverified = f", {report.num_unverified} unverified: they have no checksum"
    lines.append(
        f"{report.checkpoint.url}: {'sound' if report.is_sound else 'DAMAGED'}: "
        f"{report.num_verified} items verified{unverified if report.num_unverified else ''}, "
        f"{len(report.damage)} findings, {format_bytes(report.nbytes)} read"
    )
    return lines


# -- JSON ---------------------------------------------------------------------------------------


def _as_json(checkpoint: Checkpoint, keys: Sequence[StoredKey]) -> dict[str, Any]:
    return {
        "url": checkpoint.url,
        "complete": checkpoint.is_complete,
        "problems": list(checkpoint.problems),
        "writer": checkpoint.writer,
        "save_id": checkpoint.save_id,
        "keys": {
            key.key: {
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
                    }
                    for part in key.parts
                ],
            }
            for key in keys
        },
        "files": {
            file.name: {
                "nbytes": file.nbytes,
                "needed_bytes": file.needed_bytes,
                "items": file.num_parts,
                "kind": file.kind,
            }
            for file in (*checkpoint.files, *checkpoint.others)
        },
    }


def _report_as_json(report: VerifyReport) -> dict[str, Any]:
    return {
        "url": report.checkpoint.url,
        "sound": report.is_sound,
        "verified": report.num_verified,
        "unverified": report.num_unverified,
        "nbytes": report.nbytes,
        "damage": [finding._asdict() for finding in report.damage],
        "others": {file.name: file.kind for file in report.checkpoint.others},
    }


if __name__ == "__main__":
    sys.exit(main())
