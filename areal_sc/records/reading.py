"""What a run has recorded, for scripts and notebooks; also while it goes on, or after it has died.

    from areal_sc.records.reading import rows, spans, steps

    pandas.DataFrame(map(dataclasses.asdict, rows("runs/minimal")))
    pandas.DataFrame(map(msgspec.structs.asdict, spans("runs/minimal")))

What is damaged, or was not written to its end, is left out, with a warning in the log. A folder
without records has none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from areal_sc.errors import RunFolderError
from areal_sc.records.blocks import Gap, read_blocks, read_body
from areal_sc.records.metrics import StepMetrics
from areal_sc.records.metrics_log import History, read_metrics
from areal_sc.records.record_files import RecordFile, Series, record_files
from areal_sc.records.recorded_calls import RecordedCall, unpack_calls
from areal_sc.records.recorded_pictures import RecordedPicture, unpack_picture
from areal_sc.records.recorded_rows import (
    AnswerContent,
    RecordedGroup,
    RecordedTokens,
    unpack_answers,
    unpack_contents,
    unpack_group,
    unpack_tokens,
)
from areal_sc.records.spans import RecordedSpan, script_spans, spans_of, unpack_spans
from areal_sc.records.trained_rows import (
    TrainedRow,
    TrainedTokens,
    unpack_trained,
    unpack_trained_tokens,
)
from areal_sc.run.run_files import RunFiles
from areal_sc.system.durable import os_errors_as

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """A row of a run, with all of its tokens.

    Attributes:
        worker: the one that generated it.
        group, attempt: of its prompt, as in the ledger. A run that has gone back to a snapshot may
            have them twice; the one that has `began` later counts.
        episode, row: its numbers within the group, and within the episode.
        index: its prompt's number in the dataset.
        prompt: the row of the dataset, as text; a long one is cut.
        admitted_version: policy version when the group was admitted.
        began, took_s: of its group; Unix time and time, in seconds.
        metrics: what the workflow reports of it.
        num_rejected: episodes of the group that have no rows.
        pictures: of its prompt; `pictures` has their contents.
        calls: of the model, in their order, with their messages; none of a workflow that is no
            conversation. Rows of an episode that begin alike share them.
        input_ids, loss_mask, behavior_logprobs, versions: [T], see `RecordedTokens`.
    """

    worker: str
    group: int
    attempt: int
    episode: int
    row: int
    index: int
    prompt: str
    admitted_version: int
    began: float
    took_s: float
    reward: float
    metrics: dict[str, float]
    num_rejected: int
    pictures: tuple[RecordedPicture, ...]
    calls: tuple[RecordedCall, ...]
    input_ids: np.ndarray
    loss_mask: np.ndarray
    behavior_logprobs: np.ndarray
    versions: np.ndarray


def rows(run: str | Path) -> Iterator[Row]:
    """The rows that rollout workers have recorded, worker by worker.

    Args:
        run: folder of the run.
    Raises: RunFolderError: the folder, or a file in it, cannot be read.
    """
    for file in _files(run):
        if file.series not in (Series.rows, Series.kept):
            continue
        for group, of_rows, of_calls in _read(file, rows_of):
            for row, tokens, calls in zip(group.rows, of_rows, of_calls, strict=True):
                yield Row(
                    **vars(tokens),
                    worker=group.worker,
                    group=group.group,
                    attempt=group.attempt,
                    episode=row.episode,
                    row=row.row,
                    index=group.index,
                    prompt=group.prompt,
                    admitted_version=group.admitted_version,
                    began=group.began,
                    took_s=group.took_s,
                    reward=row.reward,
                    metrics=row.metrics,
                    num_rejected=sum(it.num_episodes for it in group.rejected),
                    pictures=group.pictures,
                    calls=calls,
                )


def pictures(run: str | Path) -> Iterator[tuple[RecordedPicture, bytes]]:
    """The pictures of recorded rows, and their contents, each about once a worker.

    Arguments and errors are those of `rows`.
    """
    for file in _files(run):
        if file.series is Series.pictures:
            yield from _read(file, _picture_of)


def trained_rows(run: str | Path) -> Iterator[tuple[TrainedRow, TrainedTokens]]:
    """What train ranks have recorded of rows: of those of one group in 16.

    Arguments and errors are those of `rows`.
    """
    for file in _files(run):
        if file.series is Series.trained:
            yield from _read(file, _trained_of)


def evaluated_answers(run: str | Path) -> Iterator[AnswerContent]:
    """The answers of evaluations that rollout workers have recorded, worker by worker.

    One that was evaluated twice, as its worker was lost meanwhile or the run has gone back, is told
    twice; the one that has `began` later counts. Arguments and errors are those of `rows`.
    """
    for file in _files(run):
        if file.series is Series.evaluated:
            for answers in _read(file, answers_of):
                yield from answers


def spans(run: str | Path) -> Iterator[RecordedSpan]:
    """What each process of a run did, and how long; of a process in the order of their ends.

    Those of the script come last. Arguments and errors are those of `rows`.
    """
    for file in _files(run):
        if file.series is Series.spans:
            for found in _read(file, partial(_spans_of, file.process)):
                yield from found
    metrics = RunFiles(run).metrics_path
    for number, record in enumerate(read_metrics(metrics) if metrics.exists() else (), start=1):
        try:
            yield from script_spans(record)
        except ValueError as error:
            logger.warning("%s, line %d is left out: %s", metrics, number, error)


def steps(run: str | Path) -> Iterator[StepMetrics]:
    """What was measured of each training step, without those that a run has gone back behind.

    Args:
        run: folder of the run.
    Raises: RunFolderError: see `History.read`.
    """
    yield from History.read(RunFiles(run).metrics_path).steps


def trace_events(of_run: Iterable[RecordedSpan]) -> Iterator[dict[str, Any]]:
    """Spans as the `traceEvents` of Chrome's format, which https://ui.perfetto.dev shows.

    Each process of the run is one there, each lane a thread. Times are microseconds.
    """
    processes: dict[str, int] = {}
    for span in of_run:
        if span.process not in processes:
            number = processes[span.process] = len(processes) + 1
            names = {"name": span.process}
            yield {"ph": "M", "name": "process_name", "pid": number, "args": names}
        event = {
            "name": span.kind,
            "pid": processes[span.process],
            "tid": span.lane + 1,
            "ts": 1e6 * span.began,
            "args": {
                "about": span.about,
                "first_version": span.first_version,
                "last_version": span.last_version,
                "num_tokens": span.num_tokens,
            },
        }
        how = {"ph": "X", "dur": 1e6 * span.took_s} if span.took_s else {"ph": "i", "s": "g"}
        yield event | how


def _files(run: str | Path) -> list[RecordFile]:
    folder = RunFiles(run)
    if not folder.path.is_dir():
        raise RunFolderError(f"{folder.path} is no folder; expected that of a run")
    with os_errors_as(RunFolderError, f"{folder.records} cannot be read"):
        return record_files(folder.records)


def rows_of(
    head: bytes, body: bytes
) -> tuple[RecordedGroup, list[RecordedTokens], list[tuple[RecordedCall, ...]]]:
    """A group by its record: itself, and of each row its tokens and its calls of the model."""
    group = unpack_group(head)
    if not group.rows:
        return group, [], []
    calls = unpack_calls(body[len(body) - group.num_call_bytes :], len(group.rows))
    return group, unpack_tokens(body, group.rows), calls


def _picture_of(head: bytes, body: bytes) -> tuple[RecordedPicture, bytes]:
    return unpack_picture(head), body


def _trained_of(head: bytes, body: bytes) -> tuple[TrainedRow, TrainedTokens]:
    return unpack_trained(head), unpack_trained_tokens(body)


def answers_of(head: bytes, body: bytes) -> list[AnswerContent]:
    """Answers of an evaluation by their record."""
    return [*unpack_contents(body, unpack_answers(head))]


def _spans_of(process: str, head: bytes, body: bytes) -> list[RecordedSpan]:
    return list(spans_of(unpack_spans(body), process))


def _read(file: RecordFile, read: Callable[[bytes, bytes], T]) -> Iterator[T]:
    """What is in the whole blocks of a file.

    Args:
        read: of head and body of a block; raises ValueError where it is something else.
    Raises: RunFolderError: it cannot be read.
    """
    try:
        with file.path.open("rb") as opened:
            descriptor = opened.fileno()
            for found in read_blocks(descriptor, 0, os.fstat(descriptor).st_size):
                if isinstance(found, Gap):
                    num_bytes = found.end - found.begin
                    logger.warning("%s: %d bytes are damaged", file.path, num_bytes)
                    continue
                try:
                    record = read(found.head, read_body(descriptor, found))
                except ValueError as error:
                    logger.warning("%s: a record is left out: %s", file.path, error)
                    continue
                yield record
    except FileNotFoundError:  # it has gone meanwhile, for `records.max_bytes`
        return
    except OSError as error:
        raise RunFolderError(f"{file.path} cannot be read: {error.strerror}") from error
