"""Staging of whole state dicts: containers, objects, tensors that are not plain, refusals."""

from __future__ import annotations

import collections
import dataclasses
import enum
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.testing._internal.two_tensor import TwoTensor

from mpwriter._arena import get_arena
from mpwriter.errors import StagingError
from tests.stagings import assert_own, leased_bytes, stage
from tests.states import assert_same, bits

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of what torch calls beta


@pytest.fixture(autouse=True)
def _nothing_stays_leased() -> Iterator[None]:
    get_arena().trim()
    yield
    assert leased_bytes() == 0
    get_arena().trim()


# -- containers and objects ---------------------------------------------------------------------


@dataclasses.dataclass
class _Config:
    depth: int
    weight: torch.Tensor


class _Mode(enum.Enum):
    TRAIN = "train"


class _Holder:
    def __init__(self) -> None:
        self.tensors = [torch.ones(3)]


_Pair = collections.namedtuple("_Pair", "one other")


def _containers() -> dict[str, Any]:
    """Every value of it can change."""
    return {
        "dict": {"a": torch.ones(3), "b": {1: torch.zeros(2), "c": [1]}},
        "ordered": collections.OrderedDict(z=torch.ones(3), a=[1]),
        "default": collections.defaultdict(list, {"a": [1]}),
        "counter": collections.Counter("aab"),
        "list": [torch.ones(3), {"a": torch.ones(1)}, [torch.ones(2)]],
        "tuple": (torch.ones(3), [torch.ones(1)], collections.OrderedDict(a=[1])),
        "pair": _Pair(torch.ones(3), [1]),
        "array": np.arange(5),
        "dataclass": _Config(1, torch.ones(2)),
        "set": {1, 2},
        "bytearray": bytearray(b"text"),
        "holder": _Holder(),
        "deque": collections.deque([1, 2]),
    }


def _change(value: Any) -> None:
    """Change whatever can be changed in it."""
    if isinstance(value, torch.Tensor):
        value.add_(7)
    elif isinstance(value, (set, bytearray, collections.deque)):
        value.clear()
    elif isinstance(value, np.ndarray):
        value += 7
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _change(inner)
        if isinstance(value, list):
            value.append("more")
    elif isinstance(value, dict):
        for inner in value.values():
            _change(inner)
        value["more"] = 1
    elif isinstance(value, (_Config, _Holder)):
        for name, inner in vars(value).items():
            setattr(value, name, inner + 1) if isinstance(inner, int) else _change(inner)


def _plainly(value: Any) -> Any:
    return vars(value) if isinstance(value, (_Config, _Holder)) else value


@pytest.mark.parametrize("name", _containers())
def test_prepare_copies_containers_and_objects(name: str) -> None:
    """Types stay, nothing is shared, later changes do not show."""
    value, expected = _containers()[name], _containers()[name]
    staged = stage({name: value})
    _change(value)
    assert type(staged[name]) is type(expected)
    assert_same(_plainly(staged[name]), _plainly(expected))
    _change(staged[name])


def test_prepare_keeps_values_that_cannot_change() -> None:
    values = [None, True, 3, 2.5, 1j, "text", b"bytes", torch.float16, torch.Size([2]), _Mode.TRAIN]
    values += [torch.device("cpu"), frozenset({1}), np.float64(2.5), range(3)]
    staged = stage({"values": values, "n": {"inner": values[5]}})
    assert staged["values"] == values and list(map(type, staged["values"])) == [*map(type, values)]
    assert staged["n"]["inner"] == "text"


def test_prepare_copies_an_object_once_when_two_keys_share_it() -> None:
    shared = _Holder()
    staged = stage({"a": shared, "b": {"c": shared}})
    assert staged["a"] is staged["b"]["c"] is not shared


# -- tensors that are not plain -----------------------------------------------------------------


class _Subclass(torch.Tensor):
    pass


def _quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.randn(9), 0.1, 0, torch.qint8)


_OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "sparse rows": lambda: torch.eye(4).to_sparse_csr(),
    "quantized": _quantized,
    "subclass": lambda: torch.randn(5).as_subclass(_Subclass),
    "opaque": lambda: torch.randn(3, 4).to_mkldnn(),
}


@pytest.mark.parametrize("kind", _OTHERS)
def test_copy_keeps_what_is_no_plain_tensor(kind: str) -> None:
    """E06: copied to ordinary memory, as it is; the save decides what to make of it."""
    tensor = _OTHERS[kind]()
    before = tensor.clone()
    staged = stage({"other": tensor, "plain": torch.ones(3)})
    assert type(staged["other"]) is type(tensor)
    assert staged["other"].layout == tensor.layout and staged["other"].dtype == tensor.dtype
    if kind == "quantized":
        tensor.copy_(torch.zeros(9))
    elif kind != "opaque":
        tensor.mul_(2)
    for one, other in zip(_dense(staged["other"]), _dense(before), strict=True):
        assert torch.equal(one, other)
    assert leased_bytes() <= 64


