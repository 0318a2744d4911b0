"""Models beside the policy, before anything is started: what is refused, and what is counted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_sc.config.lora_settings import LoraConfig
from areal_sc.config.schema import (
    ActorConfig,
    CriticConfig,
    GRPOConfig,
    ModelHead,
    further_model,
    further_models,
)
from areal_sc.engines.handles import make_model
from areal_sc.errors import ConfigError, ModelError
from areal_sc.preflight.checks import check_models
from areal_sc.preflight.load import load_config
from areal_sc.preflight.plan import plan
from areal_sc.sizing.machine import Machine
from areal_sc.sizing.worker_plan import DTYPE_BYTES

CPU = Machine(None, ())


@pytest.fixture
def load(tiny_model_folder: Path, tmp_path: Path) -> Callable[..., GRPOConfig]:
    def load_tiny(*overrides: str) -> GRPOConfig:
        return load_config(
            [
                *(
                    f"run_dir={tmp_path / 'run'}",
                    "total_steps=3",
                    f"actor.path={tiny_model_folder}",
                ),
                *("actor.device=cpu", "rollout.device=cpu", "generation.max_new_tokens=8"),
                *overrides,
            ],
            GRPOConfig,
        )

    return load_tiny


def test_what_a_section_does_not_set_is_the_actors(load: Callable[..., GRPOConfig]) -> None:
    assert further_models(load()) == {}
    config = load(
        *("critic.optimizer.lr=0.5", "critic.path=m", "actor.optimizer.beta2=0.5"),
        *("actor.parallel.data=2", "reference.path=r", "reference.parallel.data=1"),
    )
    models = further_models(config)
    assert list(models) == ["reference", "critic"]
    assert {type(model) for model in models.values()} == {ActorConfig}
    critic, reference = models["critic"], models["reference"]
    assert (critic.optimizer.lr, critic.optimizer.beta2) == (0.5, 0.5)
    assert (critic.head, critic.is_frozen, critic.parallel.data) == (ModelHead.value, False, 2)
    assert (reference.head, reference.is_frozen, reference.parallel.data) == (
        ModelHead.lm,
        True,
        1,
    )
    assert config.actor.optimizer.lr != 0.5
    assert make_model(config, "critic").config == critic


def test_other_models_than_the_policy_do_not_begin_from_its_adapter(
    load: Callable[..., GRPOConfig],
) -> None:
    roles = ("reference", "teacher", "reward_model")
    adapter = ("actor.lora.rank=4", "actor.lora.path=adapter")
    models = further_models(load(*adapter, *(f"{role}.path=m" for role in roles)))
    assert [models[role].has_adapter for role in roles] == [True, False, False]


def test_an_adapter_of_a_teacher_says_itself_what_it_is(
    load: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    stored = {"r": 6, "lora_alpha": 3, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(stored))
    given = ("teacher.path=m", "actor.lora.rank=2", f"teacher.lora.path={tmp_path}")
    assert further_model(load(*given), "teacher").lora == LoraConfig(
        6, 3.0, ["q_proj"], path=str(tmp_path)
    )
    missing = ("teacher.path=${actor.path}", "teacher.lora.path=/no/adapter")
    with pytest.raises(ModelError, match=r"cannot read adapter_config\.json"):
        check_models(load(*missing))


def test_a_model_of_the_actors_folder_is_drawn_as_the_actor_is(
    load: Callable[..., GRPOConfig],
) -> None:
    models = further_models(
        load("actor.random_init=true", "reference.path=${actor.path}", "teacher.path=m")
    )
    assert [model.random_init for model in models.values()] == [True, False]


def test_a_frozen_model_has_the_actors_settings_but_not_those_of_training(
    load: Callable[..., GRPOConfig],
) -> None:
    others = ("actor.compile_layers=true", "actor.num_threads=3", "actor.optimizer.lr=7")
    reference = further_model(load(*others, "reference.path=r"), "reference")
    assert (reference.compile_layers, reference.num_threads) == (True, 3)
    assert reference.optimizer == ActorConfig().optimizer


def test_sections_built_in_python_are_joined() -> None:
    actor = ActorConfig(path="m", max_tokens_per_micro_batch=77)
    config = GRPOConfig(run_dir="r", total_steps=3, actor=actor, critic=CriticConfig(path="c"))
    critic = further_model(config, "critic")
    assert (critic.path, critic.max_tokens_per_micro_batch) == ("c", 77)
    assert critic.optimizer.total_steps == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("teacher.ppo.num_minibatches=4", "only actor.ppo.num_minibatches"),
        ("reference.optimizer.lr=7", "unknown setting reference.optimizer.lr"),
        ("reward_model.memory_snapshots=false", "only checkpoint.memory_snapshots"),
        ("critic.algorithm=dapo", "unknown setting critic.algorithm"),
        ("critic.engine=megatron", "critic.engine: expected fsdp, got megatron"),
        ("rollout.keep_groups=with_signal", "keep_groups: expected all with reward_model.path"),
        ("rollout.choose_prompts=with_signal", "prompts: expected all with reward_model.path"),
    ],
)
def test_what_a_model_cannot_be_is_refused(
    override: str, message: str, load: Callable[..., GRPOConfig], tiny_model_folder: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(override, *(f"{role}.path={tiny_model_folder}" for role in ("critic", "reward_model")))


def test_a_model_that_is_asked_for_must_be_named(load: Callable[..., GRPOConfig]) -> None:
    with pytest.raises(ConfigError, match=r"teacher\.path: no value"):
        make_model(load(), "teacher")
    with pytest.raises(ConfigError, match="role: expected one of reference, critic, teacher"):
        make_model(load(), "judge")


def test_a_teacher_of_another_tokenizer_is_refused(
    load: Callable[..., GRPOConfig], tiny_model_folder: Path, tmp_path: Path
) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(tiny_model_folder, teacher)
    check_models(load(f"teacher.path={teacher}"))
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    tokenizer["added_tokens"] = []
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"teacher\.path: expected a model with the tokenizer"):
        check_models(load(f"teacher.path={teacher}"))
    with pytest.raises(ModelError, match="no such folder"):
        check_models(load(f"teacher.path={tmp_path / 'nowhere'}"))


def test_a_teacher_with_fewer_tokens_than_the_loss_reads_is_refused(
    load: Callable[..., GRPOConfig], tiny_model_folder: Path
) -> None:
    given = ("actor.algorithm=distillation_top_k", f"teacher.path={tiny_model_folder}")
    check_models(load(*given, "actor.ppo.loss_settings.top_k=39"))
    with pytest.raises(ConfigError, match=r"loss_settings\.top_k: expected at most 39, .* got 40"):
        check_models(load(*given, "actor.ppo.loss_settings.top_k=40"))


def test_a_teacher_whose_output_layer_is_larger_is_refused(
    load: Callable[..., GRPOConfig], tiny_model_folder: Path, tmp_path: Path
) -> None:
    """As padding makes it: its most probable tokens may be none of the policy's."""
    teacher = shutil.copytree(tiny_model_folder, tmp_path / "teacher")
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(config | {"vocab_size": 64}))
    given = f"teacher.path={teacher}"
    check_models(load("actor.algorithm=distillation", given))
    with pytest.raises(ConfigError, match=r"gives 64 tokens a probability, and actor\.path=.* 39:"):
        check_models(load("actor.algorithm=distillation_top_k", given))


