"""What the command prints, and what it never does."""

from __future__ import annotations

import configparser
import io
import json
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint import FileSystemWriter

from mpwriter import MPFsspecWriter, cli
from mpwriter._compat import HAS_RANK_METADATA, SerializationFormat
from tests.states import save_with, shard_names

SECRET = "hunter22-and-more"


class GuardedFileSystem(LocalFileSystem):
    """The local disk, for those who know a password; its errors quote everything."""

    protocol = "guarded"
    seen: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        GuardedFileSystem.seen = options

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("guarded://"))

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        if self.storage_options.get("client", {}).get("word") != SECRET:
            raise PermissionError(f"{self.storage_options} do not open {path}")
        return super().ls(path, detail, **kwargs)


@pytest.fixture
def guarded() -> Iterator[type[GuardedFileSystem]]:
    fsspec.register_implementation("guarded", GuardedFileSystem, clobber=True)
    yield GuardedFileSystem
    GuardedFileSystem.clear_instance_cache()


def state() -> dict[str, Any]:
    return {
        "model": {"a": {"weight": torch.ones(2, 3)}, "b": torch.ones(4, dtype=torch.int16)},
        "step": 3,
    }


@pytest.fixture
def ours(checkpoint_dir: Path) -> Path:
    save_with(MPFsspecWriter(checkpoint_dir, num_workers=2), state())
    return checkpoint_dir


def told_by(capsys: pytest.CaptureFixture[str], *argv: Any) -> tuple[int, Any]:
    status = cli.main([*map(str, argv), "--json"])
    return status, json.loads(capsys.readouterr().out)


# -- inspect ------------------------------------------------------------------------------------


