"""What Megatron-core cannot do is refused by name, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from areal_sc.config.parallel_settings import ParallelConfig, TrainEngineKind
from areal_sc.config.schema import ActorConfig, Device, Dtype
from areal_sc.engines.handles import FSDPPPOActor, MegatronPPOActor, make_actor
from areal_sc.engines.megatron import machine
from areal_sc.errors import ArealError, ConfigError, ModelError

Check = Callable[..., None]
DENSE = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
MOE = {**DENSE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}


def actor(path: str = "model", **settings: Any) -> ActorConfig:
    parallel = ParallelConfig(**settings.pop("parallel", {}))
    return ActorConfig(engine=TrainEngineKind.megatron, path=path, parallel=parallel, **settings)


@pytest.fixture
def check_model(tmp_path: Path) -> Check:
    def check(config: Any, **parallel: int) -> None:
        config.save_pretrained(tmp_path)
        MegatronPPOActor(actor(str(tmp_path), parallel=parallel)).check_model(tmp_path)

    return check


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"sequence": 2}, "sequence: expected 1 .* got 2.*actor.parallel.tensor share the tokens"),
        ({"virtual_pipeline": 2}, "virtual_pipeline: expected 1 with .*pipeline=1, got 2"),
        ({"expert": 4, "data": 2}, r"expert: expected a divisor of data times tensor \(2\).*got 4"),
    ],
)
def test_meshes_that_fit_no_model(parallel: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=f"actor.parallel.{message}"):
        MegatronPPOActor(actor(parallel=parallel)).check(None)


@pytest.mark.parametrize("name", ["cpu_offload", "activation_offload", "compile_layers"])
def test_settings_of_the_other_engine(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected false( or none)? with .*=megatron"):
        MegatronPPOActor(actor(**{name: True})).check(None)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("dtype", Dtype.float16, "float32 or bfloat16"),
        ("flash_attention", 3, "2"),
    ],
)
def test_values_of_the_other_engine(name: str, value: Any, expected: str) -> None:
    message = f"{name}: expected {expected} with .*=megatron, got {value}; .*=fsdp has it"
    with pytest.raises(ConfigError, match=message):
        MegatronPPOActor(actor(**{name: value})).check(None)


@pytest.mark.parametrize(
    ("config", "parallel", "message"),
    [
        (DENSE, {"tensor": 3}, "tensor: expected a divisor .* 8 attention heads.* got 3"),
        ({**DENSE, "vocab_size": 5}, {"tensor": 4}, "tensor: .*some of .* 5 tokens, got 4"),
        (
            {**DENSE, "num_key_value_heads": 8, "num_attention_heads": 24},
            {"tensor": 12},
            "tensor: .* 8 key-value heads, got 12",
        ),
        (
            {**DENSE, "num_key_value_heads": 1, "head_dim": 6},
            {"tensor": 8},
            "tensor: expected a divisor .* 60 rows for queries.* got 8",
        ),
        ({**DENSE, "intermediate_size": 22}, {"tensor": 4}, "tensor: .* 22 features.* got 4"),
        (DENSE, {"pipeline": 8}, "pipeline: expected a divisor .* 4 layers, got 8"),
        (
            DENSE,
            {"pipeline": 2, "virtual_pipeline": 4},
            "pipeline times virtual_pipeline: expected a divisor .* 4 layers, got 8",
        ),
        (DENSE, {"data": 2, "expert": 2}, "expert: expected 1 for .* without experts, got 2"),
        (MOE, {"data": 8, "expert": 8}, "expert: expected a divisor of .* 4 experts, got 8"),
        (MOE, {"tensor": 2}, "expert: expected at least 2 .* actor.parallel.tensor=2"),
        (
            {**MOE, "mlp_only_layers": [0], "intermediate_size": 22},
            {"tensor": 4, "expert": 4},
            "tensor: .* 22 features.* got 4",
        ),
    ],
)
def test_meshes_that_do_not_fit_the_model(
    config: dict[str, int], parallel: dict[str, int], message: str, check_model: Check
) -> None:
    family = hf.Qwen3MoeConfig if "num_experts" in config else hf.Qwen3Config
    with pytest.raises(ConfigError, match=f"actor.parallel.{message}"):
        check_model(family(**config), **parallel)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (hf.GPT2Config(), "models of type 'gpt2'; it maps llama, mistral, .*, qwen3_moe; set"),
        (hf.LlamaConfig(attention_bias=True, mlp_bias=True), "biases in attention, and biases in"),
        (hf.Qwen3Config(hidden_act="gelu"), "the activation gelu"),
        (
            hf.LlamaConfig(rope_parameters={"partial_rotary_factor": 0.5, "rope_theta": 1e4}),
            "rotary embeddings of a part of each head",
        ),
        (
            hf.LlamaConfig(
                rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
            ),
            "rotary embeddings of type dynamic, none of default, linear, llama3, yarn",
        ),
        (hf.Qwen3MoeConfig(num_experts_per_tok=1, norm_topk_prob=True), "one expert a token"),
        (hf.MixtralConfig(num_experts_per_tok=1), "one expert a token"),
    ],
)
def test_models_that_cannot_be_mapped(config: Any, message: str, check_model: Check) -> None:
    with pytest.raises(ModelError, match=f"megatron cannot map .*{message}"):
        check_model(config)


def test_models_of_the_families_are_taken(check_model: Check) -> None:
    check_model(hf.Qwen2Config(**DENSE), tensor=4, pipeline=2, virtual_pipeline=2)
    check_model(hf.LlamaConfig(**DENSE, hidden_size=128), data=3, tensor=8)
    check_model(hf.Qwen3MoeConfig(**MOE), tensor=2, data=2, expert=4)
    dense = hf.Qwen3MoeConfig(**MOE, mlp_only_layers=[0, 1, 2, 3])
    check_model(dense, tensor=2)  # no experts are left


def test_a_broken_config_is_the_models_fault(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps([]))
    with pytest.raises(ModelError, match="expected a JSON object"):
        MegatronPPOActor(actor()).check_model(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_hidden_layers": "four"},
        {"num_hidden_layers": -1},
        {"vocab_size": 0},
        {"hidden_size": None},
        {"num_attention_heads": 0},
        {"rope_parameters": "default"},
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": []},
    ],
)
def test_sizes_that_are_not_there(wrong: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, **DENSE}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "vocab_size": 9, **wrong}))
    with pytest.raises(ModelError, match="does not give the sizes of a qwen2 model"):
        MegatronPPOActor(actor()).check_model(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"moe_intermediate_size": -3}, "expected at least 1, got moe_intermediate_size=-3"),
        ({"num_experts_per_tok": 0}, "expected at least 1, got num_experts_per_tok=0"),
        ({"num_experts_per_tok": 5}, "expected num_experts_per_tok of at most 4 experts, got 5"),
    ],
)
def test_sizes_of_experts_that_cannot_be(
    wrong: dict[str, Any], message: str, tmp_path: Path
) -> None:
    sizes = hf.Qwen3MoeConfig(**MOE).to_dict() | wrong
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(ModelError, match=message):
        MegatronPPOActor(actor()).check_model(tmp_path)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Packages that are there; no shim is asked for."""
    monkeypatch.delenv(machine.ON_CPU, raising=False)
    names = {"megatron.core", "transformer_engine"}
    monkeypatch.setattr(machine, "_is_installed", names.__contains__)
    return names


