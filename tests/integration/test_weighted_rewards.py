"""A run from a folder of the user's own: several rewards, and a loss beside the script."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.run_process import tiny_run

SCRIPT = """
import asyncio
import sys

from areal_sc import GRPOConfig, PPOTrainer, SingleTurnWorkflow, load_config, run_script
from areal_sc.rewards.base import Score


def found(prompt, completion):
    return float(completion[:1] in prompt["answer"])


async def length(prompt, completion):
    await asyncio.sleep(0)
    return len(completion)


async def beside(prompt, trajectories):
    return [
        Score(it.reward + 2.0, {"beside": 1.0}, weights={**it.weights, "beside": 2.0})
        for it in trajectories
    ]


def main(argv):
    config = load_config(argv, GRPOConfig)
    prompts = [{"prompt": f"{letter}b=", "answer": letter} for letter in "acdefghi"]
    rewards = {"length": (length, 0.25), "found": found}
    workflow = SingleTurnWorkflow(rewards, accuracy="found", group_reward=beside)
    PPOTrainer(config).fit(workflow, prompts, evaluation_prompts=prompts)


if __name__ == "__main__":
    sys.exit(run_script(main))
"""

LOSS = """
from areal_sc.algorithms.losses import Metric
from my_numbers import SCALE


def advantages(rows):
    whole = sum(rows.weights[name] * rows.parts[name] for name in rows.parts)
    assert abs(whole - rows.rewards).max() < 1e-9 and len(rows.parts) == 3
    return whole - whole.mean()


def weighted(tokens, *, power):
    gain = tokens.logprobs * tokens.fields["advantages"].to(tokens.logprobs.dtype)
    loss = -SCALE**power * gain.sum() / tokens.num_loss_tokens
    return loss, {"own": Metric.mean(tokens.logprobs * 0 + SCALE)}
"""


def test_each_reward_has_its_curve_and_the_loss_lies_beside_the_script(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    folder = tmp_path / "user"
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    (folder / "my_loss.py").write_text(LOSS)
    (folder / "my_numbers.py").write_text("SCALE = 3.0")
    settings = (
        *("actor.ppo.loss=my_loss:weighted", "actor.ppo.loss_settings={power: 2}"),
        "actor.ppo.advantage=my_loss:advantages",
        "generation.cut_answers=judged",  # else the accuracy counts other answers than the reward
    )
    with tiny_run(tmp_path / "run", tiny_model_folder, *settings, script=script) as run:
        run.finish()
        steps, evaluations, summary = run.records("step"), run.records("evaluation"), run.summary()
        assert (run.run_dir / "learning_curve.png").is_file()
        assert " reward/length=" in run.output
    assert all(step["train"]["own"] == 3.0 for step in steps)
    for record in (*steps, *evaluations):
        measured = record["workflow"]
        whole = 0.25 * measured["reward/length"] + measured["reward/found"] + 2.0
        assert record["reward"] == pytest.approx(whole)
        assert measured["accuracy"] == measured["reward/found"]
    assert summary["reward_parts_before"].keys() == {
        *("reward/length", "reward/found", "reward/beside")
    }
    assert summary["accuracy_before"] == summary["reward_parts_before"]["reward/found"]


def test_a_loss_that_is_nowhere_is_told_before_anything_is_started(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    with tiny_run(tmp_path / "run", tiny_model_folder, "actor.ppo.loss=my_los:weighted") as run:
        assert run.wait() == 2, run.story()
        assert "there is no module 'my_los'" in run.output
        assert not run.run_dir.exists()
