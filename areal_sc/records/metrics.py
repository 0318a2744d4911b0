"""What is measured of a run: its steps, its evaluations, and the summary of all of it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal, Self

import msgspec

from areal_sc.rewards.base import PART_PREFIX
from areal_sc.system.json_lines import to_json

STEP_PARTS = ("wait", "train", "sync")
"""What the time of a step goes to."""

Bound = Literal["rollout", "training", "synchronisation"]

MAX_WAITING_SHARE = 0.2
"""Share of a step that the trainer may wait for its batch before rollout counts as the bound."""


PASS_AT = "pass@"
"""Before the number of answers, in the names of numbers of an evaluation."""


@cache
def _names(record_type: type[Any]) -> tuple[str, ...]:
    """The fields of a dataclass, and its properties."""
    found = inspect.getmembers(record_type, lambda member: isinstance(member, property))
    return (*(item.name for item in fields(record_type)), *(name for name, _ in found))


@dataclass(frozen=True, kw_only=True)
class _Record:
    """A line of the metrics file.

    Attributes:
        workflow: means over episodes of the metrics that the workflow reports.
    """

    workflow: Mapping[str, float] = field(default_factory=dict)

    @property
    def accuracy(self) -> float | None:
        """The workflow's metric of that name; None where it reports none."""
        return self.workflow.get("accuracy")

    def reward_parts(self) -> dict[str, float]:
        """Means of several reward functions, each before its weight, by `reward/NAME`."""
        return {n: value for n, value in self.workflow.items() if n.startswith(PART_PREFIX)}

    def value(self, name: str) -> Any:
        """A field, a property, or what the workflow reports under that name; else None."""
        return getattr(self, name) if hasattr(self, name) else self.workflow.get(name)

    def to_record(self) -> dict[str, Any]:
        """The fields, and every property that follows from them; `from_record` is its inverse."""
        record_type: Any = type(self)
        return {name: getattr(self, name) for name in _names(record_type)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Null in a field of type float was not finite."""
        values = {item.name: record[item.name] for item in fields(cls) if item.name in record}
        for item in fields(cls):
            if item.type == "float" and values.get(item.name, 0.0) is None:
                values[item.name] = math.nan
        if "workflow" not in values and record.get("accuracy") is not None:  # an earlier areal_sc
            values["workflow"] = {"accuracy": record["accuracy"]}
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class StepMetrics(_Record):
    """One training step.

    Staleness is in policy versions: of a group since its admission, of a trained token since it was
    sampled.

    Attributes:
        step: number of training steps done, this one included.
        reward: mean over episodes, of the means over their rows.
        lead: steps that generation may be ahead of training; see `controller/rollout/admission.py`.
        slack: how long the batch stood complete before it was asked for, less how long it was
            waited for, in steps; None where it is not known.
        num_rows: rows trained on.
        num_rejected_groups: groups rejected since the step before.
        rejected_episodes: episodes rejected since the step before, by cause.
        num_generated_tokens: tokens sampled since the step before, by all rollout workers.
        num_trained_tokens: tokens in the loss.
        num_masked_tokens: tokens kept out of the loss because they are over the bound.
        num_wasted_tokens: tokens generated and thrown away since the step before.
        mean_sequence_length: tokens a row, prompt and completion.
        step_time_s: from the end of the step before to the end of this one.
        wait_s: waiting for the batch, that is for generation.
        train_s: proximal log-probabilities, advantages and updates.
        sync_s: publication of the weights.
        num_train_workers: ranks.
        num_rollout_workers: those that are to stay, also while one is started again.
        max_staleness: the setting.
        group_time_s: of groups that ended since the step before, from their start on a worker until
            their rows were sealed; None where none ended.
        longest_tokens_mean, longest_tokens_std, longest_tokens_max: generated tokens of a group's
            longest row, over groups of the batch.
        signal_share: groups whose answers differ in their rewards, before shaping, of those in the
            batch: the others teach nothing where advantages are those within a group.
        num_groups: of the batch; 0: an earlier areal_sc did not record it.
        reward_std: of the batch's episodes.
        reward_std_in_groups: of the episodes of one group, by the mean of their variances; None
            where no group has two.
        num_one_episode_groups: groups of the batch with one episode, which has none to be compared
            with; unless `rollout.group_size` is 1, rejections have left it alone.
        controller_bytes: bytes on the controllers' sockets since the step before.
        published_bytes: of the weights, as a worker gets them that is on another node than the
            trainers: whole, or what has changed in them.
        train: what the engine reports: loss, entropy, grad_norm, lr, clip_fraction, ...; without
            means over nothing, such as the entropy where no token has a gradient.
        counters: all that workers and controllers count, summed; since the start of the workers.
    """

    step: int
    reward: float
    group_staleness_mean: float
    group_staleness_max: int
    token_staleness_mean: float
    token_staleness_max: int
    num_rows: int
    num_generated_tokens: int
    num_trained_tokens: int
    step_time_s: float
    wait_s: float
    train_s: float
    sync_s: float
    lead: float | None = None
    slack: float | None = None
    num_rejected_groups: int = 0
    rejected_episodes: Mapping[str, int] = field(default_factory=dict)
    num_masked_tokens: int = 0
    num_wasted_tokens: int = 0
    mean_sequence_length: float = 0.0
    num_train_workers: int = 0
    num_rollout_workers: int = 0
    max_staleness: int = 0
    group_time_s: float | None = None
    longest_tokens_mean: float = 0.0
    longest_tokens_std: float = 0.0
    longest_tokens_max: int = 0
    signal_share: float | None = None
    num_groups: int = 0
    reward_std: float | None = None
    reward_std_in_groups: float | None = None
    num_one_episode_groups: int = 0
    controller_bytes: int = 0
    published_bytes: int = 0
    train: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        """Also what the engine reports."""
        is_of_engine = name in self.train and not hasattr(self, name)
        return self.train[name] if is_of_engine else super().value(name)

    def is_of_rows(self) -> bool:
        """It was trained on rows of a data set: nothing was generated, or rewarded."""
        return math.isnan(self.reward) and not (
            self.num_generated_tokens or self.num_rollout_workers
        )

    @property
    def cut_share(self) -> float | None:
        """Share of the answers that did not end by themselves; None: the workflow does not tell."""
        stopped = self.workflow.get("stopped")
        return None if stopped is None else 1 - stopped

    @property
    def num_rejected_episodes(self) -> int:
        """Episodes rejected since the step before, of all causes."""
        return sum(self.rejected_episodes.values())

    @property
    def answer_tokens(self) -> float:
        """Mean number of sampled tokens a row."""
        return _ratio(self.num_trained_tokens + self.num_masked_tokens, self.num_rows)

    @property
    def masked_share(self) -> float:
        """Masked tokens as a share of those that could have been trained."""
        return _ratio(self.num_masked_tokens, self.num_masked_tokens + self.num_trained_tokens)

    @property
    def wasted_share(self) -> float:
        """Wasted tokens as a share of the wasted and the used ones."""
        used = self.num_trained_tokens + self.num_masked_tokens
        return _ratio(self.num_wasted_tokens, self.num_wasted_tokens + used)

    @property
    def generated_tokens_per_s(self) -> float:
        """Sampled tokens by the step's time."""
        return _ratio(self.num_generated_tokens, self.step_time_s)

    @property
    def trained_tokens_per_s(self) -> float:
        """Tokens in the loss by the step's time."""
        return _ratio(self.num_trained_tokens, self.step_time_s)

    @property
    def bound(self) -> Bound:
        """What the step's time is due to.

        Rollout (episodes: generation, rewards, tools) overlaps with training, so a trainer that
        waits noticeably for its batch would not step sooner if it trained faster: rollout is the
        bound, even where training takes more of the step. Otherwise it is the longer one of
        training and publication.
        """
        if self.wait_s > MAX_WAITING_SHARE * (self.wait_s + self.train_s + self.sync_s):
            return "rollout"
        return "synchronisation" if self.sync_s > self.train_s else "training"


@dataclass(frozen=True, kw_only=True)
class EvaluationResult(_Record):
    """One evaluation on a set of held-out prompts, or on all sets together.

    Attributes:
        name: `before`, `after`, `greedy`, or `periodic`: of all sets together, in whose numbers
            each set counts alike; of one of them behind its name, `NAME/before`.
        step: training steps done when it began.
        reward: mean over answers that were not rejected; so are the workflow's metrics, but for
            `accuracy`, in which an answer that was rejected or cut is wrong.
        num_prompts: evaluated ones.
        num_rejected: answers whose episode was rejected.
        rejected_answers: their number by cause.
        num_cut: answers that did not end by themselves, as far as the workflow tells.
        num_samples: answers a prompt; 0: sets have different numbers.
        accuracy_low, accuracy_high: hold the accuracy over all such prompts with 95 % confidence.
        pass_at: "k" -> estimated share of prompts of which one of k answers is right.
        majority: accuracy of the most frequent answer to each prompt; None: rewards tell no votes.
        version_min: oldest policy version that sampled a token of it.
        version_max: newest one; the same as `version_min` where no publication fell into it.
        temperature: 0 is greedy; not a number where sets have different ones.
    """

    name: str
    step: int
    reward: float
    num_prompts: int
    version_min: int
    version_max: int
    temperature: float
    num_rejected: int = 0
    rejected_answers: Mapping[str, int] = field(default_factory=dict)
    num_cut: int = 0
    num_samples: int = 1
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    pass_at: Mapping[str, float] = field(default_factory=dict)
    majority: float | None = None
    workflow: Mapping[str, float] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        """Also `pass@K`."""
        k = name.removeprefix(PASS_AT)
        return self.pass_at.get(k) if k != name else super().value(name)


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of a whole run, as in `summary.json`; None where nothing was measured.

    Attributes:
        wall_time_s: from when this start of the script had begun its run to its end.
        first_step_s: from the start of the process, so with imports, to the end of the first
            training step.
        wait_share, train_share, sync_share: of the steps' time; see `StepMetrics`.
        accuracy_before, accuracy_after: means of the workflow's metric of that name.
        reward_parts_before, reward_parts_after: see `StepMetrics.reward_parts`.
        metrics_before, metrics_after: other means of the evaluations: those of the workflow, or the
            loss and margin of held-out rows.
        other_evaluations: name of an evaluation -> accuracy and reward of its newest result, or
            what was measured of held-out rows: those of further prompts (`NAME/before`, ...), and
            `periodic`.
        max_token_staleness_trained, max_group_staleness: in policy versions.
        num_rows_trained_twice: by the ledger; anything but 0 is a defect.
        num_worker_restarts: of workers that were lost and started again.
        rejected_episodes: their number by cause.
        controller_bytes: on the controllers' sockets, until the end of the last step.
    """

    num_steps: int
    wall_time_s: float | None = None
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    greedy_accuracy_after: float | None = None
    reward_before: float | None = None
    reward_after: float | None = None
    reward_parts_before: Mapping[str, float] | None = None
    reward_parts_after: Mapping[str, float] | None = None
    metrics_before: Mapping[str, float] | None = None
    metrics_after: Mapping[str, float] | None = None
    other_evaluations: Mapping[str, Mapping[str, float | None]] | None = None
    max_token_staleness_trained: int | None = None
    max_group_staleness: int | None = None
    num_rows_trained: int | None = None
    num_rows_trained_twice: int | None = None
    num_worker_restarts: int | None = None
    num_episodes_rejected: int | None = None
    rejected_episodes: Mapping[str, int] | None = None
    num_masked_tokens: int | None = None
    num_wasted_tokens: int | None = None
    controller_bytes: int | None = None
    generated_tokens_per_s: float | None = None
    trained_tokens_per_s: float | None = None
    first_step_s: float | None = None
    wait_share: float | None = None
    train_share: float | None = None
    sync_share: float | None = None

    def to_json(self) -> bytes:
        """The content of `summary.json`."""
        return msgspec.json.format(to_json(self), indent=2) + b"\n"


def without_empty_means(reported: Mapping[str, float]) -> dict[str, float]:
    """What an engine reports of a step, without its means over nothing, which are NaN.

    Where the loss is NaN as well, something is broken, and all numbers are kept.
    """
    empty = {n for n, value in reported.items() if isinstance(value, float) and math.isnan(value)}
    return {n: value for n, value in reported.items() if n not in empty or "loss" in empty}


def summarize(
    steps: Sequence[StepMetrics], evaluations: Sequence[EvaluationResult], **others: Any
) -> Summary:
    """The summary of a run.

    Args:
        steps: every training step of the surviving history, once.
        evaluations: in the order in which they were made; the last one of a name counts.
        others: the fields that do not follow from these: `wall_time_s`, and what is known of
            `first_step_s`, `num_rows_trained`, `num_rows_trained_twice`,
            `num_worker_restarts`, `num_episodes_rejected`, `rejected_episodes`.
    """

    def total(name: str) -> Any:
        return sum(getattr(step, name) for step in steps)

    named = {result.name: result for result in evaluations}
    measured: dict[str, Any] = {
        f"{metric}_{name}": getattr(named[name], metric)
        for metric in ("accuracy", "reward")
        for name in ("before", "after")
        if name in named and not math.isnan(getattr(named[name], metric) or 0.0)
    }
    for name in ("before", "after"):
        if name in named and (parts := named[name].reward_parts()):
            measured[f"reward_parts_{name}"] = parts
        if name in named and (means := named[name].workflow):
            measured[f"metrics_{name}"] = dict(means)
    if "greedy" in named:
        measured["greedy_accuracy_after"] = named["greedy"].accuracy
    further = {
        name: dict(result.workflow)
        if math.isnan(result.reward)  # of rows of a data set
        else {"accuracy": result.accuracy, "reward": result.reward}
        for name, result in named.items()
        if name not in ("before", "after", "greedy")
    }
    measured["other_evaluations"] = further or None
    if steps:
        time_s = total("step_time_s")
        measured["trained_tokens_per_s"] = _ratio(total("num_trained_tokens"), time_s)
    if steps and not steps[-1].is_of_rows():
        measured |= {
            "max_token_staleness_trained": max(step.token_staleness_max for step in steps),
            "max_group_staleness": max(step.group_staleness_max for step in steps),
            "num_masked_tokens": total("num_masked_tokens"),
            "num_wasted_tokens": total("num_wasted_tokens"),
            "controller_bytes": total("controller_bytes"),
            "generated_tokens_per_s": _ratio(total("num_generated_tokens"), time_s),
            **{f"{part}_share": _ratio(total(f"{part}_s"), time_s) for part in STEP_PARTS},
        }
    # the record of a step is lost with a script that dies between the two
    return Summary(num_steps=steps[-1].step if steps else 0, **others, **measured)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
