"""Whole runs as a user starts them: real processes, the run folder, the ledger's account."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.run_process import REPOSITORY, RunProcess, started, tiny_run
from integration.scripts.episodes import Calls, SlowForSome
from integration.scripts.tiny_run import letter_prompts
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_sc import FSDPPPOActor, GRPOConfig, LocalGenerator, RolloutController, TrainController
from areal_sc import start as start_controllers
from areal_sc.schedulers.base import Scheduler

EXAMPLES = REPOSITORY / "examples"
CONFIGS = REPOSITORY / "configs"

SUMMARY_KEYS = {
    "accuracy_before",
    "accuracy_after",
    "greedy_accuracy_after",
    "num_steps",
    "wall_time_s",
    "max_token_staleness_trained",
    "max_group_staleness",
    "num_rows_trained",
    "num_rows_trained_twice",
    "num_episodes_rejected",
    "controller_bytes",
    "generated_tokens_per_s",
    "trained_tokens_per_s",
}


@pytest.fixture(scope="module")
def finished_run(
    tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunProcess]:
    """Two training ranks, two rollout workers, 4 steps of 8 groups of 8; tells what it imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPROFILEIMPORTTIME", "1")
        with tiny_run(
            tmp_path_factory.mktemp("whole") / "run",
            tiny_model_folder,
            "total_steps=4",
            "actor.parallel.data=2",
            "rollout.num_workers=2",
            "rollout.train_batch_groups=8",
            "rollout.group_size=8",
            "evaluation.every_steps=2",
            "checkpoint.every_steps=1",
            "checkpoint.export_every_steps=2",
            "task.draws=true",
        ) as run:
            patch.undo()
            run.finish()
            yield run


def test_the_run_folder_is_complete(finished_run: RunProcess) -> None:
    folder = finished_run.run_dir
    assert OmegaConf.load(folder / "config.yaml").actor.parallel.data == 2
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    logs = {path.name for path in (folder / "logs").iterdir()}
    assert logs >= {
        *("controller.log", "train-0.log", "train-1.log", "rollout-0.log", "rollout-1.log")
    }
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [
        "step-000003",
        "step-000004",
    ]
    assert finished_run.steps() == [1, 2, 3, 4]
    names = [(r["name"], r["step"]) for r in finished_run.records("evaluation")]
    assert [name for name in names if name[0] != "periodic"] == [
        *(("before", 0), ("after", 4), ("greedy", 4))
    ]
    # it begins late where the one before takes longer than two steps
    assert {name for name in names if name[0] == "periodic"} <= {("periodic", 2), ("periodic", 3)}
    finished_run.wait_until_gone()


def test_nothing_of_shipping_is_imported_where_the_run_folder_is_shared(
    finished_run: RunProcess,
) -> None:
    """By the script, the agent, or a worker."""
    said = {path.stem: path.read_text() for path in (finished_run.run_dir / "logs").glob("*.log")}
    said["script"] = finished_run.output
    assert "areal_sc.controller.base\n" in said["script"]
    assert "areal_sc.nodes.node_agent\n" in said["agent-0"]
    assert "areal_sc.workers.base\n" in said["agent-0"], "its fork server prepares it"
    assert all("import time:" in said[name] for name in ("train-0", "rollout-0"))
    for name, text in said.items():
        assert "areal_sc.shipping" not in text, name


def test_the_summary_accounts_for_every_row(finished_run: RunProcess) -> None:
    summary = finished_run.summary()
    assert summary.keys() >= SUMMARY_KEYS
    assert {key for key in SUMMARY_KEYS if summary[key] is None} == set()
    assert summary["num_steps"] == 4
    assert summary["num_rows_trained"] == 4 * 8 * 8
    assert summary["num_rows_trained_twice"] == 0
    assert summary["num_episodes_rejected"] == 0
    assert summary["rejected_episodes"] == {}
    assert 0 < summary["controller_bytes"] < 1024 * summary["num_rows_trained"]
    assert summary["trained_tokens_per_s"] > 0
    assert summary["generated_tokens_per_s"] > 0


