"""The command `mpwriter`: inspect, verify, bench.

Runs in: trainer.

    mpwriter inspect URL     what a checkpoint holds; no shard is read
    mpwriter verify URL      reads all of it and compares checksums
    mpwriter bench ...       the benchmark, as scripts/benchmark.py

Exit status: 0 everything is right; 1 damaged or incomplete; 2 it cannot be read at all, or the
command line makes no sense.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from mpwriter._cli_text import as_json, report_as_json, report_lines, tree
from mpwriter._faults import error_record
from mpwriter._inspect import inspect_checkpoint
from mpwriter._redact import scrub
from mpwriter._report import ProgressLine
from mpwriter._verify import verify_checkpoint
from mpwriter.bench.main import main as bench_main
from mpwriter.bench.places import parse_storage_options
from mpwriter.errors import CorruptCheckpointError, MPWriterError

__all__ = ["main"]

RIGHT, DAMAGED, UNREADABLE = 0, 1, 2
_INTERRUPTED = 130  # as a shell tells of SIGINT

# A shorter one would strike out parts of ordinary words.
_MIN_SECRET_LENGTH = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the command line without the program's name; that of this process by default.

    Returns:
        Exit status.

    Raises:
        SystemExit: bad usage (2), or help was asked for.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "bench":
        return bench_main(argv[1:])
    given = _parser().parse_args(argv)
    secrets: tuple[str, ...] = ()
    try:
        options = parse_storage_options(given.storage_option)
        secrets = tuple(sorted(_texts_in(options), key=len, reverse=True))
        command: Callable[[Any, dict[str, Any]], int] = given.command
        return command(given, options)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except CorruptCheckpointError as error:
        return _tell(given, DAMAGED, f"damaged: {error}", secrets)
    except MPWriterError as error:
        return _tell(given, UNREADABLE, str(error), secrets)
    except Exception as error:  # a filesystem may raise anything before it is one
        return _tell(given, UNREADABLE, error_record(error, None).text, secrets)


def _texts_in(options: Any) -> Iterator[str]:
    """Every text of the storage options: none is printed, whatever an error quotes."""
    if isinstance(options, dict):
        for value in options.values():
            yield from _texts_in(value)
    elif isinstance(options, list):
        for value in options:
            yield from _texts_in(value)
    elif isinstance(options, str) and len(options) >= _MIN_SECRET_LENGTH:
        yield options


def _tell(given: Any, status: int, text: str, secrets: tuple[str, ...]) -> int:
    text, url = scrub(text, secrets), scrub(given.url, secrets)
    if given.json:
        _print([json.dumps({"url": url, "status": status, "error": text}, indent=1)])
    print(f"mpwriter: {text}" if url in text else f"mpwriter: {url}: {text}", file=sys.stderr)
    return status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Without what follows an equals sign: it may be a key that was typed in a wrong place."""
        super().error(re.sub(r"=\S+", "=***", message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="mpwriter", description="Checkpoints on any filesystem.")
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
        _print([json.dumps(as_json(checkpoint, keys), indent=1)])
    else:
        _print(tree(checkpoint, keys, parts=given.parts))
    return RIGHT if checkpoint.is_complete else DAMAGED


def _verify(given: Any, options: dict[str, Any]) -> int:
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
        _print([json.dumps(report_as_json(report), indent=1)])
    else:
        _print(report_lines(report))
    return RIGHT if report.is_sound else DAMAGED


def _print(lines: Iterable[str]) -> None:
    """Print to stdout; whoever reads it may have seen enough, which changes no status."""
    try:
        for line in lines:
            print(_printable(line))
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at its end, and would then complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _printable(text: str) -> str:
    """A key may hold anything: what moves a terminal's cursor is spelled out."""
    return "\n".join(
        line if line.isprintable() else line.encode("unicode_escape").decode()
        for line in text.split("\n")
    )


if __name__ == "__main__":
    sys.exit(main())
