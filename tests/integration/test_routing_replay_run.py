"""A whole run on a model with experts: rows tell their tokens' experts, and ranks take them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers as hf
from integration.run_process import assert_nothing_was_started, tiny_run
from transformers import AutoTokenizer

SETTINGS = (
    *("actor.routing_replay=true", "actor.optimizer.lr=1e-2", "total_steps=4"),
    "task.reward=by_letters",  # every group has a signal
)


@pytest.fixture
def model(tmp_path: Path, tiny_model_folder: Path) -> Path:
    """A tiny Qwen3-MoE with the tokenizer of the tiny model."""
    folder = tmp_path / "experts"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    tokenizer.save_pretrained(folder)
    config = hf.Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        mlp_only_layers=[0],
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    hf.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def test_ranks_take_the_experts_of_generation(tmp_path: Path, model: Path) -> None:
    """Two ranks, a reference beside them that routes by itself, and stale rows."""
    further = "actor.ppo.kl_coefficient=0.01", f"reference.path={model}", "actor.parallel.data=2"
    settings = (*SETTINGS, *further)
    with tiny_run(tmp_path / "run", model, *settings) as run:
        run.finish()
        steps = [step["train"] for step in run.records("step")]
        run.wait_until_gone()
    assert [step["num_updates"] for step in steps] == [2] * 4
    for step in steps:  # other minibatches have other weights than those that sampled their rows
        assert step.get("routing_mismatch", 0.0) <= 0.02
        assert step.get("mismatch", 0.0) <= 1e-5
    assert {"routing_mismatch", "mismatch"} <= steps[0].keys()


@pytest.mark.parametrize("setting", ["actor.compile_layers=true", "rollout.engine=vllm"])
def test_what_cannot_replay_is_refused_before_anything_starts(
    setting: str, tmp_path: Path, model: Path
) -> None:
    with tiny_run(tmp_path / "run", model, *SETTINGS, setting) as run:
        assert run.wait() != 0
        said = rf"{setting.split('=')[0]}: expected \w+( or \w+)? with actor.routing_replay, got "
        assert re.search(said, run.output)
        assert_nothing_was_started(run)


def test_a_model_without_experts_is_refused(tmp_path: Path, tiny_model_folder: Path) -> None:
    with tiny_run(tmp_path / "run", tiny_model_folder, *SETTINGS) as run:
        assert run.wait() != 0
        assert "actor.routing_replay: expected a model with experts" in run.output
        assert not run.processes()
