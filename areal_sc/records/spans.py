"""Spans: what a process of a run did, and how long.

Some thousand of them are a block, column by column.
What the script did when is told by `metrics.jsonl`, of which `script_spans` makes them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Struct

from areal_sc.records.metrics import STEP_PARTS

NO_VERSION: Final = -1
LOST: Final = "lost records"
"""Kind of a span that tells how many records there was no room for."""
START_UP: Final = "start-up"
"""Kind of the span until an engine, or the script's training, can begin."""
_LEVEL: Final = 1
_ABOUT: Final = 4


class RecordedSpan(Struct, frozen=True, kw_only=True, gc=False):
    """Something that a process did, from one moment to another.

    Attributes:
        process: `rollout/0`, `train/0`, or `script`.
        kind: what it did: `episode`, `generation`, `updating weights`, `train`, ...; in
            a lane also what an episode waited for.
        lane: spans of a process that go on at the same time have different ones; -1: it concerns
            the whole process.
        began: Unix time in seconds.
        took_s: 0 of an event.
        about: of an episode and what it waits for `GROUP.ATTEMPT.PROMPT`, of a worker that came
            or went its name, of `LOST` how many, else the number of the step.
        first_version, last_version: policy versions of the first and the last sampled token, or
            of the weights; -1: none.
        num_tokens: sampled ones.
    """

    process: str
    kind: str
    began: float
    took_s: float
    lane: int = -1
    about: str = ""
    first_version: int = NO_VERSION
    last_version: int = NO_VERSION
    num_tokens: int = 0


class SpanColumns(Struct, frozen=True):
    """Spans of one process, as equally long columns.

    Attributes:
        kinds: [num_spans] places in `names`.
        numbers: [5, num_spans] int32: lane, first_version, last_version, num_tokens and, as a
            place in `abouts`, about.
        times: [2, num_spans] float64: began, took_s.
    """

    names: tuple[str, ...]
    abouts: tuple[str, ...]
    kinds: bytes
    numbers: bytes
    times: bytes

    @property
    def num_spans(self) -> int:
        return len(self.kinds)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`kinds`, `numbers` and `times`.

        Raises: ValueError: they are not equally long, or places of no names.
        """
        num = self.num_spans
        kinds = np.frombuffer(self.kinds, np.uint8)
        numbers = np.frombuffer(self.numbers, "<i4").reshape(5, num)
        for places, names in ((kinds, self.names), (numbers[_ABOUT], self.abouts)):
            if num and not 0 <= places.min() <= places.max() < len(names):
                raise ValueError(f"expected places of {len(names)} names, got {places.max()}")
        return kinds, numbers, np.frombuffer(self.times, "<f8").reshape(2, num)


def pack_spans(spans: Sequence[RecordedSpan]) -> bytes:
    """The body of a block of spans; `unpack_spans` is its inverse.

    Args:
        spans: of one process, with fewer than 256 kinds.
    """
    names = {span.kind: None for span in spans}
    abouts = {span.about: None for span in spans}
    places = {name: place for place, name in enumerate(names)}
    about_at = {about: place for place, about in enumerate(abouts)}
    numbers = [
        (one.lane, one.first_version, one.last_version, one.num_tokens, about_at[one.about])
        for one in spans
    ]
    columns = SpanColumns(
        tuple(names),
        tuple(abouts),
        bytes(places[span.kind] for span in spans),
        np.array(numbers, "<i4").T.tobytes(),
        np.array([(span.began, span.took_s) for span in spans], "<f8").T.tobytes(),
    )
    return zlib.compress(msgspec.msgpack.encode(columns), _LEVEL)


def unpack_spans(body: bytes) -> SpanColumns:
    """Raises: ValueError: they are none."""
    try:
        return msgspec.msgpack.decode(zlib.decompress(body), type=SpanColumns)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise ValueError(f"spans cannot be read: {error}") from error


def spans_of(columns: SpanColumns, process: str) -> Iterator[RecordedSpan]:
    """Raises: ValueError: see `SpanColumns.arrays`."""
    kinds, numbers, times = columns.arrays()
    of_all = zip(kinds.tolist(), numbers.T.tolist(), times.T.tolist(), strict=True)
    for kind, (lane, first, last, num_tokens, about), (began, took_s) in of_all:
        yield RecordedSpan(
            process=process,
            kind=columns.names[kind],
            began=began,
            took_s=took_s,
            lane=lane,
            about=columns.abouts[about],
            first_version=first,
            last_version=last,
            num_tokens=num_tokens,
        )


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
