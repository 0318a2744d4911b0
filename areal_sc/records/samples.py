"""Samples: what the model read and wrote in a few groups of each training step.

The file `samples.jsonl` of a run folder has one sample a line; those of a step come together.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from areal_sc.system.json_lines import read_json_lines


class Place(StrEnum):
    """Where an answer stands in its group, by reward.

    best, worst: of answers with different rewards.
    equal: all answers of the group have this reward.
    """

    best = "best"
    worst = "worst"
    equal = "equal"


class Sample(Struct, frozen=True, kw_only=True):
    """One row of a trained batch, as text.

    Attributes:
        time: when the batch was formed, Unix time in seconds; the same for all samples of a step.
        step: the training step, from 1.
        group: id of the group, that is of the prompt.
        attempt, episode, row: as of `records.reading.Row`; -1: an earlier areal_sc did not say.
        reward: of this row.
        group_reward: mean over the rows of the group.
        metrics: what the workflow reports of the row.
        num_tokens: of prompt and answer together.
        first_version, last_version: policy versions that sampled the first and the last token.
        staleness: of the first token, in policy versions.
        prompt: what stands before the first sampled token, with special tokens.
        answer: all that follows; in several turns also what the model was given between them.
        output: what the episode wrote, as an agent does; "" for none.
    """

    time: float
    step: int
    group: int
    place: Place
    reward: float
    group_reward: float
    metrics: dict[str, float]
    num_tokens: int
    first_version: int
    last_version: int
    staleness: int
    prompt: str
    answer: str
    output: str = ""
    attempt: int = -1
    episode: int = -1
    row: int = -1


S = TypeVar("S", bound=Sample)


def read_samples(path: Path) -> list[Sample]:
    """The samples of a run in the order of its steps; an unfinished last line is left out.

    Where the run went back to a snapshot, or began again in its folder, those of the steps that it
    trained a second time replace the earlier ones.

    Raises: RunFolderError: the file cannot be read, or a line before the last is no sample.
    """
    found: list[Sample] = []
    for sample in read_json_lines(path, Sample):
        leave_out_replaced(found, sample)
        found.append(sample)
    return found


def leave_out_replaced(found: list[S], sample: Sample) -> None:
    """Removes the samples of steps that were trained again, which a later sample tells."""
    while found and found[-1].step >= sample.step and found[-1].time != sample.time:
        found.pop()


def shortened(text: str, max_chars: int) -> str:
    """A text, or the beginning and the end of a longer one, and how much is left out between."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    num_left_out = len(text) - 2 * half
    return f"{text[:half]} [... {num_left_out} characters ...] {text[-half:]}"
