"""Reading pickles of tensors: what is understood, and that nothing is ever run."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpwriter._tensor_pickle import contiguous_stride, dump_tensor
from mpwriter._tensor_unpickle import PickledTensor, load_tensor
from tests.containers import records_of, saved, stock_dtypes

V2, V3 = "torch._utils\n_rebuild_tensor_v2", "torch._utils\n_rebuild_tensor_v3"
STORAGE = (
    b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x06tQ"
)
HOOKS = b"ccollections\nOrderedDict\n)R"
TENSOR = b"(" + STORAGE + b"K\x00K\x06\x85K\x01\x85\x89" + HOOKS + b"t"


def pickled_call(function: str, arguments: bytes) -> bytes:
    return b"\x80\x02c" + function.encode() + b"\n" + arguments + b"R."


@given(st.sampled_from(stock_dtypes()), st.lists(st.integers(0, 2**12), max_size=5).map(tuple))
def test_load_tensor_finds_what_was_dumped_when_dtype_and_shape_vary(
    name: str, shape: tuple[int, ...]
) -> None:
    found = load_tensor(dump_tensor(name, shape))
    assert found is not None
    nbytes = torch.Size(shape).numel() * getattr(torch, name).itemsize
    assert found == PickledTensor(name, shape, contiguous_stride(shape), 0, "0", nbytes, True)


def test_load_tensor_understands_the_examples_below() -> None:
    expected = PickledTensor("float32", (6,), (1,), 0, "0", 24, True)
    assert load_tensor(pickled_call(V2, TENSOR)) == expected
    assert load_tensor(memoryview(pickled_call(V2, TENSOR))) == expected


def changed(old: bytes, new: bytes) -> bytes:
    original = pickled_call(V2, TENSOR)
    assert original.count(old) == 1
    return original.replace(old, new)


@pytest.mark.parametrize(
    "pickled",
    [
        b"",
        b".",
        b"\x80\x02.",
        b"\x80\x02K\x01K\x01.",  # two values are left
        b"\x80\x02(K\x01.",  # a mark is left
        b"\x80\x03" + pickled_call(V2, TENSOR)[2:],
        pickled_call(V2, TENSOR)[:-1],
        pickled_call(V2, TENSOR) + b".",
        pickled_call("torch._utils\n_rebuild_tensor_v4", TENSOR),
        pickled_call("torch\nzeros", b"K\x01\x85"),
        pickled_call(V3, TENSOR),
        pickled_call(V3, TENSOR[:-1] + b"ctorch\nfloat32\nt"),  # a typed storage
        pickled_call(V2, TENSOR[:-1] + b"K\x01t"),
        pickled_call(V2, b"K\x01"),  # arguments are no tuple
        changed(b"FloatStorage", b"NoneStorage"),
        changed(b"FloatStorage", b"QInt8Storage"),
        changed(b"torch\nFloat", b"numpy\nFloat"),
        changed(b"\x03\x00\x00\x00cpu", b"\x06\x00\x00\x00cuda:0"),
        changed(b"storage", b"Storage"),
        changed(b"K\x06tQ", b"X\x01\x00\x00\x006tQ"),
        changed(b"K\x06tQ", b"J\xff\xff\xff\xfftQ"),  # -1
        changed(b"K\x06tQ", b"K\x06K\x06tQ"),
        changed(b"K\x06\x85", b"J\xff\xff\xff\xff\x85"),
        changed(b"K\x06\x85", b"\x88\x85"),  # True is no size
        changed(b"K\x06\x85", b"\x8a\x09" + bytes(8) + b"\x01\x85"),  # 2**64
        changed(b"K\x06\x85", b"\x8a\xff" + b"\x7f" * 255 + b"\x85"),
        changed(b"K\x06\x85", b"K\x06K\x01\x86"),  # two sizes, one stride
        changed(b"K\x06\x85", b"(" + b"K\x01" * 65 + b"t"),
        changed(b"\x89", b"K\x00"),  # requires_grad is no bool
        changed(HOOKS, b"}"),
        changed(b"OrderedDict", b"OrderedList"),
        changed(b"K\x00K", b"h\x07K"),  # a memo that was never set
        pickled_call("torch._utils\n_rebuild_parameter", TENSOR),
        b"\x80\x02" + b"(" * 5000 + b".",
    ],
)
def test_load_tensor_returns_none_when_the_pickle_is_another(pickled: bytes) -> None:
    assert load_tensor(pickled) is None


def test_load_tensor_runs_nothing_when_the_pickle_would(tmp_path: Path) -> None:
    mark = tmp_path / "was here"

    class Attack:
        def __reduce__(self) -> tuple[object, ...]:
            return open, (str(mark), "w")

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert load_tensor(pickle.dumps(Attack(), protocol)) is None
    assert load_tensor(pickled_call("io\nopen", f"X{chr(3)}\0\0\0/tm\x85".encode())) is None
    assert not mark.exists()


def test_load_tensor_returns_none_when_a_short_pickle_spells_out_to_a_huge_value() -> None:
    """Each tuple holds the one before twice: 2**400 parts in 2 KB."""
    bomb = b")q\x00" + b"h\x00h\x00\x86q\x00" * 400
    assert load_tensor(b"\x80\x02" + bomb + b".") is None
    assert load_tensor(changed(b"K\x06\x85", bomb)) is None
    assert load_tensor(changed(b"K\x00K", bomb + b"K")) is None
    assert load_tensor(changed(HOOKS, bomb)) is None
    assert load_tensor(changed(b"X\x07\x00\x00\x00storage", bomb)) is None


@given(st.binary(max_size=200))
def test_load_tensor_returns_none_when_given_noise(content: bytes) -> None:
    assert load_tensor(b"\x80\x02" + content) is None


@given(
    st.sampled_from(
        [
            records_of(saved(value))["archive/data.pkl"]
            for value in (
                torch.zeros(2, 3),
                torch.nn.Parameter(torch.zeros(1, 2, 3, 400)),
                torch.zeros(3).to(torch.float8_e5m2),
            )
        ]
    ),
    st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=4)), min_size=1, max_size=4),
)
def test_load_tensor_never_raises_when_a_pickle_is_changed(
    pickled: bytes, changes: list[tuple[int, bytes]]
) -> None:
    content = bytearray(pickled)
    for place, patch in changes:
        at = place % len(content)
        content[at : at + len(patch)] = patch
    found = load_tensor(bytes(content))
    assert found is None or all(0 <= size < 2**63 for size in (*found.shape, *found.stride))
