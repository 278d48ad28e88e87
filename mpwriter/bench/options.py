"""The benchmark's command line.

Runs in: trainer. Pure.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpwriter.bench.places import parse_storage_options
from mpwriter.bench.ranks import ALONE, Ranks
from mpwriter.bench.states import STATE_NAMES
from mpwriter.bench.subjects import FAMILIES

__all__ = ["CHECKPOINTERS", "LOOPS", "PASSES", "Options", "parse_options"]

LOOPS = ("training", "matmul")
CHECKPOINTERS = ("thread", "process")
PASSES = ("timing", "cold", "memory")

_EPILOG = """\
states:   large  1 GiB in 32 tensors          small  20,000 tensors of 4 KiB
          model  GPT-2 (124M) with AdamW      tiny   one scalar: the fixed cost of a save
          medium 128 MiB in 32 tensors, for a far store (only where it is asked for)
modes:    sync   dcp.save: how long it takes
          async  dcp.async_save: what it costs a training loop that goes on meanwhile
          load   dcp.load of what MPFsspecWriter has saved, with everybody's reader
families: ours   MPFsspecWriter               fsspec, filesystem   the stock writers of torch
          s3torchconnector   AWS's own writer and reader, where --url is s3://
          plain  the bytes alone: write(2) and fsync (mode sync)
          planning, metadata   DCP with a writer that writes nothing; and pickles .metadata
passes:   timing the table                    cold   first save of a new process
          memory peak PSS of trainer and workers (Linux); all in mode sync
torchrun: torchrun --nproc-per-node 2 scripts/benchmark.py ... divides each state among the ranks,
          as FSDP2 does, and shows every rank and the job, which waits for its slowest rank;
          workers and threads are per rank, by default a share of the numbers above; not the
          passes cold and memory
