"""The pickled metadata file: both ways, damage, and what it may name."""

from __future__ import annotations

import copy
import io
import pathlib
import pickle
import struct
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor import metadata as sharded
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from mpwriter import _metadata
from mpwriter._compat import storage_info
from mpwriter._metadata import TRAILER_NBYTES, dumps, loads
from mpwriter.errors import CorruptCheckpointError, MPWriterError

DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)


def tensor_entry(dtype: torch.dtype = torch.float32, *sizes: int) -> TensorStorageMetadata:
    size = torch.Size(sizes)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [chunk])


def small_metadata() -> Metadata:
    index = MetadataIndex("a.b", torch.Size((0, 0)), 0)
    metadata = Metadata(
        {"a.b": tensor_entry(torch.bfloat16, 3, 4), "a.c": BytesStorageMetadata()},
        {"a.b": ("a", "b"), "a.c": ("a", 7)},
        {
            index: storage_info("__0_0.abcdefgh.distcp", 64, 200),
            MetadataIndex("a.c"): storage_info("__0_0.abcdefgh.distcp", 264, 99, ["stream.zstd/1"]),
        },
        StorageMeta("/somewhere/ckpt", "an id", None, ["m"]),
    )
    metadata.version = "1.0.0"  # as the writer does; torch 2.7 has no such field
    return metadata


def pickle_of(metadata: Metadata) -> bytes:
    return dumps(metadata)[:-TRAILER_NBYTES]


