"""The header of a safetensors file against the safetensors package and what stock DCP writes."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mpwriter import _safetensors
from mpwriter._safetensors import SAFETENSORS_DTYPES, dcp_metadata, safetensors_header
from mpwriter._types import ItemSpec
from tests.containers import SHAPES, dtype_name, random_tensor, storage_bytes

KNOWN = [name for name in SAFETENSORS_DTYPES if hasattr(torch, name)]
# The package writes these, but its torch reader has no name for them.
WRITE_ONLY = {"float8_e8m0fnu", "float4_e2m1fn_x2"}


def spec(key: str, tensor: torch.Tensor) -> ItemSpec:
    return ItemSpec(dtype_name(tensor), tuple(tensor.shape), tensor.nbytes, key)


def described(content: bytes) -> tuple[dict[str, Any], int]:
    """The parsed header, and where the first tensor begins."""
    begin = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:begin]), begin


def bits(tensor: torch.Tensor) -> bytes:
    content: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return content


def file_of(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    header, ranges = safetensors_header([spec(*item) for item in tensors.items()], metadata)
    content = header + b"".join(storage_bytes(tensor) for tensor in tensors.values())
    for (offset, length), tensor in zip(ranges, tensors.values()):
        assert content[offset : offset + length] == storage_bytes(tensor)
    return content


def test_header_loads_in_the_package_when_dtypes_shapes_and_sizes_are_mixed(
    tmp_path: Path,
) -> None:
    """Sizes that misalign what follows included."""
    package = importlib.import_module("safetensors.torch")
    tensors = {
        f"{name} {shape}": random_tensor(name, shape)
        for name in KNOWN
        if name not in WRITE_ONLY
        for shape in SHAPES
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(tensors))
    for found in (package.load(path.read_bytes()), package.load_file(path)):
        assert found.keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert found[key].dtype == tensor.dtype, key
            assert found[key].shape == tensor.shape, key
            assert bits(found[key]) == bits(tensor), key


@pytest.mark.parametrize("name", KNOWN)
def test_header_describes_as_the_package_when_dtypes_vary(name: str) -> None:
    package = importlib.import_module("safetensors.torch")
    tensor = random_tensor(name, (3, 4))
    theirs, _ = described(package.save({"k": tensor}))
    ours, begin = described(file_of({"k": tensor}))
    assert ours["k"] == theirs["k"]
    assert begin % 64 == 0


def test_header_keeps_order_and_keys_when_they_are_odd() -> None:
    keys = ["z", "a", "ключ", 'quo"te\\', "new\nline", "", "x" * 1000]
    tensors = {key: random_tensor("int16", (number,)) for number, key in enumerate(keys)}
    content = file_of(tensors, {"note": "ü"})
    header, begin = described(content)
    assert list(header) == ["__metadata__", *keys]
    assert header["__metadata__"] == {"note": "ü"}
    ends = [header[key]["data_offsets"][1] for key in keys]
    assert ends == sorted(ends)
    assert begin + ends[-1] == len(content)
    package = importlib.import_module("safetensors.torch")
    for key, tensor in package.load(content).items():
        assert bits(tensor) == bits(tensors[key]), key


def test_header_is_complete_when_there_is_no_item() -> None:
    header, ranges = safetensors_header([])
    assert ranges == []
    assert len(header) % 64 == 0
    package = importlib.import_module("safetensors.torch")
    assert package.load(header) == {}


def test_dcp_metadata_reads_as_stock_when_offsets_are_given() -> None:
    content = file_of({"w": torch.zeros(2, 2)}, dcp_metadata({"w": (4, 0)}))
    metadata, _ = described(content)
    assert metadata["__metadata__"]["DCP_VERSION"] == "1.0"
    assert metadata["__metadata__"]["format"] == "pt"
    sharding = json.loads(metadata["__metadata__"]["DCP_SHARDING_INFO"])
    assert sharding == {"w": {"saved_offsets": [4, 0]}}
    assert "DCP_SHARDING_INFO" not in dcp_metadata()
    assert json.loads(dcp_metadata({})["DCP_SHARDING_INFO"]) == {}
    if importlib.util.find_spec("torch.distributed.checkpoint._hf_utils") is None:
        return  # torch 2.7 has no such files
    stock = importlib.import_module("torch.distributed.checkpoint._hf_utils")
    assert stock._get_dcp_custom_metadata(metadata) == sharding
    assert str(stock.HF_DCP_VERSION) == metadata["__metadata__"][stock.DCP_VERSION_KEY]
    assert metadata["__metadata__"][stock.FORMAT_KEY] == stock.FORMAT_VALUE


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (ItemSpec("complex128", (1,), 16, "w.x"), "complex128 items: 'w.x'"),
        (ItemSpec("bits8", (1,), 1, "w.x"), "bits8 items: 'w.x'"),
        (ItemSpec("", (), 7, "w.x"), "bytes items: 'w.x'"),
        (ItemSpec("float4_e2m1fn_x2", (), 1, "w.x"), "0-d float4_e2m1fn_x2: 'w.x'"),
        (ItemSpec("float32", (2,), 7, "w.x"), "'w.x': .* has 8 bytes, not 7"),
        (ItemSpec("uint8", (2,), 2, "__metadata__"), "'__metadata__'"),
        (ItemSpec("uint8", (2,), 2, "first"), "'first' is there twice"),
        (ItemSpec("uint8", (2,), 2, "\ud800"), "key"),
    ],
)
def test_header_raises_and_names_the_key_when_an_item_does_not_fit(
    item: ItemSpec, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        safetensors_header([ItemSpec("uint8", (1,), 1, "first"), item])


def test_header_raises_when_it_gets_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_safetensors, "_MAX_HEADER_BYTES", 1000)
    items = [ItemSpec("uint8", (1,), 1, f"key {number}") for number in range(20)]
    with pytest.raises(ValueError, match="too long"):
        safetensors_header(items)