def test_an_evaluation_on_a_held_worker_sees_one_version(finished_run: RunProcess) -> None:
    for record in finished_run.records("evaluation"):
        assert record["version_min"] == record["version_max"]
        assert record["num_prompts"] == 8
    assert {r["version_min"] for r in finished_run.records("evaluation") if r["step"] == 4} == {4}


def test_transformers_loads_the_trained_model(
    finished_run: RunProcess, tiny_model_folder: Path
) -> None:
    folder = finished_run.run_dir / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = AutoTokenizer.from_pretrained(folder)("cab=", return_tensors="pt")
    assert model(input_ids=tokens["input_ids"]).logits.shape == (1, 4, model.config.vocab_size)
    before, after = (load_file(path / "model.safetensors") for path in (tiny_model_folder, folder))
    assert before.keys() <= after.keys()
    assert all(torch.isfinite(values).all() for values in after.values())
    moved = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert 1e-5 < moved < 1.0


def test_transformers_loads_the_models_on_the_way(finished_run: RunProcess) -> None:
    (folder,) = (finished_run.run_dir / "models").iterdir()
    assert folder.name == "step-2"
    assert [event["step"] for event in finished_run.events("model")] == [2]
    model = AutoModelForCausalLM.from_pretrained(folder)
    last = load_file(finished_run.run_dir / "model" / "model.safetensors")
    middle = {name: values for name, values in model.named_parameters() if name in last}
    assert middle
    assert any(not torch.equal(values, last[name]) for name, values in middle.items())


def test_a_finished_run_is_not_touched(finished_run: RunProcess, tiny_model_folder: Path) -> None:
    before = (finished_run.run_dir / "summary.json").stat().st_mtime_ns
    with tiny_run(finished_run.run_dir, tiny_model_folder, "total_steps=4") as again:
        assert again.wait() == 3
        assert "--overwrite" in again.output
        assert str(finished_run.run_dir) in again.output
    assert (finished_run.run_dir / "summary.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("over_bound", "max_staleness", "num_rows"),
    [("mask", 1, 1), ("wait", 1, 2), ("train", 0, 2)],
)
def test_the_bound_holds_in_a_loop_of_the_user(
    tiny_config: Callable[..., GRPOConfig],
    scheduler: Scheduler,
    over_bound: str,
    max_staleness: int,
    num_rows: int,
) -> None:
    """One group in eight takes several steps' time, so that some get over the bound.

    Of each episode there are `num_rows` rows, which are trained together. What each mode does with
    what is over the bound, test_controllers_in_virtual_time.py sees.
    """
    num_steps = 6
    config = tiny_config(
        f"total_steps={num_steps}",
        f"rollout.over_bound={over_bound}",
        f"rollout.max_staleness={max_staleness}",
        f"rollout.max_episode_tokens={64 * num_rows}",
    )
    actor = TrainController(FSDPPPOActor(config.actor), scheduler)
    rollout = RolloutController(LocalGenerator(config.rollout), scheduler)
    prompts, workflow = letter_prompts(16, seed=3), SlowForSome(16 * num_rows, 0.8, num_rows)
    seen: list[tuple[int, int]] = []
    with start_controllers(actor, rollout):
        for step in range(num_steps):
            batch = rollout.prepare_batch(prompts, workflow)
            assert batch.global_step == actor.version == step
            groups = {row.group_id: step - row.admitted_version for row in batch.rows}
            assert len(groups) == config.rollout.train_batch_groups
            assert [len(rows) for rows in batch.episodes] == [num_rows] * 8
            trained = [
                version
                for row in batch.rows
                for version, _ in row.version_spans
                if batch.min_token_version is None or version >= batch.min_token_version
            ]
            seen.append((max(groups.values()), step - min(trained, default=step)))
            batch = actor.compute_proximal_logprobs(actor.compute_advantages(batch))
            stats = actor.ppo_update(batch)
            assert stats["grad_norm"] >= 0
            actor.publish_weights(rollout)
        account = rollout.groups.ledger.account()
    assert account["rows_trained"] == num_steps * 8 * num_rows
    assert account["rows_trained_twice"] == 0
    group_staleness, token_staleness = (max(values) for values in zip(*seen, strict=True))
    assert token_staleness <= max_staleness
    if over_bound != "mask":
        assert group_staleness <= max_staleness


