"""A plausible sample, for tests of what is written and shown."""

from __future__ import annotations

from typing import Any

from areal_sc.records.samples import Place, Sample


def sample(step: int = 1, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "step": step,
        "group": 3,
        "place": Place.best,
        "reward": 1.0,
        "group_reward": 0.25,
        "metrics": {"accuracy": 1.0, "completion_tokens": 5.0},
        "num_tokens": 9,
        "first_version": step - 1,
        "last_version": step - 1,
        "staleness": 0,
        "prompt": "3,8>",
        "answer": "8$",
    }
    return Sample(**values | changes)
