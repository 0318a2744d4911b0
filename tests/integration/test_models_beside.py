"""PPOTrainer with models beside the policy: what they give, and what survives deaths."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from integration.run_process import SCRIPTS, RunProcess, open_gate, tiny_run
from integration.test_killed_scripts import num_lives
from integration.test_several_models import kill_worker

from areal_sc.controller.ledger.ledger_account import GroupAccount, read_account
from areal_sc.controller.train.model_place import ModelPlace
from areal_sc.run.run_folder import RunFolder

NUM_STEPS = 10
ROWS_A_STEP = 4 * 2
NUM_FREE_STEPS = 4
SETTINGS = (
    *(f"total_steps={NUM_STEPS}", "scheduler.orphan_timeout_s=600", "checkpoint.every_steps=5"),
    f"task.num_free_episodes={NUM_FREE_STEPS * ROWS_A_STEP}",
    *("actor.ppo.loss=reference_loss:to_reference", "actor.ppo.num_minibatches=1"),
    *("critic.ppo.loss=critic_loss:to_rewards", "critic.optimizer.lr=1e-2"),
)
ROLES = ("train", "reference", "critic", "reward_model")


def test_models_beside_survive_the_death_of_each_worker_and_of_the_script(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    paths = dict.fromkeys(ROLES[1:], tiny_model_folder) | {"reward_model": tmp_path / "scores"}
    models = [f"{role}.path={path}" for role, path in paths.items()]
    scorer: Any = hf.AutoModelForSequenceClassification.from_pretrained(
        tiny_model_folder, num_labels=1
    )
    # small scores: rewards stay far from 0, which is a critic's first value
    torch.nn.init.normal_(scorer.score.weight, std=0.002)
    scorer.save_pretrained(tmp_path / "scores")
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS))

    def play() -> RunProcess:
        return tiny_run(run_dir, tiny_model_folder, *SETTINGS, *models)

    with play() as first:
        # held, with a snapshot in memory: of a version without one no rank could begin again
        first.wait_for_step(NUM_FREE_STEPS)
        first.send(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
        with play() as run:
            run.wait_until(lambda: run.events("reattached"), "the workers of the first start")
            for role in ROLES:
                kill_worker(first, role)
            for role in ROLES:
                run.wait_until(lambda role=role: num_lives(run_dir, f"{role}-0") == 2, "a new life")
            open_gate(run_dir)
            open_gate(run_dir)
            run.finish()
            steps = {step["step"]: step["train"] for step in run.records("step")}
            for step in run.records("step"):
                score = step["train"]["reward_model_score"]
                assert score != 0
                assert 0.5 <= step["reward"] - score <= 1, "the workflow gives 0.5 or 1"
            run.wait_until_gone()
    groups: list[GroupAccount] = []
    account = read_account(run_dir / "ledger", groups.append)
    assert (account.rows_lost, account.trained_again, account.version) == (0, [], NUM_STEPS)
    assert len(account.lineages) == 1, run.story()
    assert steps[1]["gap"] < 1e-5, "the reference is what the policy began as"
    assert steps[NUM_STEPS]["gap"] > 1e-3
    trained = [steps[step] for step in steps if "critic_error" in steps[step]]
    assert all(step["critic_moved"] < 1e-5 for step in trained), "the field is of its weights"
    errors = [step["critic_error"] for step in trained]
    assert min(errors[-3:]) < errors[0] / 2
    place = json.loads((run_dir / "histories" / "critic.json").read_text())
    assert ModelPlace(**place).version == NUM_STEPS
    snapshot = RunFolder(run_dir).snapshot_path(NUM_STEPS)
    assert {folder.name for folder in snapshot.glob("engine*")} == {"engine", "engine-critic"}
    model = hf.AutoModelForCausalLM.from_pretrained(run_dir / "model")
    assert model.get_output_embeddings() is not None


def test_a_student_gets_the_most_probable_tokens_of_its_teacher(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    """Two ranks of a teacher that is the model that the student begins as.

    The divergence is 0 then, where each token's most probable ones are of its own place.
    benchmarks/distillation.py tells how soon a student is near another teacher.
    """
    settings = (
        *("total_steps=3", "actor.algorithm=distillation_top_k", "actor.optimizer.lr=1e-2"),
        *("actor.ppo.loss_settings.top_k=8", f"teacher.path={tiny_model_folder}"),
        "teacher.parallel.data=2",
    )
    with tiny_run(tmp_path / "run", tiny_model_folder, *settings) as run:
        run.finish()
        steps = [step["train"] for step in run.records("step")]
        run.wait_until_gone()
    assert len(steps) == 3
    assert abs(steps[0]["teacher_kl"]) < 1e-5
    assert all(0 < step["rest"] < 1 for step in steps)
