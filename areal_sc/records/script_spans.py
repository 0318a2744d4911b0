"""What the script of a run did when: `metrics.jsonl` tells it, and there is no second account."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from areal_sc.records.metrics import STEP_PARTS
from areal_sc.records.spans import RecordedSpan

SCRIPT: Final = "script"
"""The process that runs the training loop."""


def script_spans(record: Mapping[str, Any]) -> list[RecordedSpan]:
    """The spans of a record of the file.

    Those of a step are `wait`, `train` and `sync`, one after the other from its begin on, with the
    version that it made; at the end of `sync` this version was published. An evaluation or another
    event is one moment.

    Raises: ValueError: it lacks something.
    """
    try:
        return list(_spans_of(record))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"expected a record of a run's metrics, but {error!r}") from error


def _spans_of(record: Mapping[str, Any]) -> Iterator[RecordedSpan]:
    ended = float(record["time"])
    if record["kind"] == "step":
        step, began = int(record["step"]), ended - record["step_time_s"]
        for part in STEP_PARTS:
            took_s = float(record[f"{part}_s"])
            yield RecordedSpan(
                process=SCRIPT,
                kind=part,
                began=began,
                took_s=took_s,
                about=str(step),
                first_version=step,
                last_version=step,
            )
            began += took_s
    elif record["kind"] == "evaluation":
        about = f"{record['name']}, step {record['step']}"
        yield RecordedSpan(process=SCRIPT, kind="evaluation", began=ended, took_s=0.0, about=about)
    else:
        about = ", ".join(str(it) for it in record.get("workers", ()))
        about = about or str(record.get("step", ""))
        yield RecordedSpan(
            process=SCRIPT, kind=str(record["name"]), began=ended, took_s=0.0, about=about
        )
