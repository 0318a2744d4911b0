"""Numbers that follow from the model, against those worked out by hand; what is set stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import load

from areal_sc.config.fields import value_at
from areal_sc.config.schema import ActorConfig
from areal_sc.preflight.load import load_config
from areal_sc.sizing.model_formula import numbers_of_parameters
from areal_sc.sizing.store_room import max_group_bytes

REPOSITORY = Path(__file__).parents[3]
SIZES = (
    *("rollout.train_batch_groups=8", "rollout.group_size=4", "rollout.max_context_tokens=1000"),
    "generation.max_new_tokens=500",
)
BYTES_PER_S = 32 << 20
MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
"""Of Qwen2.5-1.5B."""


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """A model that has sizes alone."""

    def make(**changes: Any) -> Path:
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL | changes))
        return tmp_path / "model"

    return make


@pytest.mark.parametrize("name", ["sft", "dpo", "reward_model", "jsonl_math", "one_gpu"])
def test_shipped_settings_take_models_of_all_sizes_that_they_name(
    folder: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    yaml = str(REPOSITORY / "configs" / f"{name}.yaml")
    words = (f"actor.path={folder()}", f"run_dir={tmp_path / 'run'}")
    generates = name in ("jsonl_math", "one_gpu")
    argv = ["--config", yaml, *words]
    config = load_config(argv, generates=generates, count_devices=lambda: 2)
    assert config.actor.store_bytes == config.rollout.store_bytes == 0, "no limit"


def test_limits_of_time_are_enough_for_a_large_model_on_slow_hardware(
    folder: Callable[..., Path],
) -> None:
    path = folder(num_hidden_layers=400)
    num_parameters = numbers_of_parameters(MODEL | {"num_hidden_layers": 400})["num_parameters"]
    words = (f"actor.path={path}", *SIZES, "actor.device=cuda", "actor.dtype=bfloat16")
    config = load(*words, "rollout.engine=sglang", "rollout.device=cuda", num_devices=2)
    of_weights, of_state = (width * num_parameters / BYTES_PER_S for width in (2, 12))
    assert of_weights > 900
    of_step = 4 * 2 * num_parameters / 2e13 * 8 * 4 * 1000
    expected = {
        "transport.pull_timeout_s": of_weights,
        "transport.write_timeout_s": of_state,
        "transport.call_timeout_s": of_weights + of_step,
        "weight_update.step_timeout_s": of_weights,
        "servers.start_timeout_s": of_weights,
        "rollout.step_timeout_s": 300.0,
    }
    assert {key: value_at(config, key) for key in expected} == {
        key: round(limit_s) for key, limit_s in expected.items()
    }
    for key in ("scheduler.transport", "actor.weight_update", "rollout.weight_update"):
        assert value_at(config, key) == value_at(config, key.partition(".")[2]), "which share it"
    assert config.rollout.sglang == config.sglang


def test_limits_that_are_set_stay_and_defaults_are_enough_for_small_models(
    folder: Callable[..., Path], tiny_model_folder: Path
) -> None:
    path = folder(num_hidden_layers=400)
    config = load(f"actor.path={path}", *SIZES, "transport.write_timeout_s=7")
    assert config.transport.write_timeout_s == config.scheduler.transport.write_timeout_s == 7
    small, default = load(f"actor.path={tiny_model_folder}"), load()
    assert small.transport == default.transport
    assert small.rollout.step_timeout_s == default.rollout.step_timeout_s


def test_a_group_lasts_as_long_as_an_agent_that_runs_twice(tiny_model_folder: Path) -> None:
    words = f"actor.path={tiny_model_folder}", "agents.episode_timeout_s=5000"
    assert load(*words).rollout.group_timeout_s == 10000
    assert load(*words, "rollout.group_timeout_s=6000").rollout.group_timeout_s == 6000


def test_a_step_of_the_embedded_engine_on_a_cpu_is_longer_for_a_large_model(
    folder: Callable[..., Path],
) -> None:
    words = (f"actor.path={folder()}", *SIZES, "rollout.device=cpu", "actor.device=cpu")
    num_parameters = numbers_of_parameters(MODEL)["num_parameters"]
    config = load(*words)
    most_tokens = config.rollout.max_prefill_tokens
    assert config.rollout.step_timeout_s == round(2 * num_parameters * most_tokens / 1e10) > 300
    again = load_config(config, count_devices=lambda: 0)
    assert again.rollout.step_timeout_s == config.rollout.step_timeout_s, "not added twice"


def test_auto_asks_shared_memory_for_weights_and_a_batch(
    folder: Callable[..., Path], tiny_model_folder: Path
) -> None:
    words = (f"actor.path={folder()}", *SIZES, "actor.dtype=bfloat16")
    versions = 2 * 2 * numbers_of_parameters(MODEL)["num_parameters"]
    config = load(*words)
    needed = versions + 8 * max_group_bytes(config.rollout)
    assert config.transport.shared_memory_bytes == needed
    assert config.scheduler.transport.shared_memory_bytes == needed
    for unused in (
        load(*words, "transport.shared_memory=off"),
        load(f"actor.path={tiny_model_folder}"),  # less than `auto` asks for anyway
    ):
        assert unused.transport.shared_memory_bytes == 0


def test_micro_batches_hold_the_longest_row() -> None:
    default = ActorConfig.max_tokens_per_micro_batch
    longer = load(f"rollout.max_context_tokens={default + 1}")
    assert longer.actor.max_tokens_per_micro_batch == default + 1
    assert longer.critic.max_tokens_per_micro_batch == default + 1
    assert load("rollout.max_context_tokens=999").actor.max_tokens_per_micro_batch == default
