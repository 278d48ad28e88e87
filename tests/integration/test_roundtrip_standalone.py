"""A checkpoint needs nothing of mpwriter, and tells nothing of who wrote it."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from mpwriter import FsspecReader, MPFsspecWriter, SerializationFormat
from mpwriter._compat import StockFsspecWriter
from tests.containers import stock_dtypes
from tests.extensions import Mask
from tests.fakes import FaultPlan
from tests.saves import names_in
from tests.states import (
    Tied,
    assert_same,
    blank,
    load_into,
    mixed_items,
    outcome,
    random_bits,
    save_with,
)

# -- without mpwriter ------------------------------------------------------------------------

_FOREIGN = """
import importlib.util, os, sys
folders = sys.argv[1:]
# The editable install is an entry of the path like any other.
sys.path[:] = [entry for entry in sys.path if not os.path.isdir(os.path.join(entry, "mpwriter"))]
assert importlib.util.find_spec("mpwriter") is None
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

for folder in folders:
    for number, reader in enumerate((FsspecReader, dcp.FileSystemReader)):
        state = {}
        _load_state_dict(
            state, reader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True
        )
        torch.save(state, f"{folder}.{number}.pt")
assert not [name for name in sys.modules if name.startswith("mpwriter")]
"""


@pytest.mark.timeout(120)
def test_checkpoint_loads_where_mpwriter_is_not_installed(tmp_path: Path) -> None:
    """Invariant 2: by both stock readers, in a process that cannot import it."""
    state = {
        **mixed_items(20),
        **Tied().state_dict(),
        "nested": {"list": [torch.ones(3), {"lr": 0.5}]},
        "dtypes": {
            name: random_bits(getattr(torch, name), (3, 2))
            for name in stock_dtypes()
            if not name.startswith("bits")  # refused by DCP's planning
        },
    }
    save_with(MPFsspecWriter(tmp_path / "plain", num_workers=3), state)
    save_with(MPFsspecWriter(tmp_path / "files", False, num_workers=2), state)
    save_with(MPFsspecWriter(tmp_path / "zstd", num_workers=2, _extensions=[ZStandard()]), state)
    folders = [str(tmp_path / name) for name in ("plain", "files", "zstd")]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-c", _FOREIGN, *folders],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    for folder in folders:
        for number in range(2):
            loaded = torch.load(f"{folder}.{number}.pt", weights_only=False)
            assert_same(loaded, state, f"{folder} {number}")


# -- what the metadata names -------------------------------------------------------------------


def _globals_of(raw: bytes) -> set[tuple[str, str]]:
    """Every (module, name) that a pickle looks up, by reading its opcodes."""
    found = set()
    memo: dict[int, Any] = {}
    pushed: list[Any] = []  # what each opcode has left on the stack, as far as it is text
    for opcode, argument, _ in pickletools.genops(raw):
        if opcode.name == "MEMOIZE":
            memo[len(memo)] = pushed[-1]
            continue
        if opcode.name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = pushed[-1]
            continue
        if opcode.name == "GLOBAL":
            module, name = argument.split(" ", 1)
            found.add((module, name))
        elif opcode.name == "STACK_GLOBAL":
            found.add((pushed[-2], pushed[-1]))
        elif opcode.name in ("INST", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"):
            raise AssertionError(opcode.name)
        if opcode.name in ("BINGET", "LONG_BINGET"):
            pushed.append(memo.get(argument))
        else:
            pushed.append(argument if isinstance(argument, str) else None)
    return found


class _Recorder(pickle.Unpickler):
    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw))
        self.found: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.found.add((module, name))
        return super().find_class(module, name)


def _is_everywhere(module: str) -> bool:
    root = module.partition(".")[0]
    return root == "torch" or root in sys.stdlib_module_names or root == "builtins"


class _Own:
    pass


class _OwnPlanner(DefaultSavePlanner):
    """Leaves an object of the trainer's own class in the plan."""

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data["own"] = _Own()
        return plans, metadata


