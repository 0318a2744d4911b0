"""The names that users write, and nothing else."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import areal_sc

PUBLIC = {
    # the user's script
    "GRPOConfig",
    "load_config",
    "make_scheduler",
    "run_script",
    "start",
    "PPOTrainer",
    "SFTTrainer",
    "DPOTrainer",
    "RewardModelTrainer",
    # the parts of a loop of one's own
    "Checkpoints",
    "EvaluationSet",
    "Evaluations",
    "Run",
    "Tracker",
    # controllers
    "LocalScheduler",
    "RolloutController",
    "TrainController",
    # engines
    "FSDPPPOActor",
    "FSDPSFTActor",
    "LocalGenerator",
    "SGLangEngine",
    "VLLMEngine",
    "make_actor",
    "make_generator",
    "make_model",
    # workflows and data
    "AgentCommand",
    "AgentWorkflow",
    "Conversation",
    "JsonlPrompts",
    "OnlineWorkflow",
    "Prompts",
    "SingleTurnWorkflow",
    "BatchMetadata",
    "ShardMetadata",
    "TensorMetadata",
    "Trajectory",
    "Workflow",
    "load_prompts",
    "load_rows",
}

EXAMPLES = Path(areal_sc.__file__).parents[1] / "examples"


def test_the_public_names_are_these() -> None:
    assert set(areal_sc.__all__) == PUBLIC
    assert list(areal_sc.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_each_public_name_is_there_and_documented(name: str) -> None:
    found = getattr(areal_sc, name)
    assert found.__name__ == name
    assert inspect.getdoc(found)
    assert name in dir(areal_sc)


def test_another_name_is_refused_as_by_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'areal_sc' has no attribute 'TrainControler'"):
        areal_sc.TrainControler  # noqa: B018


def test_a_star_import_gives_the_public_names() -> None:
    namespace: dict[str, object] = {}
    exec("from areal_sc import *", namespace)
    assert namespace.keys() - {"__builtins__"} == PUBLIC


def test_examples_take_every_public_name_from_the_top() -> None:
    pattern = re.compile(r"from areal_sc\.[\w.]+ import ([^(\n]+|\([^)]*\))")
    for script in EXAMPLES.glob("*.py"):
        for names in pattern.findall(script.read_text()):
            imported = set(re.findall(r"\w+", names))
            if script.name != "letter_sort_task.py":  # a module, shared by scripts
                assert not imported & PUBLIC, f"{script.name}: {imported & PUBLIC}"
