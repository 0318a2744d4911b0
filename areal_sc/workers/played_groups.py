"""Groups and evaluated answers that a rollout worker has played, as they are recorded. No torch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from areal_sc.records.recorded_rows import (
    EvaluatedAnswer,
    PlayedAnswer,
    RecordedGroup,
    RecordedRejection,
)
from areal_sc.records.recorder import PlayedGroup
from areal_sc.records.samples import shortened
from areal_sc.rejection import Rejection
from areal_sc.workers.calls import RunEvaluation, RunGroup
from areal_sc.workflows.base import Trajectory

MAX_PROMPT_CHARS: Final = 2000
_SHOWN_BYTES: Final = 64


def played_group(
    worker: str,
    group: RunGroup,
    prompt: str,
    began: float,
    kept: dict[int, list[Trajectory]],
    rejected: Mapping[str, Sequence[Rejection]],
) -> PlayedGroup:
    """What is recorded of it.

    Args:
        prompt: the row of the dataset, made text by `row_text`.
        began: Unix time in seconds.
        kept: rows of episodes, by their numbers.
        rejected: other episodes, by the cause.
    """
    recorded = RecordedGroup(
        worker=worker,
        group=group.group_id,
        attempt=group.attempt,
        dataset=group.prompt.dataset,
        index=group.prompt.index,
        prompt=_as_unicode(prompt),
        admitted_version=group.admitted_version,
        began=began,
        took_s=time.time() - began,
        rejected=tuple(
            RecordedRejection(cause, same[0].message, len(same)) for cause, same in rejected.items()
        ),
    )
    return PlayedGroup(recorded, kept)


def played_answer(
    worker: str,
    wanted: RunEvaluation,
    prompt: str,
    began: float,
    rows: Sequence[Trajectory] | Rejection,
) -> PlayedAnswer:
    """What is recorded of an evaluated episode; arguments are those of `played_group`."""
    rejected = None
    if isinstance(rows, Rejection):
        rejected, rows = RecordedRejection(rows.cause, rows.message, 1), ()
    answer = EvaluatedAnswer(
        evaluation=wanted.evaluation,
        step=wanted.step,
        worker=worker,
        dataset=wanted.prompt.dataset,
        index=wanted.prompt.index,
        sample=wanted.sample,
        prompt=_as_unicode(prompt),
        began=began,
        took_s=time.time() - began,
        rejected=rejected,
    )
    return PlayedAnswer(answer, rows)


def _as_unicode(text: str) -> str:
    """What is no Unicode, as a file's name may be, has question marks."""
    return text.encode(errors="replace").decode()


def row_text(row: Any) -> str:
    """The `str` of a row of a dataset; of a long one no more is made than is kept."""
    text = ""
    for part in _parts_of(row):
        text += part
        if len(text) > MAX_PROMPT_CHARS:
            return f"{text[:MAX_PROMPT_CHARS]} [...]"
    return text


def _parts_of(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield repr(shortened(value, MAX_PROMPT_CHARS // 2))
        case bytes():
            yield repr(value) if len(value) <= _SHOWN_BYTES else f"<{len(value)} bytes>"
        case dict():
            for number, (name, it) in enumerate(value.items()):
                yield ", " if number else "{"
                yield from _parts_of(name)
                yield ": "
                yield from _parts_of(it)
            yield "}" if value else "{}"
        case list() | tuple():
            begin, end = "[]" if isinstance(value, list) else "()"
            for number, it in enumerate(value):
                yield ", " if number else begin
                yield from _parts_of(it)
            yield end if value else begin + end
        case _:
            yield repr(value)
