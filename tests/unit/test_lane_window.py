"""The copy-ahead window of a lane: its size and its slots."""

from __future__ import annotations

import pytest
import torch

from mpwriter._arena import Arena
from mpwriter._lane_window import Window, window_bytes
from mpwriter._staging_parts import MIN_SLOT_BYTES

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("copy_ahead", "job", "expected"),
    [
        (64 * MIB, 1, 256 * KIB),
        (64 * MIB, 256 * KIB, 256 * KIB),
        (64 * MIB, 256 * KIB + 1, 512 * KIB),
        (64 * MIB, 1 << 40, 64 * MIB),
        (100_000, 1 << 40, 100_000),
        (1, 1 << 40, 2 * MIN_SLOT_BYTES),
        (0, 0, 2 * MIN_SLOT_BYTES),
    ],
)
def test_window_bytes_is_what_the_jobs_can_fill_within_the_copy_ahead(
    copy_ahead: int, job: int, expected: int
) -> None:
    assert window_bytes(copy_ahead, job) == expected


@pytest.mark.parametrize(
    ("nbytes", "slot_bytes", "num_slots"),
    [
        (64 * MIB, 8 * MIB, 8),
        (128 * MIB, 8 * MIB, 16),
        (16 * MIB, 2 * MIB, 8),
        (8 * MIB, MIB, 8),
        (256 * KIB, 32 * KIB, 8),
        (2 * MIN_SLOT_BYTES, MIN_SLOT_BYTES, 2),
        (100_000, 12_288, 8),
        (MIN_SLOT_BYTES, MIN_SLOT_BYTES, 1),
    ],
)
def test_window_has_aligned_slots_side_by_side(
    nbytes: int, slot_bytes: int, num_slots: int
) -> None:
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    window = Window(5, 640, memory, memoryview(memory.numpy()), lambda: None)
    assert window.slot_bytes == slot_bytes and len(window.slots) == num_slots
    for number, slot in enumerate(window.slots):
        assert (slot.segment, slot.offset) == (5, 640 + number * slot_bytes)
        assert slot.offset % 64 == 0 and slot.nbytes == slot_bytes
        assert slot.tensor.numel() == len(slot.buffer) == slot_bytes
        assert slot.address == memory.data_ptr() + number * slot_bytes == slot.tensor.data_ptr()
        slot.buffer[0] = number + 1
        assert slot.tensor[0] == number + 1
    assert window.slots[-1].offset + slot_bytes - 640 <= nbytes


def test_window_gives_its_extent_back_when_it_is_released() -> None:
    arena = Arena(MIB)
    window = Window.in_arena(arena, arena.lease(100_000, kind="window"))
    assert arena.stats().num_leases == 1
    window.slots.clear()
    window.release()
    assert arena.stats().num_leases == 0
    arena.close()
