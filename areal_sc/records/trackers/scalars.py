"""The numbers of a record under flat names, as trackers draw them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from areal_sc.records.metrics import EvaluationResult, StepMetrics


def step_scalars(metrics: StepMetrics) -> dict[str, float]:
    """The names of `metrics.jsonl`; what is nested there gets a prefix: `train/loss`."""
    record = metrics.to_record()
    del record["step"]  # the axis
    return dict(_scalars(record))


def evaluation_scalars(result: EvaluationResult) -> dict[str, float]:
    """The names of `step_scalars`, under `evaluation/before/`, `evaluation/periodic/` and so on."""
    return dict(_scalars(result.to_record(), f"evaluation/{result.name}/"))


def _scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            yield f"{prefix}{name}", value