def test_inspect_prints_a_tree_when_keys_have_dots(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(ours)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(ours)
    assert lines[1].startswith("  complete, written by mpwriter, save ")
    at = lines.index("  model")
    assert lines[at + 1] == "    a"
    assert lines[at + 2].startswith("      weight  float32 [2, 3], ")
    assert lines[at + 3].startswith("    b  int16 [4], ")
    assert lines[at + 4].startswith("  step  object, ")
    for name in shard_names(ours):
        assert any(line.startswith(f"  {name}  ") for line in lines)


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [("*", {"model.a.weight", "model.b", "step"}), ("model.?", {"model.b"}), ("none", set())],
)
def test_inspect_tells_only_keys_that_fit_when_there_is_a_pattern(
    pattern: str, keys: set[str], ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, told = told_by(capsys, "inspect", ours, "--keys", pattern)
    assert status == 0 and set(told["keys"]) == keys


def test_inspect_tells_places_and_files_when_machines_read_it(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, told = told_by(capsys, "inspect", ours)
    key = told["keys"]["model.a.weight"]
    (part,) = key["parts"]
    assert (key["shape"], key["dtype"]) == ([2, 3], "float32")
    assert (part["offsets"], part["sizes"], part["nbytes"]) == ([0, 0], [2, 3], key["nbytes"])
    file = told["files"][part["file"]]
    assert file["nbytes"] == (ours / part["file"]).stat().st_size
    assert file["nbytes"] >= part["start"] + part["nbytes"]
    assert (told["writer"], told["complete"], told["problems"]) == ("mpwriter", True, [])


def test_inspect_says_who_wrote_it_when_that_was_stock(
    checkpoint_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_with(FileSystemWriter(checkpoint_dir), state())
    status, told = told_by(capsys, "inspect", checkpoint_dir)
    assert (status, told["writer"], set(told["files"])) == (0, "stock", {"__0_0.distcp"})


def test_inspect_reads_our_safetensors_when_they_are_given(
    checkpoint_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"serialization_format": SerializationFormat.SAFETENSORS}
    save_with(MPFsspecWriter(checkpoint_dir, **options), state())
    status, told = told_by(capsys, "inspect", checkpoint_dir)
    assert (status, told["writer"]) == (0, "mpwriter")
    assert any(name.endswith(".safetensors") for name in told["files"])


@pytest.mark.skipif(not HAS_RANK_METADATA, reason="this torch always uses collectives")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_inspect_reads_the_metadata_of_ranks_when_there_is_no_common_one(
    checkpoint_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Invariant 17."""
    writer = MPFsspecWriter(checkpoint_dir)
    dcp.save(state(), storage_writer=writer, no_dist=True, use_collectives=False)
    status, told = told_by(capsys, "inspect", checkpoint_dir)
    assert status == 0 and told["complete"] and set(told["keys"]) >= {"step", "model.b"}
    assert told_by(capsys, "verify", checkpoint_dir)[0] == 0


@pytest.mark.parametrize("lost", ["metadata", "shard", "end"])
def test_inspect_ends_with_1_when_the_checkpoint_is_incomplete(
    lost: str, ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = ours / shard_names(ours)[0]
    if lost == "end":
        os.truncate(shard, shard.stat().st_size - 1)
    else:
        (shard if lost == "shard" else ours / ".metadata").unlink()
    assert cli.main(["inspect", str(ours)]) == 1
    assert "  INCOMPLETE, " in capsys.readouterr().out
    status, told = told_by(capsys, "inspect", ours)
    assert status == 1 and not told["complete"] and len(told["problems"]) == 1


def test_inspect_spells_keys_out_when_they_would_move_the_cursor(
    checkpoint_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["line\nend", "\x1b[2J", "schön", "\udc80"]
    save_with(MPFsspecWriter(checkpoint_dir), dict.fromkeys(keys, torch.ones(1)))
    assert cli.main(["inspect", str(checkpoint_dir)]) == 0
    out = capsys.readouterr().out
    assert r"line\nend  float32" in out and "schön" in out
    assert "\x1b" not in out and r"\x1b[2J" in out and r"\udc80" in out
    assert set(told_by(capsys, "inspect", checkpoint_dir)[1]["keys"]) == set(keys)


# -- verify -------------------------------------------------------------------------------------


def test_verify_prints_one_line_when_all_is_right(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", str(ours)]) == 0
    told = capsys.readouterr()
    (line,) = told.out.splitlines()
    assert line.startswith(f"{ours}: sound: 3 items verified, 0 findings, ")
    assert told.err == ""


def test_verify_says_unverified_when_there_is_no_checksum(
    checkpoint_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"serialization_format": SerializationFormat.SAFETENSORS}
    save_with(MPFsspecWriter(checkpoint_dir, **options), state())
    assert cli.main(["verify", str(checkpoint_dir)]) == 0
    assert "1 items verified, 2 unverified" in capsys.readouterr().out
    save_with(FileSystemWriter(checkpoint_dir.parent / "stock"), state())
    assert cli.main(["verify", str(checkpoint_dir.parent / "stock")]) == 0
    assert "metadata is unverified" in capsys.readouterr().out


def test_verify_names_file_and_key_when_there_is_damage(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, told = told_by(capsys, "inspect", ours)
    part = told["keys"]["model.b"]["parts"][0]
    content = bytearray((ours / part["file"]).read_bytes())
    content[part["start"]] ^= 1
    (ours / part["file"]).write_bytes(content)
    assert cli.main(["verify", str(ours)]) == 1
    out = capsys.readouterr().out
    assert f"! {part['file']}: model.b: damaged: expected " in out and "DAMAGED" in out
    status, told = told_by(capsys, "verify", ours)
    assert status == 1 and not told["sound"]
    (finding,) = told["damage"]
    assert (finding["file"], finding["key"]) == (part["file"], "model.b")
    assert "expected" in finding["text"] and "found" in finding["text"]


def test_verify_tells_other_files_when_no_metadata_names_them(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (ours / "__7_0.deadbeef.distcp").write_bytes(bytes(100))
    assert cli.main(["verify", str(ours)]) == 0
    assert "__7_0.deadbeef.distcp  100 B, shard of another save: no metadata names it" in (
        capsys.readouterr().out
    )
    assert told_by(capsys, "verify", ours)[1]["others"]["__7_0.deadbeef.distcp"]["nbytes"] == 100


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_verify_draws_progress_only_when_stderr_is_a_terminal(
    ours: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert cli.main(["verify", str(ours), "--json"]) == 0
    assert "verifying: 100%" in terminal.getvalue()
    json.loads(capsys.readouterr().out)  # nothing of it is on stdout
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    assert cli.main(["verify", str(ours)]) == 0
    assert pipe.getvalue() == ""


# -- errors and secrets -------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("json_", [[], ["--json"]])
def test_command_ends_with_1_when_the_metadata_is_damaged(
    command: str, json_: list[str], ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = bytearray((ours / ".metadata").read_bytes())
    content[100] ^= 1
    (ours / ".metadata").write_bytes(content)
    assert cli.main([command, str(ours), *json_]) == 1
    told = capsys.readouterr()
    assert f"{ours}/.metadata" in told.err and "CRC-32" in told.err
    assert not json_ or json.loads(told.out)["status"] == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["verify", "nosuchprotocol://x"],
        ["verify", "/not/there"],
        ["verify", ""],
        ["verify", "/x", "--workers", "0"],
        ["inspect", "/x", "--storage-option", "nothing"],
        ["inspect", "memory://x", "--storage-option", "a=1", "--storage-option", "a.b=1"],
    ],
)
def test_command_ends_with_2_when_nothing_can_be_read(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("mpwriter: ")
    assert len(told.err.splitlines()) == 1


@pytest.mark.parametrize("argv", [[], ["look"], ["verify"], ["verify", "x", "--workers", "many"]])
def test_command_ends_with_2_when_it_makes_no_sense(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_command_uses_storage_options_when_they_are_nested(
    command: str,
    ours: Path,
    guarded: type[GuardedFileSystem],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for given in ([f"client.word={SECRET}"], [f'client={{"word": "{SECRET}"}}', "number=3"]):
        options = [text for pair in given for text in ("--storage-option", pair)]
        assert cli.main([command, f"guarded://{ours}", *options]) == 0
        assert guarded.seen["client"] == {"word": SECRET}
        told = capsys.readouterr()
        assert SECRET not in told.out + told.err
    assert guarded.seen["number"] == 3


@pytest.mark.parametrize("json_", [[], ["--json"]])
def test_command_never_prints_a_storage_option_when_an_error_quotes_it(
    json_: list[str],
    ours: Path,
    guarded: type[GuardedFileSystem],
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = "swordfish-2"
    options = ["--storage-option", f"client.word={other}", "--storage-option", "plain=wallflower"]
    assert cli.main(["verify", f"guarded://{ours}", *options, *json_]) == 2
    told = capsys.readouterr()
    assert "PermissionError" in told.err
    assert other not in told.out + told.err and "wallflower" not in told.out + told.err


def test_command_never_prints_a_storage_option_when_it_is_in_a_wrong_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["verify", "s3://x", f"secret={SECRET}"])
    assert SECRET not in capsys.readouterr().err


def test_command_prints_no_password_when_the_url_has_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["verify", f"nosuchprotocol://me:{SECRET}@host/x"]) == 2
    assert SECRET not in capsys.readouterr().err


def test_entry_point_names_the_command_when_setup_reads_it() -> None:
    """No other place says what the installed command calls."""
    settings = configparser.ConfigParser()
    settings.read(Path(__file__).parents[2] / "setup.cfg")
    name, _, target = settings["options.entry_points"]["console_scripts"].strip().partition(" = ")
    module, _, function = target.partition(":")
    assert name == "mpwriter"
    assert getattr(import_module(module), function) is cli.main
