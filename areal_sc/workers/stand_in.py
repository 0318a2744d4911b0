"""Episodes without a model: what stands for its engine, and how one is played with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from areal_sc.config.schema import GenerationConfig, RolloutConfig
from areal_sc.engines.base import PLAIN, Completion, OnTokens, RequestOptions
from areal_sc.engines.request_checks import ANY_TOKEN, check_prompt
from areal_sc.rejection import Rejection
from areal_sc.user_code import await_user_code
from areal_sc.workers.calls import KeptCompletion
from areal_sc.workers.episodes import WorkerEpisodeEngine
from areal_sc.workers.group_judging import judged_group
from areal_sc.workers.trajectory_checks import checked_episode
from areal_sc.workflows.base import Trajectory, Workflow


class StandIn(ABC):
    """Stands for a `GenerationEngine`, as far as episodes use one; computes nothing.

    Args: processor: see `GenerationEngine`.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_token_ids: tuple[int, ...],
        max_context_tokens: int,
        processor: Any = None,
    ) -> None:
        self.processor = processor
        self.tokenizer = tokenizer
        self.end_token_ids = end_token_ids
        self.max_context_tokens = max_context_tokens

    @abstractmethod
    async def answer(self, input_ids: Sequence[int], sampling: GenerationConfig) -> KeptCompletion:
        """What is written to a prompt."""

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: GenerationConfig,
        options: RequestOptions = PLAIN,
        *,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        check_prompt(input_ids, vocab_size=ANY_TOKEN, max_context_tokens=self.max_context_tokens)
        its = await self.answer(input_ids, sampling)
        if on_tokens is not None and its.token_ids:
            on_tokens(its.token_ids)
        logprobs, versions = [0.0] * len(its.token_ids), [0] * len(its.token_ids)
        ends = its.finish_reason, its.temperature, its.stop
        return Completion(its.token_ids, logprobs, versions, *ends)


async def played_episode(
    workflow: Workflow,
    row: dict[str, Any],
    engine: WorkerEpisodeEngine,
    config: RolloutConfig,
    limit_s: float,
    *,
    is_trained: bool,
) -> list[Trajectory] | Rejection:
    """The rows of an episode, or why they cannot be used.

    Raises: Raised: what the user's code has raised.
    """

    async def run() -> list[Trajectory] | Rejection:
        returned = await workflow.run_episode(dict(row), engine)
        name, own = type(workflow).__name__, workflow.fields
        return checked_episode(returned, config, own, is_trained=is_trained, workflow=name)

    played = [await await_user_code(run, limit_s)]
    (rows,) = await judged_group(
        workflow, row, played, engine.tokenizer, config, vote=engine.vote, is_trained=is_trained
    )
    return rows
