#!/usr/bin/env python
"""Run a torchrun job on two nodes that are both on this machine.

    scripts/multinode.py --nproc 2 scripts/train.py --checkpoints /shared/run
    scripts/multinode.py --s3 scripts/train.py --checkpoints s3://checkpoints/run
    scripts/multinode.py --then "--steps 40" scripts/train.py --checkpoints /shared/run --steps 20
    scripts/multinode.py --cut 1 --when "step 3" scripts/train.py --checkpoints /shared/run

    node 0: network namespace            hub: the namespace of        node 1: network namespace
    agent, ranks                         this program                 agent, ranks
    eth0 10.77.0.1  ----- veth "node0" - bridge 10.77.0.254 - "node1" veth -----  eth0 10.77.0.2
                                         SeaweedFS (--s3)

Every node has an address, a torchrun agent and a rendezvous (c10d, at node 0) over the bridge;
nothing else can be reached from it, and the network of the machine is not touched. All of it goes
when this program ends. The directories of the machine are shared by both.

Where namespaces are not allowed, or with --loopback, the agents run on 127.0.0.1 and 127.0.0.2, and
a node is cut off by stopping its processes instead of its link.

Output has the node's name before each line. The exit code is 0 when both agents end with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

_INSIDE = "MULTINODE_HUB"  # set in the hub's namespace
_HUB = "10.77.0.254"
_RENDEZVOUS_PORT = 29_400  # of a namespace of its own; on loopback a free one is taken
_POLL_S = 0.05
# An agent that is cut off waits for the rendezvous' answer as long as the kernel sends its request
# again: a quarter of an hour by default, 6 s with this.
_TCP_RETRIES = 4
# The second: see train.py.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Node:
    """A place for an agent: an address, and what a command line begins with there."""

    def __init__(self, number: int, address: str, interface: str, prefix: Sequence[str]) -> None:
        self.name = f"node{number}"
        self.address, self.interface, self.prefix = address, interface, list(prefix)
        self._agent: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def start(self, options: Sequence[str], environment: dict[str, str], watch: Watch) -> None:
        """Start the agent; its output and its ranks' is shown and watched."""
        self._agent = subprocess.Popen(
            [*self.prefix, sys.executable, "-m", "torch.distributed.run",
             f"--local-addr={self.address}", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**environment, "GLOO_SOCKET_IFNAME": self.interface,
                 "NCCL_SOCKET_IFNAME": self.interface},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._show, args=(watch,), daemon=True)
        self._reader.start()

    def _show(self, watch: Watch) -> None:
        assert self._agent is not None and self._agent.stdout is not None
        for line in self._agent.stdout:
            print(f"{self.name}| {line}", end="", flush=True)
            watch.look(line)

    def ended(self) -> int | None:
        """Exit code of the agent."""
        assert self._agent is not None
        return self._agent.poll()

    def processes(self) -> list[psutil.Process]:
        """Agent, ranks and their workers."""
        if self._agent is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            agent = psutil.Process(self._agent.pid)
            return [agent, *agent.children(recursive=True)]
        return []

    def signal(self, number: int) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        if self._agent is not None:
            self._agent.wait()


class Watch:
    """Tells when a text has been seen in the output of any node."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.seen = threading.Event()

    def look(self, line: str) -> None:
        if self._text and self._text in line:
            self.seen.set()


def main() -> int:
    given = parse()
    if not given.loopback and _INSIDE not in os.environ:
        enter_hub()
        print("network namespaces are not allowed here: on loopback instead", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        places = nodes_in_namespaces if make_hub() else nodes_on_loopback
        environment = {**os.environ, **_ENVIRONMENT}
        if given.s3:
            environment |= stack.enter_context(s3_server())
        with places(swap=False) as nodes:
            code = run(given, nodes, environment)
        if given.then is not None:
            given.command += shlex.split(given.then)
            with places(swap=True) as nodes:
                code = max(code, run(given, nodes, environment))
    return code


def run(given: argparse.Namespace, nodes: list[Node], environment: dict[str, str]) -> int:
    """Start the agents, cut one off when its time has come, wait for both, end what is left."""
    with contextlib.ExitStack() as stack:
        for node in nodes:
            stack.callback(node.close)
        return _run(given, nodes, environment)


def _run(given: argparse.Namespace, nodes: list[Node], environment: dict[str, str]) -> int:
    watch = Watch(given.when)
    endpoint = f"{nodes[0].address}:{rendezvous_port()}"
    where = " and ".join(f"{node.name} at {node.address}" for node in nodes)
    print(
        f"starting {where}, {given.nproc} ranks each; to be over within {given.limit_s:g} s",
        flush=True,
    )
    for number, node in enumerate(nodes):
        node.start(agent_options(given, endpoint, is_host=number == 0), environment, watch)
    end_s = time.monotonic() + given.limit_s
    cut_off = None
    codes: dict[str, int] = {}
    while len(codes) < len(nodes):
        if given.cut is not None and cut_off is None and watch.seen.is_set():
            cut_off = nodes[given.cut]
            cut(cut_off)
        for node in nodes:
            code = node.ended()
            if code is not None and node.name not in codes:
                codes[node.name] = code
                print(f"{node.name} ended with {code}", flush=True)
        if cut_off is not None and set(codes) == {n.name for n in nodes} - {cut_off.name}:
            cut_off.signal(signal.SIGCONT)  # of no effect where it is its link that was cut
        if time.monotonic() > end_s:
            print(f"not over after {given.limit_s:g} s", flush=True)
            return 124
        time.sleep(_POLL_S)
    return int(any(codes.values()))


def agent_options(given: argparse.Namespace, endpoint: str, *, is_host: bool) -> list[str]:
    # Of the rendezvous' own requests; what they wait for beyond that is the other node.
    conf = f"is_host={int(is_host)},timeout={given.limit_s:g},read_timeout={given.store_timeout_s}"
    return [
        "--nnodes=2", f"--nproc-per-node={given.nproc}", f"--max-restarts={given.max_restarts}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=multinode",
        f"--rdzv-conf={conf}", *given.command,
    ]  # fmt: skip


# -- places -------------------------------------------------------------------------------------


def enter_hub() -> None:
    """Become the same program in a network namespace of its own; return where that is forbidden."""
    flags = ["--net"] if os.geteuid() == 0 else ["--net", "--map-root-user"]
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return
    probe = "ip link add probe type veth peer name eborp"
    allowed = subprocess.run(["unshare", *flags, "sh", "-c", probe], capture_output=True)
    if allowed.returncode == 0:
        os.environ[_INSIDE] = "1"
        os.execvp("unshare", ["unshare", *flags, sys.executable, *sys.argv])


def make_hub() -> bool:
    """Set up this program's namespace, if it has one."""
    if _INSIDE not in os.environ:
        return False
    for command in (
        "ip link set lo up",
        "ip link add hub type bridge",
        f"ip address add {_HUB}/24 dev hub",
        "ip link set hub up",
    ):
        subprocess.run(command.split(), check=True)
    return True