@pytest.fixture(params=["plain", "files", "extension", "safetensors"])
def written(request: pytest.FixtureRequest, checkpoint_dir: Path) -> bytes:
    """The metadata of a checkpoint of every kind."""
    options: dict[str, Any] = {
        "plain": {},
        "files": {"single_file_per_rank": False},
        "extension": {"_extensions": [Mask(7)]},
        "safetensors": {"serialization_format": SerializationFormat.SAFETENSORS},
    }[request.param]
    state = {
        **mixed_items(20),
        **Tied().state_dict(),
        "nested": {1: {"list": [torch.ones(3), {"lr": 0.5}]}},
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "own": _Own,
    }
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=2, **options), state)
    return (checkpoint_dir / ".metadata").read_bytes()


def test_metadata_names_only_torch_and_the_standard_library(written: bytes) -> None:
    """Invariant 2: read from the opcodes, held against what unpickling looks up."""
    found = _globals_of(written)
    recorder = _Recorder(written)
    recorder.load()
    assert found == recorder.found
    assert len(found) >= 8
    assert {pair for pair in found if not _is_everywhere(pair[0])} == set()


def test_metadata_names_no_class_that_stock_does_not_name(tmp_path: Path) -> None:
    state = {**mixed_items(20), "nested": {"list": [torch.ones(3), {"lr": 0.5}]}}
    save_with(MPFsspecWriter(tmp_path / "ours", num_workers=2), state)
    save_with(StockFsspecWriter(str(tmp_path / "stock")), state)
    ours, stock = (
        _globals_of((tmp_path / n / ".metadata").read_bytes()) for n in ("ours", "stock")
    )
    assert ours <= stock


def test_save_refuses_a_planner_whose_metadata_would_need_its_code(checkpoint_dir: Path) -> None:
    """Or nobody without that code could load anything of it."""
    writer = MPFsspecWriter(checkpoint_dir, num_workers=1)
    found = outcome(lambda: save_with(writer, {"a": torch.ones(2)}, _OwnPlanner()))
    assert isinstance(found, tuple)
    assert "_Own" in found[1]
    assert names_in(checkpoint_dir) == []


# -- what nobody must know ---------------------------------------------------------------------

_SECRETS = ("hunter2", "alice", "s3cr3t-t0ken")


def test_checkpoint_holds_no_credentials(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Invariants 2, 13: not of the URL, not of the options; in no file, log line or report."""
    plan = FaultPlan(tmp_path / "plan")
    target = tmp_path / "checkpoint"
    events: list[Any] = []
    with caplog.at_level("DEBUG"):
        writer = MPFsspecWriter(
            f"fault://{target}",
            num_workers=2,
            event_handler=events.append,
            password="hunter2",
            username="alice",
            client_kwargs={"headers": {"authorization": "s3cr3t-t0ken"}},
            **plan.options,
        )
        metadata = save_with(writer, mixed_items(20))
    assert len(plan.calls("open", "*.distcp")) == 2  # the options did get there
    content = b"".join(path.read_bytes() for path in target.iterdir())
    texts = (
        content.decode("latin-1"),
        caplog.text,
        "".join(capfd.readouterr()),
        repr((metadata, writer.last_report, events, writer.checkpoint_id)),
    )
    for text in texts:
        for secret in _SECRETS:
            assert secret not in text
    stored = FsspecReader(target).read_metadata()
    assert type(stored.storage_meta.checkpoint_id) is str


@pytest.mark.parametrize("query", ["", "?token=s3cr3t-t0ken"])
def test_checkpoint_in_memory_holds_no_credentials(query: str) -> None:
    """The same of a URL with a user: what DCP stores as checkpoint id is for people."""
    url = f"memory://alice:hunter2@host/checkpoint{query}"
    state = mixed_items(9)
    writer = MPFsspecWriter(url, num_workers=2)
    try:
        metadata = save_with(writer, state)
        assert_same(load_into(blank(state), FsspecReader(url)), state)
        fs = fsspec.filesystem("memory")
        raw = b"".join(fs.cat(name) for name in fs.find("/") if name.endswith(".metadata"))
        described = json.dumps([str(writer.last_report), str(writer.checkpoint_id)])
        assert raw
        for secret in _SECRETS:
            assert secret.encode() not in raw
            assert secret not in described
            assert secret not in repr(metadata.storage_meta)
    finally:
        fsspec.filesystem("memory").store.clear()
