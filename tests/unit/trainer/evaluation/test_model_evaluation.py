"""How much more accurate a model is than another one, on the prompts that both have answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_sc.config.schema import GRPOConfig
from areal_sc.controller.rollout.evaluation import EvaluationSet
from areal_sc.errors import CommandError
from areal_sc.records.estimates import paired_difference
from areal_sc.trainer.display import make_display
from areal_sc.trainer.evaluation.kept_answers import KeptAnswer, note_settings, write_answers
from areal_sc.trainer.evaluation.model_evaluation import ModelEvaluation
from areal_sc.workers.calls import EvaluationReply

NUM_PROMPTS = 4


def answers(rights: dict[tuple[int, int], bool]) -> list[KeptAnswer]:
    return [
        KeptAnswer.of("a", prompt, sample, EvaluationReply(1.0, {"accuracy": float(it)}, (0, 0)))
        for (prompt, sample), it in rights.items()
    ]


def note(folder: Path, content: str, kept: list[KeptAnswer]) -> None:
    folder.mkdir(exist_ok=True)
    settings = {"set a": {"prompts": "a.jsonl"}, "rewards of a": {"prompts": {"a": content}}}
    note_settings(folder, settings)
    write_answers(folder, kept)


def test_only_the_same_prompts_are_compared(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    places = [(prompt, sample) for prompt in range(6) for sample in range(2)]
    note(one, "1f", answers({place: place[0] != 1 for place in places}))
    more = {(prompt, 0): prompt > 1 for prompt in range(9)} | {(0, 1): True}  # cut short
    note(two, "1f", answers(more))
    sets = {"a": EvaluationSet([{"prompt": "x"}] * 6, num_prompts=NUM_PROMPTS, num_samples=2)}
    evaluation = ModelEvaluation(GRPOConfig(), sets, one, make_display(run_dir=one))
    found = evaluation.differences(two)["a"]
    expected = paired_difference(
        [(0.0,), (0.0,), (1.0,), (1.0,)], [(1.0, 1.0), (0.0, 0.0), (1.0, 1.0), (1.0, 1.0)]
    )
    assert (found.value, found.low, found.high) == (expected.value, expected.low, expected.high)
    assert found.num_prompts == NUM_PROMPTS
    note(two, "2f", answers(more))
    with pytest.raises(CommandError, match="are to other prompts of a than those in"):
        evaluation.differences(two)
