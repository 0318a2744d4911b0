"""Groups as a rollout worker records them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areal_sc.config.follow_settings import KeepRecords, RecordsConfig
from areal_sc.records.record_files import FilesOfProcess
from areal_sc.records.recorded_rows import (
    EvaluatedAnswer,
    PlayedAnswer,
    RecordedGroup,
    RecordedRejection,
)
from areal_sc.records.recorder import PlayedGroup, Recorder
from areal_sc.records.spans import NO_VERSION, RecordedSpan
from areal_sc.records.trained_rows import TrainedRow, TrainedTokens
from areal_sc.workflows.trajectory import Trajectory

MEBI = 1 << 20


def recorder_of(
    run: Path,
    *,
    keep: str = "all",
    max_bytes: int = 64 * MEBI,
    process: str = "rollout/0",
    groups_per_step: int = 1,
) -> Recorder:
    config = RecordsConfig(KeepRecords(keep), max_bytes)
    store = FilesOfProcess(run / "records", process, max_bytes)
    return Recorder(store, process, config, groups_per_step)


def trajectory(seed: int, length: int = 40, reward: float = 0.5) -> Trajectory:
    """A prompt of five tokens, then tokens of two versions with one between that was given."""
    random = np.random.default_rng(seed)
    mask = [False] * 5 + [True] * (length - 5)
    mask[20] = False
    versions = [-1] * 5 + [3] * 10 + [4] * (length - 15)
    versions[20] = -1
    drawn = random.exponential(size=length)
    logprobs = [float(-it) if m else 0.0 for it, m in zip(drawn, mask, strict=True)]
    return Trajectory(
        random.integers(0, 150_000, length).tolist(),
        mask,
        logprobs,
        versions,
        [1.0] * length,
        reward,
        {"accuracy": reward},
    )


def played(
    number: int,
    *episodes: list[Trajectory],
    rejected: tuple[RecordedRejection, ...] = (),
    pictures: Sequence[bytes] = (),
) -> PlayedGroup:
    group = RecordedGroup(
        worker="rollout/0",
        group=number,
        attempt=0,
        dataset=0,
        index=7,
        prompt="{'prompt': 'sort <script>‮'}",
        admitted_version=2,
        began=1000.5,
        took_s=2.5,
        rejected=rejected,
    )
    return PlayedGroup(group, dict(enumerate(episodes)), pictures)


def add_span(
    recorder: Recorder,
    kind: str,
    began: float,
    took_s: float,
    *,
    versions: tuple[int, int] = (NO_VERSION, NO_VERSION),
    **others: Any,
) -> None:
    """Args: versions: the first and the last one. others: as of `RecordedSpan`."""
    first, last = versions
    span = RecordedSpan(
        process=recorder.process,
        kind=kind,
        began=began,
        took_s=took_s,
        first_version=first,
        last_version=last,
        **others,
    )
    recorder.add_spans([span])


def add_trained(
    run: Path, group: int, rows: dict[tuple[int, int], int], *, rank: int = 0, step: int = 5
) -> dict[tuple[int, int], TrainedTokens]:
    """What a rank records. The first token of a row has no numbers.

    Args: rows: (episode, row) -> number of its trained tokens.
    """
    recorder = recorder_of(run, process=f"train/{rank}")
    random, found = np.random.default_rng([group, step]), {}
    for (episode, row), num_tokens in rows.items():
        gaps, entropies, advantages = random.normal(size=(3, num_tokens)).astype(np.float32)
        gaps[0] = entropies[0] = np.nan
        found[episode, row] = TrainedTokens(gaps, np.abs(entropies), advantages)
        name = {"group": group, "attempt": 0, "episode": episode, "row": row}
        told = TrainedRow(worker=f"train/{rank}", step=step, minibatch=0, at=1000.0 + step, **name)
        recorder.add_trained(told, found[episode, row])
    recorder.close()
    return found


def answered(
    index: int,
    rows: list[Trajectory],
    *,
    evaluation: str = "periodic",
    step: int = 0,
    sample: int = 0,
    began: float = 1000.5,
    rejected: RecordedRejection | None = None,
    pictures: Sequence[bytes] = (),
) -> PlayedAnswer:
    """An answer to a held-out prompt, as a worker has played it."""
    answer = EvaluatedAnswer(
        evaluation=evaluation,
        step=step,
        worker="rollout/0",
        dataset=1,
        index=index,
        sample=sample,
        prompt=f"{{'prompt': 'held out {index}', 'answer': '<b>{index}</b>'}}",
        began=began,
        took_s=0.5,
        rejected=rejected,
    )
    return PlayedAnswer(answer, rows, pictures)
