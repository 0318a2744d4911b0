"""The evaluation of a model that no run trains: answers that stay, and the numbers of them.

With other rewards the episodes of kept answers are played again, and nothing is generated:

kept completions ──► in place of a model ──► the workflow ──► its reward, in killable processes
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from areal_sc.config.schema import GenerationConfig, GRPOConfig, RolloutConfig
from areal_sc.controller.rollout.evaluation import EvaluationOutcome, EvaluationSet
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.controller.starting import start
from areal_sc.engines.handles import make_generator
from areal_sc.errors import CommandError, WorkflowError
from areal_sc.hub import local_model
from areal_sc.log import Screen, logging_to
from areal_sc.preflight.checks import check_models
from areal_sc.records.estimates import Difference, mean_of, paired_difference
from areal_sc.records.metrics import EvaluationResult
from areal_sc.rejection import Rejection
from areal_sc.rewards.pool import RewardPool
from areal_sc.rewards.running import CodeRunner
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.factory import make_scheduler
from areal_sc.sources.prompts import row_of, row_to_wire
from areal_sc.sources.row_file import num_rows_of
from areal_sc.system.fork_server import ForkServer
from areal_sc.system.json_lines import JsonLines, to_json
from areal_sc.system.sandbox.opening import check_sandbox
from areal_sc.system.waiting import all_of
from areal_sc.trainer.display import Display
from areal_sc.trainer.evaluation.evaluation_sets import results_of_sets
from areal_sc.trainer.evaluation.kept_answers import (
    ANSWERS,
    SUMMARY,
    KeptAnswer,
    check_prompts,
    read_answers,
    replace_answers,
    write_file,
)
from areal_sc.user_code import Raised
from areal_sc.workers.calls import EvaluationReply, KeptCompletion
from areal_sc.workers.episodes import WorkerEpisodeEngine
from areal_sc.workers.evaluated import EvaluatedEpisode, evaluation_reply
from areal_sc.workers.stand_in import StandIn, played_episode

TOGETHER: Final = "together"
"""The name of the numbers of all sets."""

Place: TypeAlias = tuple[str, int, int]
"""A set's name, the number of a prompt, and of an answer to it."""


