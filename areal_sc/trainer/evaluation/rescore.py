"""Kept answers with other rewards: their episodes are played again, and nothing is generated.

kept completions ──► in place of a model ──► the workflow ──► its reward, in killable processes
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from areal_sc.config.schema import GenerationConfig, RolloutConfig
from areal_sc.controller.rollout.evaluation import EvaluationSet
from areal_sc.errors import CommandError, WorkflowError
from areal_sc.hub import local_model
from areal_sc.rejection import Rejection
from areal_sc.rewards.pool import RewardPool
from areal_sc.rewards.running import CodeRunner
from areal_sc.sources.prompts import row_of, row_to_wire
from areal_sc.sources.row_file import num_rows_of
from areal_sc.system.fork_server import ForkServer
from areal_sc.system.sandbox.opening import check_sandbox
from areal_sc.system.waiting import all_of
from areal_sc.trainer.evaluation.kept_answers import KeptAnswer
from areal_sc.user_code import Raised
from areal_sc.workers.calls import KeptCompletion
from areal_sc.workers.episodes import WorkerEpisodeEngine
from areal_sc.workers.evaluated import EvaluatedEpisode, evaluation_reply
from areal_sc.workers.stand_in import StandIn, played_episode

_AT_ONCE: Final = 64
"""Episodes that are played beside each other: enough for any number of reward processes."""


class _Replay(StandIn):
    """Writes again what was written before."""

    def __init__(
        self,
        tokenizer: Any,
        end_token_ids: tuple[int, ...],
        max_context_tokens: int,
        kept: Iterable[KeptCompletion],
    ) -> None:
        super().__init__(tokenizer, end_token_ids, max_context_tokens)
        self._left = iter(kept)

    async def answer(self, input_ids: Sequence[int], sampling: GenerationConfig) -> KeptCompletion:
        kept = next(self._left, None)
        if kept is None:
            raise WorkflowError("the workflow asks for more completions than are kept")
        return kept


def rescored(
    answers: Sequence[KeptAnswer],
    sets: Mapping[str, EvaluationSet],
    config: RolloutConfig,
    log_path: Path,
    on_each: Callable[[], None],
) -> list[KeptAnswer]:
    """The same answers, with what the workflows of these sets make of them now.

    Answers of other sets, and those of which no text is there, stay as they are.

    Args:
        log_path: of the reward processes.
        on_each: called after each answer.
    Raises: CommandError: a set has lost prompts. WorkerStartError: no reward process can be
        started. ModelError: there is no tokenizer. SandboxError: there is none, and one is needed.
    """
    for answer in answers:
        if (one := sets.get(answer.set)) and answer.prompt >= (num_rows_of(one.prompts) or 0):
            raise CommandError(
                f"set {answer.set} has no prompt {answer.prompt} any more, of which an answer is "
                "kept: expected the same prompts; give its file as it was, or --overwrite"
            )
    if any(one.workflow and one.workflow.runs_code() for one in sets.values()):
        check_sandbox(config.sandbox)
    # before the tokenizer is read: that loads torch, which begins threads
    rewards = ForkServer("areal_sc.rewards.process:run_reward_process")
    return asyncio.run(_rescored(answers, sets, config, log_path, on_each, rewards))


async def _rescored(
    answers: Sequence[KeptAnswer],
    sets: Mapping[str, EvaluationSet],
    config: RolloutConfig,
    log_path: Path,
    on_each: Callable[[], None],
    rewards: ForkServer,
) -> list[KeptAnswer]:
    from areal_sc.engines.tokenizer import load_tokenizer, read_end_token_ids

    run_code = CodeRunner(config.sandbox)
    pool = RewardPool(
        rewards,
        num_processes=config.num_reward_processes,
        timeout_s=config.reward_timeout_s,
        log_path=log_path,
        sources=log_path.parent,
        run_code=run_code,
        isolation=config.sandbox.isolation,
        hides=(log_path.parent.parent,),
    )
    slots = asyncio.Semaphore(_AT_ONCE)

    async def one(answer: KeptAnswer, tokenizer: Any, ends: tuple[int, ...]) -> KeptAnswer:
        if answer.text is None or answer.set not in sets:
            return answer
        async with slots:
            kept = answer.text.completions
            model = _Replay(tokenizer, ends, config.max_context_tokens, kept)
            played = await _replayed(answer, sets[answer.set], config, model, pool)
        on_each()
        return played

    try:
        folder = local_model(config.path)
        tokenizer = load_tokenizer(folder)
        ends = read_end_token_ids(folder, tokenizer)
        return await all_of(one(answer, tokenizer, ends) for answer in answers)
    finally:
        await pool.close()
        await run_code.close()
        await rewards.close()


async def _replayed(
    answer: KeptAnswer, one: EvaluationSet, config: RolloutConfig, model: Any, pool: RewardPool
) -> KeptAnswer:
    workflow, prompts = one.workflow, one.prompts
    assert workflow is not None
    assert answer.text is not None
    where = f"prompt {answer.prompt} of {answer.set}"
    given: Any = prompts[answer.prompt]  # type: ignore[index]  # sets of settings have numbers
    row = row_of(row_to_wire(given, answer.prompt, where), where)
    seen = EvaluatedEpisode()
    engine = WorkerEpisodeEngine(model, pool, "rescoring", config.generation, seen)

    limit_s = config.group_timeout_s
    try:
        rows = await played_episode(workflow, row, engine, config, limit_s, is_trained=False)
    except Raised as raised:
        rows = Rejection.of_episode(raised, limit_s)
    if engine.failure is not None:
        raise engine.failure
    if isinstance(rows, Rejection):
        rows = rows.of_prompt(answer.prompt, row, "")
    reply = await evaluation_reply(rows, seen, answer.text, pool)
    return KeptAnswer.of(answer.set, answer.prompt, answer.sample, reply)
