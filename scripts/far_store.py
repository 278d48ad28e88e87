#!/usr/bin/env python
"""Saves to a store that is far away: an S3 server, a network between, and the benchmark.

    far_store.py                      128 MiB over 40 ms x 8 MB/s, 200 ms x 8 MB/s, no network
    far_store.py --links 40x8 --rounds 5 --threads 1 2 4

The server is SeaweedFS and comes with the test requirements; s3torchconnector takes part where it
is installed (`pip install 's3torchconnector[dcp]'`). A link has its delay and its bandwidth per
connection: see `wan_proxy.py`. Server and network are no part of the CPU seconds: those are of the
trainer's process and of all that it has started.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
# Runs from a checkout, installed or not.
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]

from wan_proxy import WanProxy  # noqa: E402

from mpwriter.bench.table import render_table  # noqa: E402
from tests.servers import ServerError, start_s3  # noqa: E402
from tests.servers.s3 import S3Store  # noqa: E402

_FAMILIES = ("ours", "fsspec", "s3torchconnector")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark once a link; print what each row moved and what it cost.

    Returns:
        Exit status: 0, or 2 when there is no server to save to.
    """
    given = _parser().parse_args(argv)
    results: dict[str, Any] = {}
    try:
        for link in given.links:
            # A server for each: what the last one holds in memory must not slow the next.
            with ExitStack() as stack:
                store = stack.enter_context(start_s3())
                results[link] = _benchmark(_behind(link, store, stack), given)
    except ServerError as error:
        print(error, file=sys.stderr)
        return 2
    for link, result in results.items():
        print(f"\n{_in_words(link)}\n{_table(result['states'][0])}")
    print(f"\nload: {', '.join(f'{load:.2f}' for load in os.getloadavg())}")
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=1))
    return 0


def _behind(link: str, store: S3Store, stack: ExitStack) -> S3Store:
    """The store as it is reached over a link."""
    if link == "none":
        return store
    rtt_ms, mb_per_s = map(float, link.split("x"))
    address = store.endpoint.removeprefix("http://")
    proxy = stack.enter_context(WanProxy(address, rtt_ms=rtt_ms, mb_per_s=mb_per_s))
    return store.at(f"http://127.0.0.1:{proxy.port}")


def _benchmark(store: S3Store, given: argparse.Namespace) -> Any:
    """A process of its own: the server and the network are this one's children."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "figures.json"
        command = [
            *(sys.executable, str(REPOSITORY / "scripts" / "benchmark.py")),
            *("--mode", given.mode, "--url", f"{store.root}/far", "--json", str(found)),
            *("--states", given.state, "--families", *given.families, "--passes", "timing"),
            *("--workers", *map(str, given.workers), "--threads", *map(str, given.threads)),
            *("--rounds", str(given.rounds), *(["--verify"] if given.verify else [])),
        ]
        for name in ("key", "secret"):
            command += ["--storage-option", f"{name}={store.options[name]}"]
        command += ["--storage-option", f"client_kwargs.endpoint_url={store.endpoint}"]
        subprocess.run(command, check=True)
        return json.loads(found.read_text())


def _table(state: dict[str, Any]) -> str:
    mib = state["nbytes"] / 2**20
    rows = []
    for label, figures in state.get("timing", state.get("loads", {})).items():
        wall = figures["wall_s"]
        cells = [f"{mib / seconds:.1f}" for seconds in (wall["median"], wall["high"], wall["low"])]
        cpu_s = median(_cpu_s(sample) for sample in figures["samples"])
        rows.append([label, f"{wall['median']:.2f}", *cells, f"{cpu_s * 1024 / mib:.2f}"])
    headers = ["", "median s", "MiB/s", "slowest", "fastest", "CPU s/GiB, tree"]
    missing = [f"{label}  {why}" for label, why in state.get("missing", {}).items()]
    return "\n".join([render_table(headers, rows), *missing])


def _cpu_s(sample: dict[str, Any]) -> float:
    own_s = sample["trainer_cpu_s"] if "trainer_cpu_s" in sample else sample["cpu_s"]
    return float(own_s + (sample.get("workers_cpu_s") or 0.0))


def _in_words(link: str) -> str:
    if link == "none":
        return "no network between"
    rtt_ms, mb_per_s = link.split("x")
    return f"{rtt_ms} ms, {mb_per_s} MB/s a connection"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="far_store.py", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--links", nargs="+", type=_link, default=["40x8", "200x8", "none"], metavar="MSxMB",
        help="round trip and bandwidth a connection, or none (%(default)s)")  # fmt: skip
    add("--mode", choices=("sync", "load"), default="sync", help="saves, or loads (%(default)s)")
    add("--state", default="medium", help="one of the benchmark's (%(default)s)")
    add("--families", nargs="+", default=list(_FAMILIES), metavar="NAME", help="(%(default)s)")
    add("--workers", nargs="+", type=int, default=[2], metavar="N", help="of ours")
    add("--threads", nargs="+", type=int, default=[1, 2, 4], metavar="N", help="of the others")
    add("--rounds", type=int, default=3, help="counted ones after the first (%(default)s)")
    add("--verify", action="store_true", help="load each writer's checkpoint back and compare")
    add("--json", metavar="FILE", help="write every figure to FILE")
    return parser


def _link(text: str) -> str:
    if text != "none":
        rtt_ms, mb_per_s = map(float, text.split("x"))
        if rtt_ms < 0 or mb_per_s <= 0:
            raise ValueError(text)
    return text


if __name__ == "__main__":
    sys.exit(main())
