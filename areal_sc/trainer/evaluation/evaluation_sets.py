"""The sets of prompts that a run is evaluated on: of the script, and of the settings."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any, Final

from areal_sc.config.follow_settings import EvaluationConfig, EvaluationSetConfig
from areal_sc.controller.rollout.evaluation import EvaluationOutcome, EvaluationSet
from areal_sc.errors import ConfigError, WorkflowError
from areal_sc.records.metrics import EvaluationResult
from areal_sc.rewards.weighted import weighted_functions
from areal_sc.sources.load_prompts import load_prompts
from areal_sc.sources.row_file import PromptSource
from areal_sc.user_code import blame, named
from areal_sc.workflows.base import Workflow
from areal_sc.workflows.single_turn import SingleTurnWorkflow

Given = PromptSource | Mapping[str, PromptSource | EvaluationSet] | None
"""Held-out prompts: one set without a name, several by name, or none."""

UNNAMED: Final = "held_out"
"""The set without a name, where there are others beside it."""


def evaluation_sets(
    given: Given,
    configured: Mapping[str, EvaluationSet],
    workflow: Workflow,
    config: EvaluationConfig,
) -> dict[str, EvaluationSet]:
    """All sets by name, each with its workflow and its numbers; one alone may have the name "".

    Args:
        given: by the script.
        configured: those of the settings.
        workflow: of the sets that have none.
    Raises: ConfigError: two have one name, or a name has a `/`. WorkflowError: a set is empty, or
        its workflow waits for agents outside.
    """
    sets = _given_sets(given, config)
    if configured and "" in sets:
        sets[UNNAMED] = sets.pop("")
    for name in sets:
        if name in configured:
            raise ConfigError(f"evaluation.sets: the script has a set {name!r}, too")
        if name and "/" in name:
            raise ConfigError(f"evaluation set {name!r}: expected a name without '/'")
    for name, one in {**sets, **configured}.items():
        if (one.workflow or workflow).waits_outside:
            raise WorkflowError(
                f"evaluation set {name!r}: agents outside are not waited for in an evaluation: "
                "give fit an evaluation_workflow"
            )
    return {
        name: replace(
            one,
            workflow=one.workflow or workflow,
            num_samples=1 if one.temperature == 0 else one.num_samples or config.num_samples,
        )
        for name, one in {**sets, **configured}.items()
    }


def configured_sets(config: EvaluationConfig, workflow: Workflow) -> dict[str, EvaluationSet]:
    """The sets of `evaluation.sets`, by name; their prompts are read.

    Args:
        workflow: of those that name none.
    Raises: ConfigError: a reward or a workflow cannot be used. WorkflowError: prompts cannot be
        had, or there is none.
    """
    return {
        one.name: EvaluationSet(
            _prompts_of(one),
            _workflow_of(one, workflow),
            one.num_prompts or None,
            one.num_samples or None,
            one.temperature,
        )
        for one in config.sets
    }


def evaluation_result(
    outcome: EvaluationOutcome, name: str, step: int = 0, temperature: float = 1.0
) -> EvaluationResult:
    """What is recorded of an outcome."""
    low, high = outcome.accuracy_interval or (None, None)
    return EvaluationResult(
        name=name,
        step=step,
        temperature=temperature,
        reward=outcome.reward,
        num_prompts=outcome.num_prompts,
        num_rejected=outcome.num_rejected,
        rejected_answers=outcome.rejected,
        num_cut=outcome.num_cut,
        num_samples=outcome.num_samples,
        accuracy_low=low,
        accuracy_high=high,
        pass_at={str(k): value for k, value in outcome.pass_at_k.items()},
        majority=outcome.majority,
        version_min=outcome.versions[0],
        version_max=outcome.versions[1],
        workflow=outcome.metrics,
    )


def results_of_sets(
    outcomes: Sequence[EvaluationOutcome],
    names: Sequence[str],
    temperatures: Sequence[float],
    together: str,
    step: int = 0,
) -> list[EvaluationResult]:
    """What is recorded of each set that has a name, then of all sets together, by that name."""
    found = [
        evaluation_result(outcome, name, step, temperature)
        for outcome, name, temperature in zip(outcomes, names, temperatures, strict=True)
        if name
    ]
    whole = outcomes[0] if len(outcomes) == 1 else EvaluationOutcome.together(outcomes)
    common = temperatures[0] if len(set(temperatures)) == 1 else math.nan
    return [*found, evaluation_result(whole, together, step, common)]


def _given_sets(given: Given, config: EvaluationConfig) -> dict[str, EvaluationSet]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        if isinstance(given, Sized) and not len(given):
            raise WorkflowError(
                "the evaluation's set of prompts is empty: expected at least 1 prompt, or None "
                "for no evaluation"
            )
        return {"": EvaluationSet(given, num_prompts=config.num_prompts)}
    sets = {}
    for name, one in given.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"evaluation set {name!r}: expected a name")
        made = one if isinstance(one, EvaluationSet) else EvaluationSet(one)
        if not isinstance(made.prompts, Sized):  # a stream does not say how many there are
            made = replace(made, num_prompts=made.num_prompts or config.num_prompts)
        elif not len(made.prompts):
            raise WorkflowError(f"evaluation set {name!r} is empty: expected at least 1 prompt")
        sets[name] = made
    return sets


def _prompts_of(one: EvaluationSetConfig) -> PromptSource:
    try:
        return load_prompts(
            one.prompts,
            name=one.subset or None,
            split=one.split,
            prompt_key=one.prompt_key,
            answer_key=one.answer_key,
            template=one.template or None,
        )
    except WorkflowError as error:
        raise WorkflowError(f"evaluation.sets, {one.name}: {error}") from error


def _workflow_of(one: EvaluationSetConfig, workflow: Workflow) -> Workflow:
    where = f"evaluation.sets, {one.name}"
    if one.workflow:
        found = named(one.workflow, f"{where}: workflow: expected package.module:name")
        made = _made(f"{where}: workflow", found) if callable(found) else found
        if not isinstance(made, Workflow):
            raise ConfigError(
                f"{where}: workflow: expected a Workflow, or what makes one without arguments, got "
                f"{type(made).__name__} of {one.workflow!r}"
            )
        workflow = made
    if not one.reward:
        return workflow
    reward = named(one.reward, f"{where}: reward: expected package.module:name")
    if isinstance(reward, type):
        reward = _made(f"{where}: reward", reward)
    return _with_reward(workflow, reward, where)


def _with_reward(workflow: Workflow, reward: Any, where: str) -> Workflow:
    """The same workflow with another reward, which decides the accuracy alone.

    Raises: ConfigError: its constructor has no argument `reward`, or takes none like this.
    """
    args, kwargs = workflow.constructor_arguments()
    signature = inspect.signature(type(workflow).__init__)
    if "reward" not in signature.parameters:
        raise ConfigError(
            f"{where}: reward: {type(workflow).__name__} takes no argument of that name; leave it "
            "out, or name a workflow"
        )
    bound = signature.bind(None, *args, **kwargs)  # without the instance
    bound.arguments["reward"] = reward
    try:
        names = weighted_functions(reward)
        if isinstance(workflow, SingleTurnWorkflow) and workflow.accuracy not in names:
            bound.arguments.pop("accuracy", None)
        return type(workflow)(*bound.args[1:], **bound.kwargs)
    except WorkflowError as error:
        raise ConfigError(f"{where}: reward: {error}") from error


def _made(key: str, make: Callable[[], Any]) -> Any:
    """Raises: ConfigError: it cannot be called without arguments, or raises."""
    try:
        return make()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code may raise anything
        raise ConfigError(
            f"{key}: expected what can be made without arguments, got {blame(error)}"
        ) from error