class ModelEvaluation:
    """Sets of prompts that a model answers; all that comes of it lies in one folder.

    Args:
        config: of the engines; its `run_dir` is for their logs, and is emptied by each start.
        sets: by name, each with its workflow and its numbers, and prompts that have a length.
        out: the folder.
    Raises: RunFolderError: answers of an earlier start cannot be read.
    """

    def __init__(
        self, config: GRPOConfig, sets: Mapping[str, EvaluationSet], out: Path, display: Display
    ) -> None:
        self._config = config
        self._sets = dict(sets)
        self._out = out
        self._display = display
        self._kept = {_place(answer): answer for answer in read_answers(out)}

    def generate(self) -> None:
        """Has all answers generated that are not kept yet; each is kept as soon as it is there.

        Raises: the errors of `RolloutController.evaluate`.
        """
        wanted = [(name, *place) for name in self._sets for place in self._places(name)]
        if not (num_missing := sum(place not in self._kept for place in wanted)):
            return
        config, names = self._config, list(self._sets)
        check_models(config)
        with ExitStack() as stack:
            folder = self._open(stack)
            scheduler = make_scheduler(config.scheduler, folder)
            stack.callback(scheduler.close)
            rollout = RolloutController(make_generator(config.rollout), scheduler)
            lines = JsonLines(self._out / ANSWERS)
            stack.callback(lines.close)
            done = len(wanted) - num_missing
            phase = stack.enter_context(
                self._display.phase("evaluation", len(wanted), "answers", done)
            )

            def keep(number: int, prompt: int, sample: int, reply: EvaluationReply) -> None:
                answer = KeptAnswer.of(names[number], prompt, sample, reply)
                lines.append(answer)
                self._kept[_place(answer)] = answer
                phase.advance()

            known = {
                (names.index(name), prompt, sample): answer.reply
                for (name, prompt, sample), answer in self._kept.items()
                if name in self._sets
            }
            for one in self._sets.values():  # what is wrong shows before a worker is started
                assert one.workflow is not None
                rollout.register(one.prompts, one.workflow)
            with start(rollout):
                rollout.evaluate_sets(list(self._sets.values()), keep=keep, known=known)

    def rescore(self, settings: Mapping[str, Any]) -> None:
        """Has the sets' workflows judge the kept answers anew, and keeps what comes of it.

        Args:
            settings: what the answers then come from.
        Raises: CommandError: none is kept. The errors of `rescored`.
        """
        if not self._kept:
            raise CommandError(f"there are no answers in {self._out}: leave out --rescore")
        with ExitStack() as stack:
            folder = self._open(stack)
            phase = stack.enter_context(
                self._display.phase("rescoring", len(self._kept), "answers")
            )
            answers = rescored(
                list(self._kept.values()),
                self._sets,
                self._config.rollout,
                folder.log_path("rewards"),
                phase.advance,
            )
        replace_answers(self._out, answers, settings)
        self._kept = {_place(answer): answer for answer in answers}

    def _open(self, stack: ExitStack) -> RunFolder:
        """The folder of what is started, empty, with the log of this process."""
        folder = RunFolder(self._config.run_dir)
        folder.lock(overwrite=True)
        stack.callback(folder.close)
        screen = Screen(self._display.warning, self._display.note)
        max_bytes = self._config.scheduler.max_log_bytes
        path = folder.log_path("controller")
        stack.enter_context(logging_to("controller", path, max_bytes, screen))
        return folder

    def results(self) -> list[EvaluationResult]:
        """The numbers of each set and, where there are several, of all together.

        Raises: CommandError: answers are missing. WorkflowError: all of a set were rejected.
        """
        cut_is_wrong = self._config.generation.cut_answers.is_inaccurate
        outcomes = {}
        for name, one in self._sets.items():
            places = [(name, *place) for place in self._places(name)]
            if missing := [place for place in places if place not in self._kept]:
                raise CommandError(
                    f"{len(missing)} of {len(places)} answers of {name} are missing in "
                    f"{self._out}: leave out --rescore, or give their --limit"
                )
            replies = [self._kept[place].reply for place in places]
            outcomes[name] = EvaluationOutcome.of(
                replies, one.num_samples or 1, cut_is_wrong=cut_is_wrong
            )
        usual = self._config.generation.temperature
        own = [one.temperature for one in self._sets.values()]
        temperatures = [usual if it is None else it for it in own]
        found = results_of_sets([*outcomes.values()], [*outcomes], temperatures, TOGETHER)
        return found if len(outcomes) > 1 else found[:1]

    def differences(self, other: Path) -> dict[str, Difference]:
        """How much more accurate the model is than that of another such folder, by set.

        Compared are the prompts of this evaluation to which the other folder has answers.

        Raises: CommandError: the folders have no set in common, or other prompts of one.
            RunFolderError: see `read_answers`.
        """
        cut_is_wrong = self._config.generation.cut_answers.is_inaccurate
        places = [(name, *place) for name in self._sets for place in self._places(name)]
        own = _right([self._kept[place] for place in places], cut_is_wrong=cut_is_wrong)
        prompts = {place[:2] for place in places}
        there = [it for it in read_answers(other) if (it.set, it.prompt) in prompts]
        others = _right(there, cut_is_wrong=cut_is_wrong)
        found = {}
        for name in self._sets:
            first, second = others.get(name, {}), own.get(name, {})
            common = sorted(first.keys() & second.keys())
            if common:
                check_prompts(self._out, other, name)
                one = paired_difference(
                    [first[prompt] for prompt in common], [second[prompt] for prompt in common]
                )
                found[name] = Difference(one.value, one.low, one.high, len(common))
        if not found:
            raise CommandError(f"{other} has no answers to prompts of {', '.join(self._sets)}")
        if len(found) > 1:
            whole = mean_of(list(found.values()))
            count = sum(it.num_prompts for it in found.values())
            found[TOGETHER] = Difference(whole.value, whole.low, whole.high, count)
        return found

    def write_summary(
        self, results: list[EvaluationResult], differences: Mapping[str, Difference]
    ) -> Path:
        """Writes the numbers. Raises: RunFolderError: they cannot be written."""
        path = self._out / SUMMARY
        content: dict[str, Any] = {it.name: it.to_record() for it in results}
        for name, difference in differences.items():
            content[name]["difference"] = asdict(difference)
        write_file(path, msgspec.json.format(to_json(content), indent=2) + b"\n")
        return path

    def _places(self, name: str) -> list[tuple[int, int]]:
        one = self._sets[name]
        num_rows = num_rows_of(one.prompts) or 0
        num_prompts = min(num_rows, one.num_prompts or num_rows)
        samples = range(one.num_samples or 1)
        return [(prompt, sample) for prompt in range(num_prompts) for sample in samples]


def _place(answer: KeptAnswer) -> Place:
    return answer.set, answer.prompt, answer.sample


def _right(
    answers: Iterable[KeptAnswer], *, cut_is_wrong: bool
) -> dict[str, dict[int, tuple[float, ...]]]:
    """How right each answer is, by set and prompt: of each the first ones, as many as all have."""
    of_prompts: dict[str, dict[int, list[EvaluationReply]]] = {}
    for answer in sorted(answers, key=_place):
        of_prompts.setdefault(answer.set, {}).setdefault(answer.prompt, []).append(answer.reply)
    found: dict[str, dict[int, tuple[float, ...]]] = {}
    for name, prompts in of_prompts.items():
        num_samples = min(map(len, prompts.values()))
        replies = [reply for its in prompts.values() for reply in its[:num_samples]]
        outcome = EvaluationOutcome.of(replies, num_samples, cut_is_wrong=cut_is_wrong)
        if outcome.right is not None:
            found[name] = dict(zip(prompts, outcome.right, strict=True))
    return found


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
        processor: Any,
    ) -> None:
        super().__init__(tokenizer, end_token_ids, max_context_tokens, processor)
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
    from areal_sc.engines.picture_processor import picture_processor
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
            model = _Replay(tokenizer, ends, config.max_context_tokens, kept, processor)
            played = await _replayed(answer, sets[answer.set], config, model, pool)
        on_each()
        return played

    try:
        folder = local_model(config.path)
        tokenizer = load_tokenizer(folder)
        ends, processor = (
            read_end_token_ids(folder, tokenizer),
            picture_processor(folder, tokenizer),
        )
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