def _dense(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.is_quantized:
        return [tensor.int_repr(), torch.tensor(tensor.q_scale())]
    return [tensor if tensor.layout is torch.strided else tensor.to_dense()]


def test_copy_passes_on_tensors_without_values() -> None:
    """E06: the save refuses them by name."""
    meta = torch.empty(3, device="meta")
    assert stage({"meta": meta})["meta"].is_meta


def test_copy_rebuilds_a_wrapper_around_staged_tensors() -> None:
    """Any subclass with `__tensor_flatten__`; each inner tensor lies in the arena."""
    wrapper = TwoTensor(torch.randn(3, 4).t(), torch.randn(3, 4).t())
    expected = bits(wrapper.a), bits(wrapper.b)
    staged = stage({"w": wrapper, "in": [wrapper]})
    wrapper.a.zero_()
    wrapper.b.zero_()
    for found in (staged["w"], staged["in"][0]):
        assert type(found) is TwoTensor and found.shape == (4, 3)
        assert_own(found.a)
        assert_own(found.b)
        assert (bits(found.a), bits(found.b)) == expected
    assert staged["w"].a is staged["in"][0].a


def test_copy_keeps_a_tensor_that_is_a_list_of_shards() -> None:
    """What torchrec puts into a DTensor: it has no `__tensor_flatten__`."""
    shards = [torch.randn(3, 2), torch.randn(3, 4)]
    expected = [shard.clone() for shard in shards]
    staged = stage({"w": LocalShardsWrapper(shards, [(0, 0), (0, 2)])})["w"]
    for shard in shards:
        shard.zero_()
    assert type(staged) is LocalShardsWrapper
    assert_same(staged.local_shards(), expected)


# -- what cannot be staged ----------------------------------------------------------------------


def _freed(tensor: torch.Tensor, nbytes: int = 0) -> torch.Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


_WITHOUT_MEMORY: dict[str, Callable[[], torch.Tensor]] = {
    "freed": lambda: _freed(torch.randn(1000)),
    "view of freed": lambda: _freed(torch.randn(100_000)[50_000:]),
    "strided view of freed": lambda: _freed(torch.randn(80, 80).t()[::2]),
    "cut short": lambda: _freed(torch.randn(1000), 4),
    "zero tensor": lambda: torch._efficientzerotensor((3,)),
    "freed parameter": lambda: torch.nn.Parameter(_freed(torch.randn(1000))),
    "in a wrapper": lambda: TwoTensor(torch.randn(9), _freed(torch.randn(9))),
}


@pytest.mark.parametrize("kind", _WITHOUT_MEMORY)
def test_prepare_raises_with_the_key_when_a_tensor_has_no_memory(kind: str) -> None:
    """E06: as FSDP leaves parameters between two passes. Read, it would end the process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = _WITHOUT_MEMORY[kind]()
    state = {"plain": torch.ones(3), "model": {"list": [1, torch.ones(2), tensor]}}
    with pytest.raises(StagingError, match=r"'model\.list\.2'") as caught:
        stage(state)
    assert caught.value.key == "model.list.2"
    assert leased_bytes() == 0


class _Uncooperative(torch.Tensor):
    """Can be asked for nothing."""

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("detach", "clone", "__deepcopy__"):
            raise NotImplementedError(f"{func.__name__}: this tensor does nothing")
        return super().__torch_function__(func, kinds, args, kwargs or {})


def test_prepare_raises_with_the_key_when_a_tensor_cannot_be_copied() -> None:
    odd = torch.randn(3).as_subclass(_Uncooperative)
    with pytest.raises(StagingError, match=r"'model\.odd'.*does nothing") as caught:
        stage({"plain": torch.ones(3), "model": {"odd": odd}})
    assert (caught.value.key, caught.value.original_type) == ("model.odd", "NotImplementedError")
    assert leased_bytes() == 0


class _Stubborn:
    def __deepcopy__(self, memo: Any) -> Any:
        raise OSError("this object is one of its kind")


@pytest.mark.parametrize(
    ("state", "key"),
    [
        ({"plain": torch.ones(3), "odd": _Stubborn()}, "odd"),
        (
            {"plain": torch.ones(3), "model": {"list": [1, {"odd": _Stubborn()}]}},
            "model.list.1.odd",
        ),
        ({"generator": (n for n in range(3))}, "generator"),
    ],
)
def test_prepare_raises_with_the_key_when_an_object_cannot_be_copied(
    state: dict[str, Any], key: str
) -> None:
    """Nothing stays leased, however long the exception is kept."""
    with pytest.raises(TypeError, match=f"'{key}' cannot be staged") as caught:
        stage(state)
    assert caught.value.__traceback__ is not None  # its frames hold the staging
    assert leased_bytes() == 0