def test_what_a_machine_lacks_is_named(installed: set[str]) -> None:
    handle = MegatronPPOActor(actor())
    handle.check(lambda: 1)
    with pytest.raises(ConfigError, match=r"megatron needs GPUs, .* set actor.engine=fsdp"):
        handle.check(lambda: 0)
    with pytest.raises(ConfigError, match="needs GPUs"):
        MegatronPPOActor(actor(device=Device.cpu)).check(lambda: 1)
    installed.remove("transformer_engine")
    with pytest.raises(ConfigError, match=r"TransformerEngine .*not installed.*pip install"):
        handle.check(lambda: 1)
    installed.clear()
    with pytest.raises(ConfigError, match=r"Megatron-core, .*pip install areal-sc\[megatron\]"):
        handle.check(lambda: 1)
    handle.check(None)  # another machine will tell


def test_a_package_in_one_that_is_not_there_is_not_installed() -> None:
    assert not machine._is_installed("no_such_package.core")
    assert machine._is_installed("torch.cuda")


def test_the_shim_is_a_checkouts(
    installed: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(machine.ON_CPU, "1")
    handle = MegatronPPOActor(actor())
    handle.check(lambda: 0)
    assert handle.devices == (Device.cpu, 1)
    with pytest.raises(ConfigError, match="expected cpu with MEGATRON_ON_CPU=1, got cuda"):
        MegatronPPOActor(actor(device=Device.cuda)).check(lambda: 1)
    monkeypatch.setattr(machine, "SHIM", tmp_path / "nothing.py")
    with pytest.raises(ConfigError, match="run from a checkout"):
        handle.check(lambda: 0)


def test_the_settings_choose_the_engine() -> None:
    assert isinstance(make_actor(actor()), MegatronPPOActor)
    assert isinstance(make_actor(ActorConfig(path="model")), FSDPPPOActor)
    with pytest.raises(ConfigError, match="expected fsdp with FSDPPPOActor, got megatron; make_"):
        FSDPPPOActor(actor())


@pytest.mark.parametrize("name", ["pipeline", "virtual_pipeline", "expert"])
def test_fsdp_has_no_stages_and_spreads_no_experts(name: str) -> None:
    config = ActorConfig(path="model", parallel=ParallelConfig(**{name: 2}))
    with pytest.raises(ArealError, match=f"actor.parallel.{name}: expected 1 with .*engine=fsdp"):
        make_actor(config).build()
