"""The evaluation of a model that no run trains: answers that stay, and the numbers of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from areal_sc.config.schema import GRPOConfig
from areal_sc.controller.rollout.evaluation import EvaluationOutcome, EvaluationSet
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.controller.starting import start
from areal_sc.engines.handles import make_generator
from areal_sc.errors import CommandError
from areal_sc.log import Screen, logging_to
from areal_sc.preflight.checks import check_models
from areal_sc.records.estimates import Difference, mean_of, paired_difference
from areal_sc.records.metrics import EvaluationResult
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.factory import make_scheduler
from areal_sc.sources.row_file import num_rows_of
from areal_sc.system.json_lines import JsonLines, to_json
from areal_sc.trainer.display import Display
from areal_sc.trainer.evaluation.evaluation_sets import evaluation_result
from areal_sc.trainer.evaluation.kept_answers import (
    ANSWERS,
    SUMMARY,
    KeptAnswer,
    check_prompts,
    read_answers,
    replace_answers,
    write_file,
)
from areal_sc.trainer.evaluation.rescore import rescored
from areal_sc.workers.calls import EvaluationReply

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
        folder = RunFolder(config.run_dir)
        with ExitStack() as stack:
            folder.lock(overwrite=True)
            stack.callback(folder.close)
            stack.enter_context(self._logging(folder))
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
        folder = RunFolder(self._config.run_dir)
        with ExitStack() as stack:
            folder.lock(overwrite=True)
            stack.callback(folder.close)
            stack.enter_context(self._logging(folder))
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

    def _logging(self, folder: RunFolder) -> AbstractContextManager[None]:
        screen = Screen(self._display.warning, self._display.note)
        max_bytes = self._config.scheduler.max_log_bytes
        return logging_to("controller", folder.log_path("controller"), max_bytes, screen)

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
        found = [
            evaluation_result(
                outcome,
                name,
                temperature=usual if (own := self._sets[name].temperature) is None else own,
            )
            for name, outcome in outcomes.items()
        ]
        if len(outcomes) > 1:
            whole = EvaluationOutcome.together(list(outcomes.values()))
            common = {it.temperature for it in found}
            temperature = common.pop() if len(common) == 1 else float("nan")
            found.append(evaluation_result(whole, TOGETHER, temperature=temperature))
        return found

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
