"""`evaluate MODEL`: accuracy of a model on sets of prompts, with a run's engines and rewards."""

from __future__ import annotations

import argparse
import fcntl
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from areal_sc.config.follow_settings import EvaluationSetConfig
from areal_sc.config.length_settings import CutAnswers
from areal_sc.config.schema import FURTHER_MODELS, GRPOConfig
from areal_sc.controller.rollout.evaluation import EvaluationSet
from areal_sc.errors import CommandError, RunFolderError
from areal_sc.hub import is_hub_name, local_model
from areal_sc.preflight.load import load_config
from areal_sc.run.run_begin import content_of
from areal_sc.run.run_marker import MARKER
from areal_sc.run.run_owner import LOCK
from areal_sc.system.durable import remove
from areal_sc.system.file_lock import HeldLock, take_lock
from areal_sc.trainer.display import make_display
from areal_sc.trainer.evaluation.evaluation_sets import configured_sets, evaluation_sets
from areal_sc.trainer.evaluation.kept_answers import (
    ANSWERS,
    OF_REWARDS,
    OF_SET,
    SETTINGS,
    SUMMARY,
    check_settings,
    note_settings,
)
from areal_sc.trainer.evaluation.model_evaluation import ModelEvaluation
from areal_sc.workflows.single_turn import SingleTurnWorkflow

_RUN = "run"
"""Folder in the output's, for what the engines write."""

