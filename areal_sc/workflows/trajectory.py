"""One row of an episode. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from areal_sc.records.recorded_calls import RecordedCall
from areal_sc.rewards.base import Score

ACCURACY: Final = "accuracy"
STOPPED: Final = "stopped"
"""Metrics of a workflow that a run understands: whether an answer is right, and whether it ended by
itself, 0 or 1."""


@dataclass
class Trajectory:
    """One row of an episode, token by token; T is at most `max_context_tokens`.

    Attributes:
        input_ids: [T] prompt and completion tokens, over all turns.
        loss_mask: [T] True on tokens that the policy sampled and that are trained.
        behavior_logprobs: [T] nats; 0 where `loss_mask` is False.
        versions: [T] policy version that sampled the token; -1 where `loss_mask` is False.
        temperatures: [T] that the token was sampled at, and is trained at; 1 where `loss_mask` is
            False. 0 (greedy) is for evaluations: a row with greedy tokens is not trained.
        reward: scalar, finite. That of a `Score` adds its parts to the metrics.
        returns: (return, number of trained tokens) of each answer, in their order, where answers
            have returns of their own; at most `MAX_RETURNS`. Then the reward is told of the row,
            and advantages are of the returns: to change `reward` alone changes nothing of them.
            Empty: the reward is that of all trained tokens.
        shaping: the part of the reward, and of each return, that says nothing of how good the
            answer is, such as a penalty for its length: groups that differ in it alone have no
            signal. That of a `Score` is its own.
        metrics: numbers to be averaged and shown, e.g. {"accuracy": 1.0}.
        weights: of the parts of the reward, by their names; that of a `Score` adds its own.
        answer: what the policy wrote last, as text; "" where nobody has said. A group's reward
            reads it: before that a worker makes it of the last tokens that the policy sampled.
        vote: what the answer says, in words that equal answers share; None: nobody has said.
        fields: values of each of `Workflow.fields`, by its name: [T, *shape], or [*shape] of one
            that is `per_row` or `per_group`.
        output: what the episode wrote for people who read its samples.
        calls: what it asked of the model, for people who read its rows.
        pictures: of an agent's messages, compressed, in the order of their tokens; None: those of
            the row of data.
    Raises: ValueError: a metric has the name of a part of the reward, and another value.
    """

    input_ids: Sequence[int]
    loss_mask: Sequence[bool]
    behavior_logprobs: Sequence[float]
    versions: Sequence[int]
    temperatures: Sequence[float]
    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    output: str = ""
    calls: Sequence[RecordedCall] = field(default=(), compare=False)
    returns: Sequence[tuple[float, int]] = ()
    shaping: float = 0.0
    weights: dict[str, float] = field(default_factory=dict)
    answer: str = ""
    vote: str | None = None
    pictures: Sequence[bytes] | None = None

    def __post_init__(self) -> None:
        parts = {}
        if isinstance(self.reward, Score):
            parts = self.reward.metrics
            self.shaping = self.shaping or self.reward.shaping
            self.weights = {**self.weights, **self.reward.weights}
        for name, value in parts.items():
            if self.metrics.get(name, value) != value:
                raise ValueError(
                    f"metric {name!r} is {self.metrics[name]}, and the reward of that name gave "
                    f"{value}: give one of them another name"
                )
        self.metrics = {**self.metrics, **parts}
