"""The settings of what follows a run: evaluations, records (`records`), trackers, snapshots."""

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
class EvaluationSetConfig:
    """One of several sets of held-out prompts, in the list `evaluation.sets`."""

    name: str = setting("", "begins the names of its results: NAME/before")
    prompts: str = setting("", "JSONL, JSON, CSV or Parquet file, or a name of the hub")
    subset: str = setting("", "which part, where a data set of the hub has several")
    split: str = setting("train", "of the data set; that of a file is train")
    prompt_key: str = setting("prompt", "column with the question")
    answer_key: str = setting("answer", "column with the right answer; empty: there is none")
    template: str = setting("", "the prompt, with columns in braces: 'Q: {question} A:'")
    num_prompts: int = setting(0, "first prompts of it; 0: all", ge=0)
    num_samples: int = setting(0, "answers a prompt; 0: evaluation.num_samples", ge=0, le=1024)
    temperature: float | None = setting(
        None, "of its answers, 0 is greedy; null: generation.temperature"
    )
    reward: str = setting(
        "", "package.module:name of a reward, or its class, in place of that of the workflow"
    )
    workflow: str = setting(
        "", "package.module:name of a workflow, or of what makes it, in place of that of the run"
    )


_ON_ROWS = ("in a run on rows of a data set",)


@dataclass
class EvaluationConfig:
    """When the policy is evaluated, and on how much."""

    every_steps: int = setting(0, "steps between two; 0: only before and after training", ge=0)
    num_prompts: int = setting(
        256,
        "held-out prompts of one evaluation; a set of `sets` has its own number",
        ge=1,
        idle=_ON_ROWS,
    )
    num_samples: int = setting(
        1, "answers a prompt; the greedy evaluation takes one", ge=1, le=1024, idle=_ON_ROWS
    )
    greedy: bool = setting(True, "also evaluate at temperature 0 at the end", idle=_ON_ROWS)
    sets: list[EvaluationSetConfig] = setting(
        list,
        "sets of prompts beside those of the script: [{name: ..., prompts: ...}, ...]",
        idle=_ON_ROWS,
    )
    stop_after: int = setting(
        0, "training ends after so many evaluations without a better one; 0: never", ge=0
    )


class KeepRecords(StrEnum):
    """What of a run is recorded.

    all: every row, answers of evaluations, what train ranks compute of the tokens of one group in
        16, and what each process does when.
    sample: the same, but the rows only of groups with rejected episodes and of one group in 16, and
        the answers to one held-out prompt in 16.
    none: only the best and the worst answer of about two groups a training step.
    """

    all = "all"
    sample = "sample"
    none = "none"


@dataclass
class RecordsConfig:
    """Rows with all their tokens, and what each process does when: records/ of the run folder."""

    keep: KeepRecords = setting(KeepRecords.all)
    max_bytes: int = setting(
        4 << 30,
        "of all rollout workers together; rows take about 3.5 bytes a token, and the oldest "
        "unremarkable ones go first",
        ge=1 << 20,
    )


_NO_SNAPSHOTS = ("every_steps=0: only the final model is kept",)


@dataclass
class CheckpointConfig:
    """When the run is saved."""

    every_steps: int = setting(10, "training steps between snapshots; 0: none", ge=0)
    every_minutes: float = setting(
        10.0, "at most between two snapshots; 0: no limit", ge=0, idle=_NO_SNAPSHOTS
    )
    keep: int = setting(2, "newest snapshots that stay", ge=1, idle=_NO_SNAPSHOTS)
    memory_snapshots: bool = setting(
        True, "each step has a snapshot in memory, for train workers that die"
    )
    stop_within_s: float = setting(
        120.0,
        "limit of the step and the snapshot that Ctrl-C or SIGTERM still ends; 0: none",
        ge=0,
        idle=_NO_SNAPSHOTS,
    )
    export_every_steps: int = setting(
        0, "training steps between exported models, all kept; 0: only the final one", ge=0
    )
    keep_best: str = setting(
        "",
        "the number of evaluations that tells the best model, such as accuracy or aime/pass@4",
        idle=("evaluation.every_steps=0",),
    )