def test_the_plan_has_room_for_the_tokens_of_a_teacher(
    load: Callable[..., GRPOConfig], tiny_model_folder: Path
) -> None:
    given = ("actor.algorithm=distillation_top_k", f"teacher.path={tiny_model_folder}")
    config = load(*given, "teacher.parallel.data=2", "rollout.max_context_tokens=50")
    planned = plan(config, lambda: CPU)
    rollout, of_teacher = config.rollout, [it for it in planned.workers if it.role == "teacher"]
    num_tokens = rollout.train_batch_groups * rollout.group_size * 50
    assert sum(it.store_bytes for it in of_teacher) == num_tokens * 16 * 8


def test_a_model_that_cannot_be_spread_over_its_ranks_is_refused(
    load: Callable[..., GRPOConfig],
) -> None:
    with pytest.raises(ConfigError, match=r"actor\.parallel\.tensor: expected a divisor"):
        check_models(load("actor.parallel.tensor=3"))


def test_a_reward_model_needs_a_score(
    load: Callable[..., GRPOConfig], tiny_model_folder: Path
) -> None:
    check_models(load(f"critic.path={tiny_model_folder}"))
    with pytest.raises(ConfigError, match=r"reward_model.path: expected .* a layer `score`"):
        check_models(load(f"reward_model.path={tiny_model_folder}"))


def test_the_plan_counts_each_model(
    load: Callable[..., GRPOConfig], tiny_model_folder: Path
) -> None:
    one = plan(load(), lambda: CPU)
    three = plan(
        load(
            *(f"reference.path={tiny_model_folder}", f"critic.path={tiny_model_folder}"),
            "critic.parallel.data=2",
        ),
        lambda: CPU,
    )
    names = [f"{worker.role}/{worker.index}" for worker in three.workers]
    assert names == ["train/0", "reference/0", "critic/0", "critic/1", "rollout/0"]
    trained, frozen = one.workers[0], three.workers[1]
    assert (frozen.optimizer_bytes, frozen.store_bytes, frozen.snapshot_bytes) == (0, 0, 0)
    assert 2 * frozen.parameter_bytes == trained.parameter_bytes > DTYPE_BYTES["float32"]
    critics = three.workers[2:4]
    assert sum(critic.parameter_bytes for critic in critics) == trained.parameter_bytes
    assert sum(critic.optimizer_bytes for critic in critics) == trained.optimizer_bytes
