"""The settings of what follows a run: evaluations, samples (`records.samples`), trackers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from areal_sc.config.fields import setting


class TrackerKind(StrEnum):
    """What else keeps a run's metrics; each is a package of the same name."""

    wandb = "wandb"
    tensorboard = "tensorboard"
    trackio = "trackio"


@dataclass
class EvaluationConfig:
    """When the policy is evaluated, and on how much."""

    every_steps: int = setting(0, "steps between two; 0: only before and after training", ge=0)
    num_prompts: int = setting(256, "held-out prompts of one evaluation", ge=1)
    num_samples: int = setting(
        1, "answers a prompt; the greedy evaluation takes one", ge=1, le=1024
    )
    greedy: bool = setting(True, "also evaluate at temperature 0 at the end")


@dataclass
class SamplesConfig:
    """What the model reads and writes, kept in samples.jsonl of the run folder."""

    groups_per_step: int = setting(
        2, "groups a step whose best and worst answer are kept; 0: none", ge=0, le=64
    )
    max_chars: int = setting(
        2000,
        "characters kept of a prompt, and of an answer; a step takes up to "
        "4 * groups_per_step * max_chars characters of the disk",
        ge=20,
        le=100_000,
    )
    show: bool = setting(False, "the display of a Run shows the newest ones, too")
