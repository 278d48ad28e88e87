"""The header of a safetensors file whose tensors follow as they come.

Runs in: both. No torch.

    8 bytes: length of the JSON | JSON, padded with spaces | tensor | tensor | ...

The format allows no gap between tensors. Where they should be aligned for the readers that map
the file, the caller orders them by falling element size, as the safetensors package does.

Source: the format's description in the README of the safetensors project.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from mpwriter._container import ALIGNMENT_BYTES
from mpwriter._tensor_pickle import ELEMENT_BYTES, num_elements
from mpwriter._types import ItemSpec

__all__ = ["SAFETENSORS_DTYPES", "dcp_metadata", "safetensors_header"]

SAFETENSORS_DTYPES: Mapping[str, str] = {
    "bfloat16": "BF16",
    "bool": "BOOL",
    "complex64": "C64",
    "float16": "F16",
    "float32": "F32",
    "float4_e2m1fn_x2": "F4",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "int8": "I8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "uint8": "U8",
}
"""torch dtype without "torch." -> the format's name, for every dtype that the format has."""

# Source: the safetensors package refuses to read a longer header.
_MAX_HEADER_BYTES = 100_000_000
_METADATA_KEY = "__metadata__"


def dcp_metadata(saved_offsets: Mapping[str, Sequence[int]] | None = None) -> dict[str, str]:
    """The metadata that torch.distributed.checkpoint writes into a safetensors file.

    Args:
        saved_offsets: key -> where the stored piece begins in the whole tensor, in elements of
            each dimension; None leaves that entry out.

    Source: torch/distributed/checkpoint/_hf_utils.py and filesystem.py.
    """
    metadata = {"DCP_VERSION": "1.0", "format": "pt"}
    if saved_offsets is not None:
        sharding = {key: {"saved_offsets": list(at)} for key, at in saved_offsets.items()}
        metadata = {"DCP_SHARDING_INFO": json.dumps(sharding), **metadata}
    return metadata


def safetensors_header(
    items: Sequence[ItemSpec], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[tuple[int, int]]]:
    """Everything in front of the first tensor, and where each tensor lies.

    Args:
        items: the tensors in file order, each with a key of its own.
        metadata: of the file; None is `dcp_metadata()`.

    Returns:
        The header, of a multiple of 64 bytes, and (offset, length) of every item in bytes of the
        file, in the order of `items`.

    Raises:
        ValueError: the format cannot hold an item (the text names its key), two items have one
            key, or the header gets longer than readers accept.

    Thread-safe.
    """
    described: dict[str, object] = {
        _METADATA_KEY: dict(dcp_metadata() if metadata is None else metadata)
    }
    ranges: list[tuple[int, int]] = []
    end = 0
    for item in items:
        if item.key in described:
            raise ValueError(f"safetensors: {item.key!r} is there twice, or reserved")
        start, end = end, end + item.nbytes
        described[item.key] = {**_describe(item), "data_offsets": [start, end]}
        ranges.append((start, item.nbytes))
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT_BYTES)
    if len(text) > _MAX_HEADER_BYTES:
        raise ValueError(f"safetensors: a header of {len(text)} bytes is too long to be read")
    header = len(text).to_bytes(8, "little") + text
    return header, [(len(header) + start, nbytes) for start, nbytes in ranges]


def _describe(item: ItemSpec) -> dict[str, object]:
    if item.dtype not in SAFETENSORS_DTYPES:
        kind = item.dtype or "bytes"
        raise ValueError(f"safetensors cannot hold {kind} items: {item.key!r}")
    try:
        item.key.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"safetensors cannot hold this key: {item.key!r}") from error
    expected = num_elements(item.shape) * ELEMENT_BYTES[item.dtype]
    if item.nbytes != expected:
        raise ValueError(
            f"{item.key!r}: {item.dtype} of shape {item.shape} has {expected} bytes, "
            f"not {item.nbytes}"
        )
    shape = list(item.shape)
    if item.dtype == "float4_e2m1fn_x2":  # torch counts pairs, the format counts elements
        if not shape:
            raise ValueError(f"safetensors cannot hold a 0-d {item.dtype}: {item.key!r}")
        shape[-1] *= 2
    return {"dtype": SAFETENSORS_DTYPES[item.dtype], "shape": shape}
