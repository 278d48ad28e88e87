"""Reading containers back without torch: ours, stock's, others, damaged and hostile ones."""

from __future__ import annotations

import gc
import random
import sys
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.serialization import config as serialization_config

from mpwriter import _decode
from mpwriter._decode import ContainerError, decode
from mpwriter._zipread import read_records
from tests.containers import (
    SHAPES,
    assert_same_bits,
    contained,
    loaded,
    random_tensor,
    rebuilt,
    records_of,
    saved,
    stock_dtypes,
    zipped,
)

DTYPES = stock_dtypes()


class Subclass(torch.Tensor):
    pass


@pytest.fixture(params=["shortcut", "way round"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers of ours are read by a shortcut, and by what reads all others."""
    if request.param == "way round":
        monkeypatch.setattr(_decode, "_decode_ours", lambda *_: None)


@pytest.fixture
def no_crcs() -> Iterator[None]:
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


def found_in(container: bytes, *, verify: bool = True) -> torch.Tensor:
    decoded = decode(memoryview(container), verify=verify)
    assert decoded is not None
    assert decoded.checked == verify
    return rebuilt(decoded)


# -- what was written --------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_decode_finds_what_was_framed_when_dtype_and_shape_vary(name: str, both_ways: None) -> None:
    """E03, E05."""
    for number, shape in enumerate(SHAPES):
        tensor = random_tensor(name, shape)
        for verify in (True, False):
            assert_same_bits(found_in(contained(tensor, 11 * number), verify=verify), tensor)


@pytest.mark.parametrize("name", DTYPES)
def test_decode_finds_what_stock_loads_when_stock_saved(name: str) -> None:
    for shape in SHAPES:
        container = saved(random_tensor(name, shape))
        for verify in (True, False):
            assert_same_bits(found_in(container, verify=verify), loaded(container))


def test_decode_finds_our_container_by_the_shortcut_when_it_starts_anywhere() -> None:
    for position in range(64):
        container = memoryview(contained(random_tensor("int32", (3,)), position))
        assert _decode._decode_ours(container, True) == decode(container, verify=True)


def test_decode_returns_a_view_when_the_container_is_writable() -> None:
    container = bytearray(contained(random_tensor("uint8", (50,))))
    decoded = decode(memoryview(container), verify=True)
    assert decoded is not None
    decoded.payload[7] = decoded.payload[7] ^ 0xFF
    with pytest.raises(ContainerError, match="expected CRC"):
        decode(memoryview(container), verify=True)


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
    "row of a larger storage": lambda: torch.randn(100, 7)[13],
    "strided columns": lambda: torch.randn(9, 70000)[1:, 3::5],
    "expanded": lambda: torch.randn(3, 1).expand(3, 1000),
    "0-d in a larger storage": lambda: torch.randn(10)[4],
    "empty past the end": lambda: torch.randn(10)[10:],
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "six dimensions": lambda: torch.randn(1, 2, 3, 1, 2, 3),
    "requires_grad": lambda: torch.randn(3, requires_grad=True),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "fp8 view": lambda: torch.randn(9, 9).to(torch.float8_e5m2)[2:5, 1:],
    # torch.load of 2.13 refuses this one, which torch.save writes.
    "storage with half an element": lambda: torch.empty(0, dtype=torch.int16).set_(
        torch.arange(7, dtype=torch.uint8).untyped_storage(), 1, (2,), (1,)
    ),
    "torch.Size": lambda: torch.zeros(torch.Size([2, 0, 70000])),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_decode_finds_shape_and_stride_when_stock_saved_a_view(kind: str) -> None:
    tensor = VIEWS[kind]()
    found = found_in(saved(tensor))
    assert found.shape == tensor.shape
    assert found.stride() == tensor.stride()
    assert found.storage_offset() == tensor.storage_offset()
    wide = torch.complex64 if tensor.is_complex() else torch.float32
    assert torch.equal(found.to(wide), tensor.detach().to(wide))


def test_decode_finds_the_values_when_stock_saved_a_parameter() -> None:
    for requires_grad in (True, False):
        parameter = torch.nn.Parameter(torch.randn(3, 4), requires_grad=requires_grad)
        assert torch.equal(found_in(saved(parameter)), parameter.detach())


def test_decode_finds_the_tensor_when_stock_saved_to_a_path(tmp_path: Path) -> None:
    path = tmp_path / "odd näme.v1.pt"
    tensor = torch.randn(5)
    torch.save(tensor, path)
    assert torch.equal(found_in(path.read_bytes()), tensor)


def test_decode_finds_the_tensor_when_stock_aligns_otherwise() -> None:
    tensor = torch.randn(5)
    with serialization_config.patch({"save.storage_alignment": 4096}):
        assert torch.equal(found_in(saved(tensor)), tensor)


def test_decode_finds_the_tensor_when_the_standard_library_zipped_it() -> None:
    tensor = torch.randn(5)
    assert torch.equal(found_in(zipped(records_of(saved(tensor)))), tensor)


# -- something else ----------------------------------------------------------------------------


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.note = "hello"  # type: ignore[attr-defined]
    return tensor


OTHERS: dict[str, Callable[[], Any]] = {
    "conj bit": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "neg bit": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse csr": lambda: torch.eye(3).to_sparse_csr(),
    "subclass": lambda: torch.zeros(3).as_subclass(Subclass),
    "attribute": lambda: with_attribute(torch.zeros(3)),
    "parameter with state": lambda: with_attribute(torch.nn.Parameter(torch.zeros(2))),
    "meta": lambda: torch.zeros(3, device="meta"),
    "two tensors": lambda: [torch.zeros(3), torch.ones(2)],
    "dict": lambda: {"a": torch.zeros(3)},
    "storage": lambda: torch.zeros(3).untyped_storage(),
    "int": lambda: 5,
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OTHERS)
def test_decode_returns_none_when_stock_saved_something_else(kind: str) -> None:
    container = saved(OTHERS[kind]())
    for verify in (True, False):
        assert decode(memoryview(container), verify=verify) is None


@pytest.mark.parametrize("kind", ["dict", "two tensors", "sparse"])
def test_decode_raises_when_something_else_is_damaged(kind: str) -> None:
    """What goes on to torch.load, which checks nothing, has been checked."""
    container = bytearray(saved(OTHERS[kind]()))
    places = {record.name: record.start for record in read_records(memoryview(container))}
    container[places[b"archive/data/0"]] ^= 1
    with pytest.raises(ContainerError, match="data/0"):
        decode(memoryview(container), verify=True)


def test_decode_returns_none_when_the_format_is_the_legacy_one() -> None:
    container = saved(torch.zeros(3), _use_new_zipfile_serialization=False)
    assert decode(memoryview(container), verify=True) is None


def test_decode_returns_none_when_the_pickle_has_another_protocol() -> None:
    assert decode(memoryview(saved(torch.zeros(3), pickle_protocol=4)), verify=True) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"archive/byteorder": b"big" if sys.byteorder == "little" else b"little"},
        {"archive/byteorder": b""},
        {"archive/data/1": b"one more"},
        {"archive/constants.pkl": b"torchscript"},
        {"elsewhere/version": b"3\n"},
        {"archive/version": None},
        {"archive/data.pkl": None},
        {"archive/data/0": None},
    ],
)
def test_decode_returns_none_when_records_are_others(changes: dict[str, bytes | None]) -> None:
    records = {**records_of(saved(torch.zeros(3))), **changes}
    container = zipped({name: content for name, content in records.items() if content is not None})
    assert decode(memoryview(container), verify=True) is None


def test_decode_returns_none_when_records_are_compressed() -> None:
    container = zipped(records_of(saved(torch.zeros(99))), compression=zipfile.ZIP_DEFLATED)
    assert decode(memoryview(container), verify=True) is None


# -- damage ------------------------------------------------------------------------------------


def assert_never_wrong(container: bytes, tensor: torch.Tensor) -> bool:
    """Whether damage was seen. `decode` may miss it only where it has changed no value."""
    try:
        decoded = decode(memoryview(container), verify=True)
    except ContainerError:
        return True
    if decoded is not None:
        assert decoded.checked
        assert_same_bits(rebuilt(decoded), tensor)
        return False
    try:
        found = loaded(container)
    except Exception:
        return True
    assert_same_bits(found, tensor)
    return False


@pytest.mark.parametrize("write", [contained, saved])
def test_decode_gives_no_wrong_value_when_any_bit_is_flipped(
    write: Callable[[torch.Tensor], bytes],
) -> None:
    """A08."""
    tensor = random_tensor("float32", (3, 2))
    container = write(tensor)
    num_seen = 0
    for place in range(len(container)):
        for flip in (1, 2, 4, 8, 16, 32, 64, 128, 0xFF, container[place]):
            damaged = bytearray(container)
            damaged[place] ^= flip
            num_seen += assert_never_wrong(bytes(damaged), tensor)
    # What may go unseen: padding, dates, versions, and flips by 0.
    assert num_seen > 0.5 * 9 * len(container)


@pytest.mark.parametrize("write", [contained, saved])
def test_decode_raises_when_truncated_at_any_length(
    write: Callable[[torch.Tensor], bytes],
) -> None:
    """A08."""
    container = write(random_tensor("float32", (3, 2)))
    for length in range(len(container)):
        with pytest.raises(ContainerError):
            decode(memoryview(container[:length]), verify=False)
        with pytest.raises(ContainerError):
            decode(memoryview(container[length + 1 :]), verify=False)


@pytest.mark.parametrize("write", [contained, saved])
def test_decode_raises_when_bytes_were_lost_or_added_inside(
    write: Callable[[torch.Tensor], bytes],
) -> None:
    container = write(random_tensor("float32", (30, 2)))
    for place in range(0, len(container), 3):
        for damaged in (
            container[:place] + container[place + 1 :],
            container[:place] + b"\0" + container[place:],
            container + container[: place + 1],
        ):
            with pytest.raises(ContainerError):
                decode(memoryview(damaged), verify=False)


@given(st.booleans(), st.data())
def test_decode_gives_no_wrong_value_when_blocks_are_damaged(
    ours: bool, draw: st.DataObject
) -> None:
    tensor = random_tensor("int64", (40,))
    container = bytearray(contained(tensor) if ours else saved(tensor))
    for _ in range(draw.draw(st.integers(1, 3))):
        start = draw.draw(st.integers(0, len(container) - 1))
        length = draw.draw(st.integers(1, 512))
        source = draw.draw(st.sampled_from(["zeros", "noise", "elsewhere"]))
        if source == "zeros":
            block = bytes(length)
        elif source == "noise":
            block = draw.draw(st.binary(min_size=length, max_size=length))
        else:
            other = draw.draw(st.integers(0, len(container) - 1))
            block = bytes(container[other : other + length])
        block = block[: len(container) - start]
        container[start : start + len(block)] = block
    assert_never_wrong(bytes(container), tensor)


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06" + bytes(17), bytes(100), b"PK\x03\x04" * 9])
def test_decode_raises_when_it_is_no_container(content: bytes) -> None:
    with pytest.raises(ContainerError, match=r"expected .* found"):
        decode(memoryview(content), verify=True)


def test_decode_says_expected_and_found_when_the_payload_is_damaged(both_ways: None) -> None:
    container = bytearray(contained(torch.arange(100)))
    container[-800] ^= 4
    with pytest.raises(ContainerError, match=r"expected CRC 0x\w{8} of b'archive/data/0', found"):
        decode(memoryview(container), verify=True)
    assert decode(memoryview(container), verify=False) is not None


# -- files without CRCs ------------------------------------------------------------------------


def test_decode_is_unchecked_when_stock_wrote_no_crcs(no_crcs: None) -> None:
    for shape in SHAPES:
        tensor = random_tensor("float32", shape)
        decoded = decode(memoryview(saved(tensor)), verify=True)
        assert decoded is not None
        assert not decoded.checked
        assert_same_bits(rebuilt(decoded), tensor)


def test_decode_raises_when_only_one_record_has_no_crc() -> None:
    """Damage to a checked file cannot make it an unchecked one."""
    container = saved(torch.ones(3))
    for name in (b"archive/data.pkl", b"archive/data/0", b"archive/version"):
        damaged = bytearray(container)
        descriptor_at = container.index(b"PK\x07\x08", container.index(name))
        for crc_at in (container.rindex(name) - 46 + 16, descriptor_at + 4):
            damaged[crc_at : crc_at + 4] = bytes(4)
        with pytest.raises(ContainerError, match="expected CRC 0x00000000"):
            decode(memoryview(damaged), verify=True)


# -- hostile bytes -----------------------------------------------------------------------------


@given(st.binary(max_size=300))
def test_decode_raises_container_error_when_given_noise(content: bytes) -> None:
    with pytest.raises(ContainerError):
        decode(memoryview(b"PK\x03\x04" + content), verify=True)


def crafted(pickled: bytes, payload: bytes = bytes(64)) -> bytes:
    records = records_of(contained(torch.zeros(16)))
    return zipped({**records, "archive/data.pkl": pickled, "archive/data/0": payload})


def test_decode_raises_when_the_tensor_reaches_past_its_storage() -> None:
    for tensor in (
        torch.zeros(4, 4),
        torch.zeros(17),
        torch.zeros(20)[4:],
        torch.zeros(2, 9)[:, 8:],
    ):
        pickled = records_of(saved(tensor))["archive/data.pkl"]
        storage_numel = bytes([0x4B, tensor.untyped_storage().nbytes() // 4])
        assert pickled.count(storage_numel) >= 1
        short = pickled.replace(storage_numel, b"K\x0f", 1)
        with pytest.raises(ContainerError, match=r"expected \d+ bytes .* found 60"):
            decode(memoryview(crafted(short, bytes(60))), verify=True)


def test_decode_raises_when_the_storage_is_not_its_record() -> None:
    pickled = records_of(saved(torch.zeros(16)))["archive/data.pkl"]
    for nbytes in (0, 63, 68, 128):
        with pytest.raises(ContainerError, match=f"expected 64 bytes of storage, found {nbytes}"):
            decode(memoryview(crafted(pickled, bytes(nbytes))), verify=True)


def long_ints(numbers: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(b"\x8a\x09" + n.to_bytes(9, "little") for n in numbers) + b"t"


def float_pickle(shape: tuple[int, ...], stride: tuple[int, ...], storage_numel: int) -> bytes:
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
        b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK%ctQK\x00%b%b\x89ccollections\nOrderedDict\n)RtR."
        % (storage_numel, long_ints(shape), long_ints(stride))
    )


def test_decode_raises_when_an_expanded_tensor_cannot_be_addressed() -> None:
    for shape in ((2**62, 4), (2**31, 2**31, 2), (2**63 - 1,) * 64):
        pickled = float_pickle(shape, (0,) * len(shape), 16)
        with pytest.raises(ContainerError, match="can be addressed"):
            decode(memoryview(crafted(pickled)), verify=True)


def test_decode_raises_when_an_empty_shape_has_strides_beyond_all_numbers() -> None:
    """The contiguous strides of this shape do not fit into any pickle."""
    for shape in ((0,) + (2**62,) * 63, (2**62,) * 63 + (0,)):
        pickled = float_pickle(shape, (1,) * 64, 0)
        with pytest.raises(ContainerError, match="can be addressed"):
            decode(memoryview(crafted(pickled, b"")), verify=True)


def test_decode_allocates_little_when_header_fields_are_huge() -> None:
    container = contained(random_tensor("uint8", (100,)))
    stock = saved(random_tensor("uint8", (100,)))
    rng = random.Random(5)
    gc.collect()
    tracemalloc.start()
    try:
        for original in (container, stock):
            for _ in range(3000):
                damaged = bytearray(original)
                place = rng.randrange(len(damaged) - 8)
                width = rng.choice([1, 2, 4, 8])
                damaged[place : place + width] = b"\xff" * width
                try:
                    decode(memoryview(damaged), verify=True)
                except ContainerError:
                    pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20