"""

# Where the states, the numbers of workers and of threads, or the rounds are not given.
_LEFT_OUT = {"sync": ("medium",), "async": ("tiny", "medium"), "load": ("tiny", "medium")}
_NUMBERS = {"sync": ([1, 2, 4], [1, 2, 4]), "async": ([1, 2], [1, 4]), "load": ([2], [1])}
_QUICK_NUMBERS = {"async": ([2], [1])}
_QUICK_ROUNDS = {"sync": 2, "async": 1, "load": 2}


@dataclass(frozen=True)
class Options:
    """What to measure, and where the figures go.

    Attributes:
        mode: which kind of benchmark.
        url: parent directory of the checkpoints; None is the temporary directory.
        storage_options: for the filesystem of `url`.
        checkpointers: which of CHECKPOINTERS, mode async only.
        device: where the state and the training loop are, mode async only.
        loop: which of LOOPS the trainer runs, mode async only.
        torch_threads: of the trainer's operators, mode async only; None leaves them as they are.
        passes: which of PASSES, mode sync only.
        num_rounds: counted rounds of the timing pass.
        num_cold_rounds: fresh processes per subject of the cold pass.
        quick: small states.
        verify: load every subject's checkpoint back once and compare.
        seed: of the order within a round.
        json_path: file for all figures, or None.
        plot_path: PNG file, or None.
    """

    mode: str
    url: str | None
    storage_options: Mapping[str, Any] = field(repr=False)
    states: Sequence[str]
    families: Sequence[str]
    workers: Sequence[int]
    threads: Sequence[int]
    checkpointers: Sequence[str]
    device: str
    loop: str
    torch_threads: int | None
    passes: Sequence[str]
    num_rounds: int
    num_cold_rounds: int
    quick: bool
    verify: bool
    seed: int
    json_path: str | None
    plot_path: str | None


def parse_options(argv: Sequence[str], modes: Sequence[str], ranks: Ranks = ALONE) -> Options:
    """Read a command line.

    Args:
        argv: without the program's name.
        modes: those that there are; the first is the default.
        ranks: who runs it together; not everything can be measured over ranks.

    Raises:
        SystemExit: it makes no sense (status 2), or asked for help.
    """
    parser = _parser(modes)
    given = parser.parse_args(argv)
    try:
        storage_options = parse_storage_options(given.storage_option)
    except ValueError as error:
        parser.error(str(error))
    refusal = None if ranks.alone else _refusal(given, ranks)
    if refusal:
        parser.error(f"under torchrun: {refusal}")
    workers, threads = _NUMBERS[given.mode]
    if given.quick:
        workers, threads = _QUICK_NUMBERS.get(given.mode, (workers, threads))
    workers, threads = (_per_rank(numbers, ranks) for numbers in (workers, threads))
    return Options(
        mode=given.mode,
        url=given.url,
        storage_options=storage_options,
        states=given.states or [n for n in STATE_NAMES if n not in _LEFT_OUT.get(given.mode, ())],
        families=given.families,
        workers=given.workers or workers,
        threads=given.threads or threads,
        checkpointers=given.checkpointers,
        device=given.device,
        loop=given.loop,
        torch_threads=given.torch_threads,
        passes=given.passes or (["timing"] if given.quick or not ranks.alone else list(PASSES)),
        num_rounds=given.rounds or (_QUICK_ROUNDS[given.mode] if given.quick else 5),
        num_cold_rounds=given.cold_rounds or (1 if given.quick else 3),
        quick=given.quick,
        verify=given.verify,
        seed=given.seed,
        json_path=given.json,
        plot_path=given.plot,
    )


def _refusal(given: argparse.Namespace, ranks: Ranks) -> str | None:
    """Why the command line makes no sense over ranks, or None."""
    fresh = [name for name in given.passes or [] if name != "timing"]
    if fresh:
        return f"--passes {' '.join(fresh)}: they measure new processes, which are no ranks"
    if given.device != "cpu":
        return f"--device {given.device}: the state is divided on the CPU only"
    if given.url is None and ranks.num_local < ranks.num_ranks:
        return "ranks on several nodes need --url, a place that all of them see"
    if given.url is not None and given.url.startswith("memory:"):
        return "--url memory: every rank has another one"
    return None


def _per_rank(numbers: Sequence[int], ranks: Ranks) -> list[int]:
    """Each rank's share of workers or threads on this machine, at least one."""
    return list(dict.fromkeys(max(1, number // ranks.num_local) for number in numbers))


def _parser(modes: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmark.py",
        description="Time checkpoints of MPFsspecWriter beside torch's own writers, in one run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--mode", choices=modes, default=modes[0], help="what to measure (%(default)s)")
    add(
        "--url",
        help="any fsspec URL or directory to save below (the temporary directory); "
        "discard:// throws everything away",
    )
    add(
        "--storage-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for the filesystem of --url; repeat it; dots nest: client_kwargs.endpoint_url=...",
    )
    add("--quick", action="store_true", help="small states and few rounds: some seconds")
    add("--verify", action="store_true", help="load each writer's checkpoint back and compare")
    add("--json", metavar="FILE", help="write every figure to FILE")
    add("--plot", metavar="FILE.png", help="draw the timings (needs matplotlib)")
    add("--seed", type=int, default=0, help="of the order within a round (%(default)s)")
    add(
        "--rounds",
        type=_count,
        help="counted rounds after the first (5; quick: 2, async 1)",
    )
    add("--cold-rounds", type=_count, help="new processes per writer (3; quick: 1)")
    _add_lists(parser)
    return parser


def _add_lists(parser: argparse.ArgumentParser) -> None:
    for option, names, default, text in (
        ("--states", STATE_NAMES, None, "what is saved"),
        ("--families", FAMILIES, list(FAMILIES), "who saves it"),
        ("--checkpointers", CHECKPOINTERS, list(CHECKPOINTERS), "mode async: in a"),
    ):
        parser.add_argument(
            option, nargs="+", choices=names, default=default, metavar="NAME",
            help=f"{text}, of: {' '.join(names)} (all)",
        )  # fmt: skip
    parser.add_argument(
        "--passes", nargs="+", choices=PASSES, metavar="NAME",
        help=f"what is measured, of: {' '.join(PASSES)} (all; quick: timing)",
    )  # fmt: skip
    for option, text, numbers in (
        ("--workers", "processes of ours", "1 2"),
        ("--threads", "threads of stock", "1 4"),
    ):
        parser.add_argument(
            option, nargs="+", type=_count, metavar="N",
            help=f"numbers of {text} (sync: 1 2 4; async: {numbers})",
        )  # fmt: skip
    parser.add_argument(
        "--device", default="cpu", help="mode async: where state and training are (%(default)s)"
    )
    parser.add_argument(
        "--loop", choices=LOOPS, default=LOOPS[0],
        help="mode async: what the trainer does meanwhile (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--torch-threads", type=_count, metavar="N",
        help="mode async: threads of the trainer's operators (torch's own number)",
    )  # fmt: skip


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number
