"""Whatever a state holds, and however it is written: it loads to the last bit, everywhere."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

from mpwriter import FsspecReader, MPFsspecWriter, SerializationFormat
from tests.states import (
    STOCK_WRITERS,
    assert_loads_everywhere,
    assert_same,
    bits,
    blank,
    load_into,
    save_with,
    shard_bytes,
    shard_names,
)
from tests.strategies import (
    COPIED_DTYPES,
    SAFETENSORS_TORCH_DTYPES,
    Printable,
    states,
    tensor_leaves,
    writer_options,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of complex32

State = dict[str, Any]

_examples = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@contextmanager
def _folder() -> Iterator[Path]:
    """A place for a checkpoint; what DCP raises becomes an exception that Hypothesis shrinks."""
    with tempfile.TemporaryDirectory() as name:
        try:
            yield Path(name) / "checkpoint"
        except CheckpointException as error:
            raise AssertionError(str(error)) from None


def _facts(state: State) -> list[Any]:
    return [
        (leaf.data_ptr(), leaf.is_shared(), leaf.stride(), leaf._version, bits(leaf))
        for leaf in tensor_leaves(state)
    ]


@_examples
@given(case=states(), options=writer_options())
def test_load_gives_back_what_was_saved(case: Printable, options: dict[str, Any]) -> None:
    """By our reader and both of stock; and the state is as it was."""
    state = case.state
    before = _facts(state)
    with _folder() as path:
        writer = MPFsspecWriter(path, **options)
        save_with(writer, state)
        assert _facts(state) == before
        assert_loads_everywhere(path, state)
        report = writer.last_report
        assert report is not None and report.nbytes == shard_bytes(path)
        assert all((path / name).stat().st_size for name in shard_names(path))
        if options["single_file_per_rank"]:
            assert len(shard_names(path)) <= options["num_workers"]


@_examples
@given(
    case=states(COPIED_DTYPES),
    writer=st.sampled_from(sorted(STOCK_WRITERS)),
    verify=st.booleans(),
)
def test_load_gives_back_what_stock_saved(case: Printable, writer: str, verify: bool) -> None:
    """FsspecWriter with one thread and with four, FileSystemWriter."""
    state = case.state
    with _folder() as path:
        save_with(STOCK_WRITERS[writer](path), state)
        assert_same(load_into(blank(state), FsspecReader(path, verify=verify)), state)


@pytest.mark.slow
@_examples
@given(
    cases=st.lists(states(), min_size=2, max_size=3),
    options=st.lists(writer_options(), min_size=3, max_size=3),
)
def test_load_gives_back_the_last_when_saved_over_each_other(
    cases: list[Printable], options: list[dict[str, Any]]
) -> None:
    """Nothing of an earlier save is mixed in or left behind."""
    with _folder() as path:
        for state, chosen in zip([case.state for case in cases], options):
            save_with(MPFsspecWriter(path, **chosen), state)
            assert_same(load_into(blank(state), FsspecReader(path)), state)
        places = FsspecReader(path).read_metadata().storage_data
        assert {place.relative_path for place in places.values()} == set(shard_names(path))


@_examples
@given(
    case=states(SAFETENSORS_TORCH_DTYPES),
    options=writer_options(),
)
def test_load_gives_back_what_was_saved_as_safetensors(
    case: Printable, options: dict[str, Any]
) -> None:
    """By our reader; every tensor by the safetensors package, too."""
    state = case.state
    with _folder() as path:
        writer = MPFsspecWriter(
            path, serialization_format=SerializationFormat.SAFETENSORS, **options
        )
        save_with(writer, state)
        assert_same(load_into(blank(state), FsspecReader(path)), state)
        stored = [
            bits(tensor)
            for name in shard_names(path)
            if name.endswith(".safetensors")
            for tensor in safetensors.torch.load_file(path / name).values()
        ]
        assert sorted(stored) == sorted(bits(leaf) for leaf in tensor_leaves(state))
