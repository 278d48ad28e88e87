"""Places of all kinds, from their spelling to the files in them, through whole saves and loads."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch.distributed.checkpoint as dcp

from mpwriter import FsspecReader, MPFsspecWriter
from mpwriter._compat import StockFsspecWriter
from tests.saves import assert_holds, names_in, save, small_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = small_state(1)


class Somewhere:
    """A path that is neither str nor pathlib.Path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


# -- how a place is spelled ---------------------------------------------------------------------

SPELLINGS: dict[str, Callable[[Path], Any]] = {
    "str": str,
    "Path": lambda path: path,
    "PathLike": Somewhere,
    "slash": lambda path: f"{path}/",
    "slashes": lambda path: f"{path}//",
    "file": lambda path: f"file://{path}",
    "file slash": lambda path: f"file://{path}/",
    "local": lambda path: f"local://{path}",
    "home": lambda path: f"~/{path.name}",
    "home slash": lambda path: f"~/{path.name}/",
    "home Path": lambda path: Path("~") / path.name,
    "dot": lambda path: f"{path.parent}/./{path.name}",
    "relative": lambda path: path.name,
    "relative dot": lambda path: f"./{path.name}/",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_save_puts_files_where_stock_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    """F01: the same directory however it is spelled; nothing beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    place = SPELLINGS[spelling](tmp_path / "checkpoint")
    save(place, STATE)
    assert_holds(place, STATE)
    assert_holds(tmp_path / "checkpoint", STATE)
    assert os.listdir(tmp_path) == ["checkpoint"]
    names = names_in(tmp_path / "checkpoint")
    assert [name.split(".")[0] + "." + name.split(".")[-1] for name in names] == [
        ".metadata",
        "__0_0.distcp",
        "__0_1.distcp",
    ]
    if spelling not in ("Path", "home Path"):  # which stock's writer refuses
        stock = StockFsspecWriter(os.fspath(place).replace("checkpoint", "stock"), thread_count=2)
        dcp.save(STATE, storage_writer=stock)
        assert len(names_in(tmp_path / "stock")) == 3


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_save_goes_where_dcp_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    """F01: the same for `checkpoint_id`, which moves the writer and the reader."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    place = SPELLINGS[spelling](tmp_path / "checkpoint")
    writer = MPFsspecWriter(tmp_path / "unused", num_workers=2)
    dcp.save(STATE, checkpoint_id=place, storage_writer=writer)
    assert os.listdir(tmp_path) == ["checkpoint"]
    target = {"step": -1}
    reader = FsspecReader(tmp_path / "unused")
    dcp.load(target, checkpoint_id=place, storage_reader=reader)
    assert target == {"step": 1}


@pytest.mark.parametrize("make", [MPFsspecWriter, FsspecReader])
@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket/x", "memory://x/y"])
def test_a_url_in_a_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, url: str
) -> None:
    """F01: pathlib folds `s3://` to `s3:/`; no local directory `s3:` comes of it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"{url.split(':')[0]}://"):
        make(Path(url))
    writer = MPFsspecWriter(tmp_path / "checkpoint", num_workers=1)
    with pytest.raises(ValueError, match="pathlib"):
        dcp.save(STATE, checkpoint_id=Path(url), storage_writer=writer)
    assert os.listdir(tmp_path) == []


NAMES = ["a#b", "a%20b", "a b", "a::b", "[x]", "a*b", "ü", "a&b=c", "~", "-", "a\\b", "a\nb"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scheme", ["", "file://", "fault://"])
def test_save_takes_odd_names_literally(tmp_path: Path, scheme: str, name: str) -> None:
    """F11: `#`, `%20`, `::` and what a shell would expand have no meaning in a local path."""
    place = f"{scheme}{tmp_path}/{name}/checkpoint"
    for number in range(2):
        save(place, small_state(number))
        assert_holds(place, small_state(number))
    assert os.listdir(tmp_path) == [name]
    assert os.listdir(tmp_path / name) == ["checkpoint"]
    assert len(names_in(tmp_path / name / "checkpoint")) == 3


# -- filesystems over filesystems ---------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.mark.parametrize(
    "chain",
    [
        "simplecache::{}/checkpoint",
        "filecache::{}/checkpoint",
        "blockcache::{}/checkpoint",
        "dir://checkpoint::{}",
        "dir://checkpoint::simplecache::{}",
    ],
)
@pytest.mark.parametrize("inner", ["file", "memory"])
def test_save_goes_through_a_chain(tmp_path: Path, memory: Any, chain: str, inner: str) -> None:
    """F11: stock fails for simplecache::memory; a read cache never answers for an old save."""
    place = chain.format(f"{inner}://{tmp_path}")
    for number in range(2):
        save(place, small_state(number))
        assert_holds(place, small_state(number))
        assert_holds(f"{inner}://{tmp_path}/checkpoint", small_state(number))


def test_save_refuses_an_archive(tmp_path: Path) -> None:
    """F11: zip:// is one file, which cannot be written by several; said before the save."""
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("something", "else")
    before = (tmp_path / "archive.zip").read_bytes()
    url = f"zip://checkpoint::file://{tmp_path}/archive.zip"
    with pytest.raises(ValueError, match=r"zip://.*archive"):
        MPFsspecWriter(url)
    writer = MPFsspecWriter(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=r"zip://.*archive"):
        dcp.save(STATE, checkpoint_id=url, storage_writer=writer)
    assert (tmp_path / "archive.zip").read_bytes() == before


def test_load_reads_an_archive(tmp_path: Path) -> None:
    """F11: a checkpoint that somebody has packed afterwards."""
    save(tmp_path / "checkpoint", STATE)
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        for path in (tmp_path / "checkpoint").iterdir():
            archive.write(path, f"checkpoint/{path.name}")
    assert_holds(f"zip://checkpoint::file://{tmp_path}/archive.zip", STATE)