@contextlib.contextmanager
def nodes_in_namespaces(*, swap: bool) -> Iterator[list[Node]]:
    """Two namespaces on a bridge. What is made is gone with the processes that are in it."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_namespace(n, a)) for n, a in enumerate(addresses(swap))]


@contextlib.contextmanager
def _namespace(number: int, last: int) -> Iterator[Node]:
    # A namespace lives as long as a process in it: this one reads until its end is closed.
    keeper = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
    try:
        space = Path(f"/proc/{keeper.pid}/ns/net")
        ours = os.readlink("/proc/self/ns/net")
        while os.readlink(space) == ours:
            assert keeper.poll() is None, "unshare has ended"
            time.sleep(_POLL_S)
        prefix, address = ["nsenter", f"--net={space}"], f"10.77.0.{last}"
        for command in (
            [*f"ip link add node{number} type veth peer name eth0 netns {keeper.pid}".split()],
            [*f"ip link set node{number} master hub up".split()],
            [*prefix, *f"ip address add {address}/24 dev eth0".split()],
            [*prefix, *"ip link set eth0 up".split()],
            [*prefix, *"ip link set lo up".split()],
            [*prefix, "sh", "-c", f"echo {_TCP_RETRIES} > /proc/sys/net/ipv4/tcp_retries2"],
        ):
            subprocess.run(command, check=True)
        yield Node(number, address, "eth0", prefix)
    finally:
        # With its namespace it would go, too, but some time later.
        subprocess.run(f"ip link delete node{number}".split(), check=False)
        keeper.communicate()


@contextlib.contextmanager
def nodes_on_loopback(*, swap: bool) -> Iterator[list[Node]]:
    yield [Node(n, f"127.0.0.{last}", "lo", []) for n, last in enumerate(addresses(swap))]


def addresses(swap: bool) -> tuple[int, int]:
    """Last parts of the nodes' addresses: c10d gives the first ranks to the lowest one."""
    return (2, 1) if swap else (1, 2)


def cut(node: Node) -> None:
    """No packet comes from a node any more, nor gets there."""
    print(f"{node.name} is cut off", flush=True)
    if _INSIDE in os.environ:
        subprocess.run(f"ip link set {node.name} down".split(), check=True)
    else:
        node.signal(signal.SIGSTOP)


def rendezvous_port() -> int:
    from tests.servers.process import free_ports

    return _RENDEZVOUS_PORT if _INSIDE in os.environ else free_ports(1)[0]


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """SeaweedFS at the hub; yields what points s3fs to it, in any process."""
    from tests.servers import start_s3

    with start_s3(address=_HUB if _INSIDE in os.environ else "127.0.0.1") as store:
        yield {
            "FSSPEC_S3_KEY": store.options["key"],
            "FSSPEC_S3_SECRET": store.options["secret"],
            "FSSPEC_S3_ENDPOINT_URL": store.endpoint,
        }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--nproc", type=int, default=1, help="ranks per node (%(default)s)")
    add("--max-restarts", type=int, default=0)
    add("--s3", action="store_true", help="start an S3 server with the bucket `checkpoints`")
    add("--then", help="run once more, the nodes' ranks swapped, with these arguments added")
    add("--cut", type=int, choices=(0, 1), help="node to cut off")
    add("--when", default="", help="cut it off when this text is in the output of a node")
    add("--loopback", action="store_true", help="no namespaces")
    add("--store-timeout-s", type=int, default=60, help="of requests to the rendezvous")
    add("--limit-s", type=float, default=600, help="give up after this time")
    add("command", nargs=argparse.REMAINDER, help="script and its arguments")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