def test_an_episode_of_several_rows_is_kept_whole_and_counts_once(
    start_rollout: Callable[..., Any],
) -> None:
    prompts = letter_prompts(64, seed=4)
    with start_rollout() as rollout:
        batch = rollout.prepare_batch(prompts, Calls(is_first_bad=True))
        assert len(batch.group_ids) == 4
        assert [len(rows) for rows in batch.episodes] == [3] * 4
        assert {row.episode for row in batch.rows} == {1}  # the first one of each group is rejected
        assert [row.reward for row in batch.rows] == [1.0, 0.0, 0.5] * 4
        assert rollout.batch_metrics == {"right": 0.5, "tools": 4.0}
        assert set(rollout.rejections.episodes) == {"bad_reward"}
        assert "row 2 of 3: the reward" in rollout.rejections.firsts["bad_reward"].message
        outcome = rollout.evaluate(prompts, Calls(is_first_bad=False), num_prompts=3)
        assert (outcome.num_prompts, outcome.reward) == (3, 0.5)
        assert outcome.metrics == {"right": 0.5, "tools": 4.0}


def test_letter_sort_from_scratch_and_with_shuffled_rewards(tmp_path: Path) -> None:
    arguments = (
        *("--config", str(CONFIGS / "letter_sort.yaml"), f"actor.path={tmp_path / 'warm_start'}"),
        *("total_steps=2", "rollout.train_batch_groups=8", "rollout.group_size=4"),
        *("evaluation.num_prompts=16", "task.warm_start.steps=5", "task.warm_start.batch_size=8"),
        *("task.warm_start.hidden_size=32", "task.warm_start.num_layers=1"),
    )
    with started(tmp_path / "run", EXAMPLES / "letter_sort.py", *arguments) as run:
        run.finish()
        assert run.summary()["num_rows_trained"] == 2 * 8 * 4
        assert not (run.run_dir / "untrained").exists()
        assert "warm start" in run.output
    warm_start = (tmp_path / "warm_start" / "model.safetensors").stat().st_mtime_ns
    shuffled = tmp_path / "shuffled"
    multi_turn = tmp_path / "multi_turn"
    with (
        started(
            shuffled, EXAMPLES / "letter_sort.py", *arguments, "task.shuffle_rewards=true"
        ) as control,
        started(multi_turn, EXAMPLES / "multi_turn.py", *arguments) as retries,
    ):
        control.finish()
        retries.finish()
        assert "warm start" not in control.output
        # the evaluation does not take part in the control: nothing is right this early
        assert control.summary()["accuracy_after"] == 0.0
        assert any(record["reward"] > 0 for record in control.records("step"))
        assert "step=2 accuracy=" in retries.output
        assert (multi_turn / "model" / "model.safetensors").is_file()
    assert (tmp_path / "warm_start" / "model.safetensors").stat().st_mtime_ns == warm_start


def test_questions_of_a_jsonl_file(tmp_path: Path, tiny_model_folder: Path) -> None:
    dataset = tmp_path / "questions.jsonl"
    rows: list[dict[str, Any]] = [
        {"prompt": f"{i}{i + 1}=", "answer": str(2 * i + 1)} for i in range(12)
    ]
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with started(
        tmp_path / "run",
        EXAMPLES / "jsonl_math.py",
        *("--config", str(CONFIGS / "jsonl_math.yaml"), f"actor.path={tiny_model_folder}"),
        *("total_steps=2", f"task.dataset={dataset}", "task.num_held_out=4"),
        *("task.use_chat_template=false", "actor.device=cpu", "rollout.device=cpu"),
        *("actor.dtype=float32", "actor.max_tokens_per_micro_batch=1024"),
        *("actor.activation_checkpointing=none", "generation.max_new_tokens=8"),
        *("rollout.max_context_tokens=64", "rollout.train_batch_groups=4", "rollout.group_size=2"),
        "rollout.max_running_sequences=8",
    ) as run:
        run.finish()
        summary = run.summary()
        assert summary["num_rows_trained"] == 2 * 4 * 2
        assert [r["num_prompts"] for r in run.records("evaluation")] == [4, 4, 4]
