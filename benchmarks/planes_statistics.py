"""Latencies and ratios of repeated measurements."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """{"p50_s", "p99_s"} of at least two latencies."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50_s": cuts[49], "p99_s": cuts[98]}


def ratio(values: Mapping[str, Sequence[float]], one: str, other: str) -> float:
    """`one` over `other`, median of the ratios of the rounds."""
    pairs = zip(values[one], values[other], strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)
