"""Collecting the tokens of an episode. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from areal_sc.engines.base import Completion
from areal_sc.records.recorded_calls import RecordedCall
from areal_sc.rewards.base import Score
from areal_sc.workflows.trajectory import Trajectory


class Transcript:
    """The tokens of one episode, in order: context that was given, completions that were sampled.

    transcript = Transcript()
    transcript.add_context(prompt_ids)
    completion = await engine.generate(transcript.input_ids)
    transcript.add_completion(completion)
    trajectory = transcript.trajectory(reward)

    Attributes:
        calls: of the model, for people who read the row.
        pictures: of its messages.
    """

    def __init__(self) -> None:
        self.input_ids: list[int] = []
        self.calls: list[RecordedCall] = []
        self.pictures: list[bytes] = []
        self._loss_mask: list[bool] = []
        self._behavior_logprobs: list[float] = []
        self._versions: list[int] = []
        self._temperatures: list[float] = []
        self._num_sampled: list[int] = []  # tokens of each completion
        self._given: dict[int, float] = {}  # weights of given tokens, by their places

    def add_context(self, token_ids: Sequence[int]) -> None:
        """Tokens that the model reads and that are never trained.

        They are those of a prompt, of feedback, of a tool, or of a greedy answer, which is no
        sample and so has nothing to train.
        """
        num_tokens = len(token_ids)
        self.input_ids += token_ids
        self._loss_mask += [False] * num_tokens
        self._behavior_logprobs += [0.0] * num_tokens
        self._versions += [-1] * num_tokens
        self._temperatures += [1.0] * num_tokens

    def add_given(self, token_ids: Sequence[int], weight: float) -> None:
        """Tokens of others, behind a completion, which are trained by their cross entropy.

        They are for the loss `policy_gradient_and_cross_entropy`: a workflow gives its rows the
        field of `given_weights`. Such rows have one reward, and no returns.

        Args:
            weight: of each token's cross entropy, not 0.
        Raises: ValueError: no completion stands before them, or the weight is 0.
        """
        if not self._num_sampled or not weight:
            raise ValueError(
                "expected given tokens behind a completion, and a weight that is not 0"
            )
        places = range(len(self.input_ids), len(self.input_ids) + len(token_ids))
        version = next(it for it in reversed(self._versions) if it >= 0)
        self.add_context(token_ids)
        for place in places:
            self._loss_mask[place], self._versions[place] = True, version
            self._given[place] = weight

    @property
    def given_weights(self) -> list[float]:
        """[T] the weights of given tokens, 0 at all others."""
        return [self._given.get(place, 0.0) for place in range(len(self.input_ids))]

    def add_completion(self, completion: Completion) -> None:
        """Tokens that the policy sampled: trained, the stop token included."""
        self.input_ids += completion.token_ids
        self._loss_mask += [True] * len(completion.token_ids)
        self._behavior_logprobs += completion.logprobs
        self._versions += completion.versions
        self._temperatures += [completion.temperature] * len(completion.token_ids)
        self._num_sampled.append(len(completion.token_ids))

    def trajectory(
        self, reward: float | Sequence[float], metrics: Mapping[str, float] | None = None
    ) -> Trajectory:
        """The episode so far, with its reward.

        Args:
            reward: or the return of each completion, in their order: the row's reward is the mean,
                and so is each part of several `Score`s.
        Raises: ValueError: the returns are not as many as the completions; or see `Trajectory`.
        """
        returns, parts = list[tuple[float, int]](), defaultdict[str, list[float]](list)
        weights: dict[str, float] = {}
        if isinstance(reward, Sequence):
            for value, size in zip(reward, self._num_sampled, strict=True):
                if isinstance(value, Score):
                    weights |= value.weights
                    for name, part in value.parts.items():
                        parts[name].append(part)
                returns += [(float(value), size)] if size else []
            means = {name: fmean(its) for name, its in parts.items()}
            reward = Score(fmean(reward), means, weights=weights)
        return Trajectory(
            input_ids=list(self.input_ids),
            loss_mask=list(self._loss_mask),
            behavior_logprobs=list(self._behavior_logprobs),
            versions=list(self._versions),
            temperatures=list(self._temperatures),
            reward=reward,
            metrics=dict(metrics or {}),
            returns=returns,
            calls=tuple(self.calls),
        )
