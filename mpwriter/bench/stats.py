"""Medians, spread and ratios of repeated measurements.

Runs in: both. Pure; safe from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

__all__ = ["Summary", "ratio", "summarize"]


class Summary(NamedTuple):
    """What a table shows of a handful of measurements, in their unit."""

    median: float
    low: float
    high: float
    num_values: int


def summarize(values: Sequence[float]) -> Summary:
    """Median and range of `values`: with five rounds, quartiles would say no more.

    Raises:
        ValueError: `values` is empty.
    """
    if not values:
        raise ValueError("nothing was measured")
    return Summary(median(values), min(values), max(values), len(values))


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """`numerator / denominator`, or None where one is missing or the quotient says nothing.

    A difference of two medians can come out at or below zero when it drowns in noise; a ratio
    over such a figure would be a number without a meaning.
    """
    if numerator is None or denominator is None or numerator <= 0 or denominator <= 0:
        return None
    return numerator / denominator