def global_names(pickled: bytes) -> set[tuple[str, str]]:
    """(module, name) of every global that a pickle names."""
    names = set()

    class Recorder(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            names.add((module, name))
            return super().find_class(module, name)

    Recorder(io.BytesIO(pickled)).load()
    return names


def call_pickle(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls module.name(argument)."""
    return b"".join(
        (b"\x80\x04", *map(_short_text, (module, name)), b"\x93", _short_text(argument), b"\x85R.")
    )


def _short_text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


# ---- both ways ----


def test_loads_gives_what_dumps_took() -> None:
    metadata = small_metadata()
    before = copy.deepcopy(metadata)
    raw = dumps(metadata)
    assert loads(raw, "x") == before
    assert metadata == before


def test_loads_shares_nothing_between_calls() -> None:
    raw = dumps(small_metadata())
    first, second = loads(raw, "x"), loads(raw, "x")
    first.state_dict_metadata["a.b"].chunks.clear()
    first.storage_data.clear()
    assert second == small_metadata()


def test_stock_reader_loads_what_dumps_wrote(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(dumps(small_metadata()))
    read = FileSystemReader(tmp_path).read_metadata()
    read.storage_meta.load_id = None
    assert read == small_metadata()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loads_gives_every_dtype(dtype: torch.dtype) -> None:
    metadata = Metadata({"x": tensor_entry(dtype, 2)})
    assert loads(dumps(metadata), "x") == metadata
    assert loads(pickle.dumps(metadata), "x") == metadata


@pytest.mark.parametrize("layout", ["strided", "sparse_coo", "sparse_csr", "jagged"])
@pytest.mark.parametrize("memory_format", ["contiguous_format", "channels_last", "preserve_format"])
def test_loads_gives_every_property(layout: str, memory_format: str) -> None:
    entry = tensor_entry(torch.float64, 2, 2)
    entry.properties = TensorProperties(
        torch.float64, getattr(torch, layout), True, getattr(torch, memory_format), True
    )
    metadata = Metadata({"x": entry})
    assert loads(dumps(metadata), "x") == metadata
    assert loads(pickle.dumps(metadata), "x") == metadata


@given(
    st.dictionaries(
        st.text(max_size=40),
        st.lists(st.integers(0, 2**40), max_size=5),
        max_size=8,
    )
)
def test_loads_gives_any_key_and_shape(shapes: dict[str, list[int]]) -> None:
    """E12"""
    metadata = Metadata(
        {key: tensor_entry(torch.int8, *shape) for key, shape in shapes.items()},
        {key: (key, len(shape)) for key, shape in shapes.items()},
        {
            MetadataIndex(key, [0] * len(shape), 3): storage_info(key, 2**50, sum(shape))
            for key, shape in shapes.items()
        },
    )
    assert loads(dumps(metadata), "x") == metadata


def test_dumps_names_only_torch_and_the_standard_library() -> None:
    names = global_names(pickle_of(small_metadata()))
    assert ("torch.distributed.checkpoint.filesystem", "_StorageInfo") in names
    assert {module.split(".")[0] for module, _ in names} == {"torch"}


def test_dumps_is_the_pickle_that_stock_writes() -> None:
    ours, stock = pickle_of(small_metadata()), pickle.dumps(small_metadata(), 4)
    assert global_names(ours) == global_names(stock) - {("builtins", "getattr")}


class Foreign:
    pass


class ForeignText(str):
    pass


@pytest.mark.parametrize(
    "foreign",
    [Foreign(), Foreign, ForeignText("a"), lambda: 0, len, print, Path, int, range(3), 1j, io],
    ids=repr,
)
def test_dumps_refuses_what_loads_would_refuse(foreign: Any) -> None:
    with pytest.raises(MPWriterError, match="planner_data"):
        dumps(Metadata({}, {"key": ("a", foreign)}))


@pytest.mark.parametrize("plain", [b"x", {1, 2}, frozenset({"a"}), 1.5, True, None, 2**100, [[]]])
def test_loads_gives_plain_values_of_a_planner(plain: Any) -> None:
    assert loads(dumps(Metadata({}, {"key": plain})), "x").planner_data == {"key": plain}


def test_dumps_names_the_class_when_it_is_not_on_the_list() -> None:
    with pytest.raises(MPWriterError, match=r"Foreign.*planner_data"):
        dumps(Metadata({}, {"key": Foreign()}))


def test_loads_gives_an_ordered_dict_and_a_path() -> None:
    metadata = Metadata({}, OrderedDict(b=1, a=2), {}, StorageMeta(Path("/x/y")))
    assert loads(dumps(metadata), "x") == metadata
    assert type(loads(dumps(metadata), "x").planner_data) is OrderedDict


# ---- stock's files ----


def test_loads_reads_what_stock_wrote(tmp_path: Path) -> None:
    state = {"a": torch.zeros(3), "b": [1, {"c": torch.ones(2, dtype=torch.bfloat16)}], "s": {1}}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    raw = (tmp_path / ".metadata").read_bytes()
    assert loads(raw, "x") == pickle.loads(raw)
    assert loads(raw, "x").storage_meta.checkpoint_id == tmp_path


def test_loads_reads_protocol_2_and_5() -> None:
    for protocol in (2, 3, 5):
        assert loads(pickle.dumps(small_metadata(), protocol), "x") == small_metadata()


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        ("pathlib", "PosixPath", pathlib.Path("/a/b")),
        ("pathlib._local", "PosixPath", pathlib.Path("/a/b")),  # Python 3.13
        ("pathlib", "PurePosixPath", pathlib.PurePosixPath("/a/b")),
        ("pathlib._local", "WindowsPath", pathlib.PureWindowsPath("/a/b")),
        ("pathlib", "PureWindowsPath", pathlib.PureWindowsPath("/a/b")),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="says what a POSIX system makes of it")
def test_loads_reads_a_path_of_any_python_and_system(module: str, name: str, expected: Any) -> None:
    marker = "a place that is easy to find"
    raw = pickle.dumps(Metadata({}, storage_meta=StorageMeta(marker)), 2)
    text = b"X" + struct.pack("<I", len(marker)) + marker.encode()
    assert raw.count(text) == 1
    path = f"c{module}\n{name}\n".encode() + b"(" + _short_text("/") + _short_text("a")
    made = loads(raw.replace(text, path + _short_text("b") + b"tR"), "x")
    assert made.storage_meta.checkpoint_id == expected


def test_loads_reads_an_enum_that_was_pickled_by_its_name() -> None:
    """Early releases of Python 3.11 did that, by a call of getattr."""

    class ByName(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, _MEM_FORMAT_ENCODING):
                return getattr, (type(value), value.name)
            return NotImplemented

    stream = io.BytesIO()
    ByName(stream, 4).dump(small_metadata())
    assert ("builtins", "getattr") in global_names(stream.getvalue())
    assert loads(stream.getvalue(), "x") == small_metadata()


def test_loads_reads_the_properties_of_an_old_sharded_tensor() -> None:
    entry = tensor_entry(torch.float16, 4)
    entry.properties = sharded.TensorProperties(dtype=torch.float16)
    assert loads(pickle.dumps(Metadata({"x": entry})), "x") == Metadata({"x": entry})


def test_loads_names_the_dtype_when_this_torch_does_not_know_it() -> None:
    raw = pickle.dumps(Metadata({"x": tensor_entry(torch.float16, 4)}), 2)
    newer = raw.replace(b"ctorch\nfloat16\n", b"ctorch\nfloat3_new\n")
    assert newer != raw
    with pytest.raises(CorruptCheckpointError, match=r"torch\.float3_new.*may be older"):
        loads(newer, "x")


# ---- damage ----


def test_loads_finds_every_changed_byte() -> None:
    raw = dumps(small_metadata())
    for position in range(len(raw)):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(raw)
            damaged[position] ^= mask
            with pytest.raises(CorruptCheckpointError, match="at/this/path"):
                loads(bytes(damaged), "at/this/path")


def test_loads_finds_every_truncation_but_that_of_the_whole_trailer() -> None:
    raw = dumps(small_metadata())
    for length in range(len(raw)):
        if length == len(raw) - TRAILER_NBYTES:
            assert loads(raw[:length], "x") == small_metadata()
        else:
            with pytest.raises(CorruptCheckpointError):
                loads(raw[:length], "x")


def test_loads_finds_what_was_added() -> None:
    raw = dumps(small_metadata())
    pickled, trailer = raw[:-TRAILER_NBYTES], raw[-TRAILER_NBYTES:]
    for damaged in (raw + b"\0", raw + trailer, b"." + raw, pickled + b"." + trailer):
        with pytest.raises(CorruptCheckpointError):
            loads(damaged, "x")
    with pytest.raises(CorruptCheckpointError, match="5 bytes after its end"):
        loads(pickled + b"12345", "x")


def test_loads_does_not_unpickle_when_the_crc_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = bytearray(dumps(small_metadata()))
    raw[20] ^= 1
    monkeypatch.setattr(_metadata, "_Unpickler", None)
    with pytest.raises(CorruptCheckpointError, match="CRC-32"):
        loads(bytes(raw), "x")


def test_loads_never_raises_another_error_when_stock_metadata_is_damaged() -> None:
    raw = pickle.dumps(small_metadata(), 4)
    for position in range(len(raw)):
        for mask in (0x01, 0x04, 0x40, 0xFF):
            damaged = bytearray(raw)
            damaged[position] ^= mask
            try:
                loads(bytes(damaged), "x")
            except CorruptCheckpointError:
                pass


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b".",
        b'{"metadata": {"total_size": 1}}',
        pickle.dumps(None),
        pickle.dumps({"a": 1}),
        pickle.dumps(StorageMeta()),
        pickle.dumps(Metadata(None)),  # type: ignore[arg-type]
        pickle.dumps(Metadata({"a": 1})),  # type: ignore[dict-item]
        pickle.dumps(Metadata({}, storage_data=[])),
        pickle.dumps(Metadata({}, storage_data={"a": storage_info("f", 0, 1)})),
        pickle.dumps(Metadata({}, storage_data={MetadataIndex("a"): 3})),
    ],
)
def test_loads_refuses_what_is_no_metadata(raw: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match="no/metadata"):
        loads(raw, "no/metadata")


# ---- what may be named ----


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "eval"),
        ("builtins", "__import__"),
        ("torch", "load"),
        ("torch", "os.system"),
        ("torch", "serialization.os.system"),
        ("torch.serialization", "os.system"),
        ("torch.serialization", "_get_layout.__globals__"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
        ("torch.distributed.checkpoint.filesystem", "os"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemWriter"),
        ("pathlib", "os.system"),
        ("pathlib", "Path"),
        ("functools", "partial"),
        ("collections", "defaultdict"),
        ("mpwriter._metadata", "loads"),
        ("no_such_module_anywhere", "x"),
    ],
)
def test_loads_refuses_a_name_and_does_not_import_it(module: str, name: str) -> None:
    imported = set(sys.modules)
    with pytest.raises(CorruptCheckpointError, match="not on the list") as caught:
        loads(call_pickle(module, name, "true"), "the/path")
    assert f"{module}.{name}" in str(caught.value)
    assert caught.value.path == "the/path"
    assert set(sys.modules) == imported


@pytest.mark.parametrize("name", ["__init__", "mro", "__class__", "_value2member_map_", "NO"])
def test_getattr_gives_nothing_but_members_of_the_enum(name: str) -> None:
    home = _MEM_FORMAT_ENCODING.__module__.encode()
    raw = b"cbuiltins\ngetattr\n(c" + home + b"\n_MEM_FORMAT_ENCODING\n" + _short_text(name)
    with pytest.raises(CorruptCheckpointError, match="getattr"):
        loads(b"\x80\x04" + raw + b"tR.", "x")
    size = b"cbuiltins\ngetattr\n(ctorch\nSize\n" + _short_text("count")
    with pytest.raises(CorruptCheckpointError, match="getattr"):
        loads(b"\x80\x04" + size + b"tR.", "x")


@pytest.mark.parametrize("pickled", [b"\x80\x04\x8c\x01aQ.", b"P0\n."])
def test_loads_refuses_a_persistent_id(pickled: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        loads(pickled, "x")


@pytest.mark.parametrize(
    "named",
    [
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n",
        b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n",
        b"ctorch.serialization\n_get_layout\n",
        b"cpathlib\nPosixPath\n",
        b"cbuiltins\ngetattr\n",
        b"ctorch\nSize\n",
    ],
)
def test_loads_changes_no_class_when_a_pickle_sets_attributes_on_it(named: bytes) -> None:
    from mpwriter import _metadata_classes

    module, name = named[1:-1].decode().split("\n")
    before = dict(vars(getattr(sys.modules[module], name))) if module != "builtins" else {}
    # BUILD with the state (None, {"mark": 1}): setattr on what is on the stack.
    raw = b"\x80\x04" + named + b"N}" + _short_text("mark") + b"K\x01s\x86b."
    with pytest.raises(CorruptCheckpointError):
        loads(raw, "x")
    if module != "builtins":
        assert dict(vars(getattr(sys.modules[module], name))) == before
    assert not hasattr(_metadata_classes._enum_member, "mark")


def test_loads_needs_nothing_of_mpwriter_in_the_file(tmp_path: Path) -> None:
    """Checkpoints load where mpwriter is not installed."""
    (tmp_path / ".metadata").write_bytes(dumps(small_metadata()))
    code = (
        "import pickle, sys; sys.path = [p for p in sys.path if p]\n"
        f"print(pickle.load(open({str(tmp_path / '.metadata')!r}, 'rb')).version)\n"
        "assert 'mpwriter' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout == "1.0.0\n"
