"""What an episode comes to: metrics, versions, and the reply of one that is evaluated. No torch."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from areal_sc.engines.base import Completion
from areal_sc.errors import RewardError, WorkflowError
from areal_sc.rejection import Rejection
from areal_sc.rewards.base import Reward, voter_of
from areal_sc.rewards.pool import RewardPool
from areal_sc.workers.calls import EvaluatedText, EvaluationReply, KeptCompletion
from areal_sc.workflows.base import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass
class EvaluatedEpisode:
    """An episode of an evaluation, and what it asked its worker for.

    Attributes:
        temperature: replaces that of the run; None keeps it.
        first_prompt: tokens that the model read first.
        completions: what the model wrote, in the order in which it was asked for; None: it has not
            ended.
        scored: the reward and the text that were scored last.
    """

    temperature: float | None = None
    first_prompt: Sequence[int] = ()
    completions: list[Completion | None] = field(default_factory=list)
    scored: tuple[Reward, str] | None = None

    @property
    def ended(self) -> list[Completion]:
        """The completions that have ended."""
        return [it for it in self.completions if it is not None]

    def begin(self, input_ids: Sequence[int]) -> int:
        """A completion is asked for. Returns: its place among all of them."""
        self.first_prompt = self.first_prompt or tuple(input_ids)
        self.completions.append(None)
        return len(self.completions) - 1

    async def vote(self, rewards: RewardPool) -> str | None:
        """What the scored text answers, see `EvaluationReply`; None if the reward fails to tell.

        Raises: WorkerError: see `RewardPool.vote`.
        """
        if (scored := self.scored) is None or (voter := voter_of(scored[0])) is None:
            return None
        try:
            return await rewards.vote(voter, scored[1])
        except (RewardError, WorkflowError) as error:
            is_call = isinstance(error, RewardError)  # whose text may differ with each answer
            _warn(f"such answers have no vote: {Rejection.of(error).cause if is_call else error}")
            return None


@cache
def _warn(text: str) -> None:
    """Once for each text."""
    logger.warning(text)


async def evaluation_reply(
    rows: Sequence[Trajectory] | Rejection,
    seen: EvaluatedEpisode,
    text: EvaluatedText | None,
    rewards: RewardPool,
) -> EvaluationReply:
    """What an evaluated episode gave.

    Args:
        rows: of the episode, checked; or why there are none.
        text: see `EvaluationReply`.
        rewards: asks the reward what the answer is.
    Raises: WorkerError: see `RewardPool.vote`.
    """
    if isinstance(rows, Rejection):
        return EvaluationReply(None, rejection=rows, text=text)
    sampled = [version for row in rows for version, _ in version_spans(row)]
    reward = sum(float(row.reward) for row in rows) / len(rows)
    versions = min(sampled), max(sampled)
    vote = await seen.vote(rewards)
    return EvaluationReply(reward, episode_metrics(rows), versions, vote=vote, text=text)


def evaluated_text(seen: EvaluatedEpisode, tokenizer: PreTrainedTokenizerBase) -> EvaluatedText:
    """What the model read and wrote, as text and as tokens."""
    written = list(chain.from_iterable(it.token_ids for it in seen.ended))
    prompt, answer = (
        str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
        for tokens in (list(seen.first_prompt), written)
    )
    completions = (
        KeptCompletion(it.token_ids, it.finish_reason, it.temperature, it.stop) for it in seen.ended
    )
    return EvaluatedText(prompt, answer, tuple(completions))


def episode_metrics(rows: Sequence[Trajectory]) -> dict[str, float]:
    """Means over the rows that name the metric."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.metrics.items():
            values.setdefault(name, []).append(float(value))
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def version_spans(trajectory: Trajectory) -> tuple[tuple[int, int], ...]:
    """(version, number of trained tokens that it sampled) of a checked row, ascending."""
    sampled = np.asarray(trajectory.versions)[np.asarray(trajectory.loss_mask)]
    return tuple(sorted(Counter(sampled.tolist()).items()))