COMMAND: Final = dict(
    help="evaluate any model on sets of prompts",
    usage="python -m areal_sc evaluate MODEL [key=value ...] --out DIR [--config FILE.yaml] "
    "[--set SET] [--limit N] [--rescore] [--against DIR] [--overwrite]",
    description="Has a model answer the sets of prompts of evaluation.sets, or those of --set, "
    "with the engines and settings of a run. Each answer is a line of DIR/answers.jsonl as "
    "soon as it is there, so the same command goes on after it was stopped or killed; "
    "`samples DIR` shows them. The numbers are in DIR/summary.json.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="a folder, or a name of the hub")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="replaces one setting")
    parser.add_argument("--config", metavar="FILE.yaml", help="the settings of a run")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where all lies")
    parser.add_argument(
        "--set",
        metavar="SET",
        action="append",
        dest="sets",
        help="the name of one of evaluation.sets; or a set, as name=aime,prompts=aime.jsonl,"
        "reward=areal_sc.workflows.math_reward:numeric_match; may be repeated; default: all",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="the first N prompts of each set")
    parser.add_argument(
        "--rescore",
        action="store_true",
        help="judge the answers that are there by the present rewards; nothing is generated",
    )
    parser.add_argument(
        "--against",
        metavar="DIR",
        type=Path,
        help="also tell the difference to the accuracies there, of another model or checkpoint",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="delete the answers that are there"
    )


def run(arguments: argparse.Namespace) -> None:
    """Raises: CommandError: words that do not fit, or answers of other settings. ConfigError,
    ModelError, WorkflowError, WorkerError: what a run raises."""
    if arguments.limit is not None and arguments.limit < 1:
        raise CommandError(f"--limit: expected a number above 0, got {arguments.limit}")
    if arguments.overwrite and arguments.rescore:
        raise CommandError("--overwrite deletes the answers that --rescore judges: leave one out")
    out = arguments.out.expanduser().absolute()
    config = _config(arguments, out)
    default = SingleTurnWorkflow(_no_reward, use_chat_template=_has_chat_template(config))
    sets = evaluation_sets(
        None, configured_sets(config.evaluation, default), default, config.evaluation
    )
    if arguments.limit is not None:
        sets = {name: _limited(one, arguments.limit) for name, one in sets.items()}
    with closing(_lock(out)):
        _evaluate(arguments, out, config, sets)


def _evaluate(
    arguments: argparse.Namespace, out: Path, config: GRPOConfig, sets: dict[str, EvaluationSet]
) -> None:
    settings = _prepare(out, config, arguments)
    display = make_display(run_dir=out)
    try:
        evaluation = ModelEvaluation(config, sets, out, display)
        if arguments.rescore:
            evaluation.rescore(settings)
        else:
            note_settings(out, settings)
            evaluation.generate()
        results = evaluation.results()
        differences = {}
        if arguments.against is not None:
            differences = evaluation.differences(arguments.against.expanduser())
        path = evaluation.write_summary(results, differences)
        for result in results:
            display.on_evaluation(result)
        for name, one in differences.items():
            display.note(
                f"{name}: accuracy {one.value:+.3f} ({one.low:+.3f} to {one.high:+.3f}) against "
                f"{arguments.against}, on {one.num_prompts} prompts"
            )
    finally:
        display.close()
    sys.stdout.write(f"{path}\n")


def _config(arguments: argparse.Namespace, out: Path) -> GRPOConfig:
    """The settings of a run that generates with this model, and its sets."""
    model = arguments.model
    if not is_hub_name(model):
        model = str(Path(model).expanduser().absolute())
    values: dict[str, Any] = {
        "run_dir": str(out / _RUN),
        "overwrite": True,
        "checkpoint.keep_best": "",
        "evaluation.stop_after": 0,
        **{f"{role}.path": "" for role in FURTHER_MODELS},
        "actor.path": model,
        "actor.random_init": False,
    }
    flags = ["--config", arguments.config] if arguments.config else []
    if not arguments.config:
        values["total_steps"] = 1  # which none of it goes by
    config = load_config(values, GRPOConfig, *flags, *arguments.overrides)
    words = arguments.sets or ()
    chosen = _chosen(config.evaluation.sets, words)
    if given := [dict(_pairs(text)) for text in words if "=" in text]:
        values["evaluation.sets"] = [*map(asdict, chosen), *given]
        config = load_config(values, GRPOConfig, *flags, *arguments.overrides)
    else:
        config.evaluation.sets = chosen
    for one in config.evaluation.sets:
        if not (one.reward or one.workflow):
            raise CommandError(
                f"set {one.name}: expected reward=package.module:name, or a workflow: here there "
                "is no script that has one"
            )
    return config


def _pairs(text: str) -> list[tuple[str, str]]:
    """Raises: CommandError: a part of it is no `key=value`."""
    parts = [part.partition("=") for part in text.split(",")]
    if bad := [key for key, equals, _ in parts if not equals]:
        raise CommandError(
            f"--set {text}: expected key=value between commas, got {bad[0]!r}; what has commas "
            "stands in evaluation.sets of a YAML"
        )
    return [(key.strip(), value) for key, _, value in parts]


def _chosen(sets: Sequence[EvaluationSetConfig], words: Sequence[str]) -> list[EvaluationSetConfig]:
    """The sets of the settings. Raises: CommandError: there is none, or not that one."""
    names = [word for word in words if "=" not in word]
    known = {one.name: one for one in sets}
    for name in names:
        if name not in known:
            raise CommandError(
                f"--set {name}: evaluation.sets has {', '.join(known) or 'none'}; or describe the "
                "set: --set name=...,prompts=...,reward=..."
            )
    if not (sets or words):
        raise CommandError("expected --set, or evaluation.sets in the settings of --config")
    return [known[name] for name in names] if words else list(sets)


def _lock(out: Path) -> HeldLock:
    """Makes the folder, and keeps other commands out of it.

    Raises: CommandError: it is another command's or a run's. RunFolderError: it cannot be made.
    """
    if (out / MARKER).exists():
        raise CommandError(f"--out {out} is the folder of a run: name another one")
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = take_lock(out / LOCK, fcntl.LOCK_EX)
    except OSError as error:
        raise RunFolderError(f"--out {out} cannot be used: {error.strerror}") from error
    if lock is None:
        raise CommandError(f"another evaluation is writing to {out}: wait for it, or stop it")
    return lock


def _prepare(out: Path, config: GRPOConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the answers come from; deletes those that are there, if that is asked for.

    Raises: CommandError: they come from something else.
    """
    if arguments.overwrite:
        for name in (ANSWERS, SETTINGS, SUMMARY):
            remove(out / name)
    folder = local_model(config.rollout.path)
    generation = asdict(config.generation)
    cut_answers = generation.pop("cut_answers")  # is applied to kept answers, but for their rewards
    settings: dict[str, Any] = {
        "model": arguments.model,
        "files of the model": content_of(folder),
        "generation": generation,
        "max_context_tokens": config.rollout.max_context_tokens,
    }
    if cut_answers is CutAnswers.wrong:
        settings[f"{OF_REWARDS}cut answers"] = cut_answers
    for one in config.evaluation.sets:
        described = asdict(one)
        rewards: dict[str, Any] = {key: described.pop(key) for key in ("reward", "workflow")}
        prompts = Path(one.prompts).expanduser()
        rewards["prompts"] = content_of(prompts) if prompts.exists() else ""
        for key in ("num_prompts", "num_samples"):  # there may be more of them each time
            del described[key]
        settings |= {f"{OF_SET}{one.name}": described, f"{OF_REWARDS}{one.name}": rewards}
    may_differ = ("model", OF_REWARDS) if arguments.rescore else ("model",)  # its files may not
    return check_settings(out, settings, may_differ=may_differ)


def _limited(one: EvaluationSet, limit: int) -> EvaluationSet:
    return replace(one, num_prompts=min(limit, one.num_prompts or limit))


def _has_chat_template(config: GRPOConfig) -> bool:
    folder = local_model(config.rollout.path)
    if any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    path = folder / "tokenizer_config.json"
    return path.exists() and b'"chat_template"' in path.read_bytes()


def _no_reward(prompt: Mapping[str, Any], completion: str) -> float:
    """Stands where the reward of a set will be."""
    raise NotImplementedError
