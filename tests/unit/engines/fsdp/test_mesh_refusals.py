"""What tensor and sequence parallelism would compute wrongly is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch.nn import attention
from unit.engines.families import EXPERTS, LIMIT, LONGROPE, SIZES

from areal_sc.config.parallel_settings import ParallelConfig
from areal_sc.config.schema import ActorConfig, Device
from areal_sc.engines.fsdp.handle import FSDPPPOActor
from areal_sc.engines.fsdp.tensor_parallel import plan_cuts
from areal_sc.engines.training.sequence_parallel import check_sequence_parallel
from areal_sc.errors import ConfigError, ModelError

ONE_EXPERT = hf.Qwen3MoeConfig(**SIZES, **{**EXPERTS, "num_experts": 1, "num_experts_per_tok": 1})
GPT2 = hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=64)


def model_of(config: Any) -> Any:
    return hf.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2, "GPT2LMHeadModel has no plan for tensor parallelism"),
        (ONE_EXPERT, r"has 1 experts in model\.layers\.0\.mlp\.experts, fewer than ranks"),
        (hf.PhiConfig(**SIZES, qk_layernorm=True), r"self_attn\.q_layernorm\.weight, which its pl"),
        (hf.ApertusConfig(**SIZES), r"mlp\.act_fn\.alpha_p, which its plan does not say"),
    ],
)
def test_models_that_are_not_cut(config: Any, message: str) -> None:
    with pytest.raises(ModelError, match=f"{message}.*tensor=1, and more actor.parallel.data"):
        plan_cuts(model_of(config), 2, cuts_vocabulary=True)


def test_compiled_layers_need_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = FSDPPPOActor(ActorConfig(path="model", device=Device.cpu, compile_layers=True))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"compile_layers: expected a C\+\+ .* no-such-compiler"):
        actor.check(lambda: 0)
    actor.check(None)  # another machine's


def test_another_flash_attention_is_refused_where_it_is_not_and_taken_by_its_name(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ActorConfig(path=str(tiny_model_folder), device=Device.cpu, flash_attention=3)
    with pytest.raises(ConfigError, match=r"flash_attention: expected 2, got 3: .*flash_attn_3"):
        FSDPPPOActor(config).check(lambda: 0)
    stub = tmp_path / "flash_attn_interface.py"
    stub.write_text(
        "from torch import library\n"
        "OWN = library.Library('flash_attn_3', 'DEF')\n"
        "OWN.define('fwd(Tensor query) -> Tensor')\n"
        "OWN.define('bwd(Tensor query) -> Tensor')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    FSDPPPOActor(config).check(lambda: 0)
    engine = FSDPPPOActor(config).build()
    engine.initialize(0, 1, "")
    engine.close()
    assert attention.current_flash_attention_impl() == "FA3"
    attention.restore_flash_attention_impl()


def test_experts_are_cut_where_other_ranks_can_be_skipped() -> None:
    config = hf.Qwen3MoeConfig(**SIZES, **EXPERTS)
    model = model_of(config)
    cuts = plan_cuts(model, 2, cuts_vocabulary=True)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert [box.starts[0] for box in cuts[name].boxes] == [0, 2]
    assert {box.sizes[0] for box in cuts[name].boxes} == {2}
    model.model.layers[0].mlp.experts.norm = torch.nn.LayerNorm(EXPERTS["num_experts"])
    with pytest.raises(ModelError, match=r"mlp\.experts\.norm\.weight, which is shared by the exp"):
        plan_cuts(model, 2, cuts_vocabulary=True)
    config._experts_implementation = "eager"  # a loop over the experts that tokens go to
    with pytest.raises(ModelError, match=r"plans model\.layers\.0\.mlp\.experts as 'moe_tp_exp"):
        plan_cuts(model_of(config), 2, cuts_vocabulary=True)


GATHERED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise_gather_output")


@pytest.mark.parametrize(
    ("styles", "message"),
    [
        (GATHERED, r"self_attn as colwise_gather_output, replicated_.*, rowwise, which do not go"),
        ({**GATHERED, "o_proj": "rowwise_split_input"}, "which do not go together"),
        ({"o_proj": "local_params"}, r"o_proj as 'local_params', of which this engine knows"),
    ],
)
def test_plans_of_which_gradients_would_be_wrong(styles: dict[str, str], message: str) -> None:
    model = model_of(hf.Qwen3Config(**SIZES, head_dim=8))  # norms of queries and keys
    plan_cuts(model, 2, cuts_vocabulary=True)
    changed = {f"model.layers.*.self_attn.{layer}": style for layer, style in styles.items()}
    model._tp_plan = {**model._tp_plan, **changed}
    with pytest.raises(ModelError, match=message):
        plan_cuts(model, 2, cuts_vocabulary=True)


def test_heads_must_come_out_even() -> None:
    model = model_of(hf.LlamaConfig(**SIZES))  # 4 heads, 2 of keys and values
    with pytest.raises(ConfigError, match=r"actor\.parallel\.tensor: .* 4 attention heads.*got 3"):
        plan_cuts(model, 3, cuts_vocabulary=True)
    ParallelConfig(sequence=2, tensor=2).check_heads(4, 1)
    with pytest.raises(ConfigError, match=r"sequence: .* 2 attention heads of each tensor rank"):
        check_sequence_parallel(model, ParallelConfig(sequence=4, tensor=2), packs=True)
    with pytest.raises(ConfigError, match=r"a multiple of its 4 key-value heads, got 6"):
        ParallelConfig(tensor=6).check_heads(12, 4)


def test_models_whose_tokens_are_not_split() -> None:
    longrope = model_of(hf.LlamaConfig(**SIZES, rope_parameters=LONGROPE))
    with pytest.raises(ModelError, match=r"LlamaForCausalLM has longrope .* length of a whole row"):
        check_sequence_parallel(longrope, ParallelConfig(sequence=2), packs=True)
    check_sequence_parallel(longrope, ParallelConfig(tensor=2), packs=True)
    sliding = model_of(hf.MistralConfig(**SIZES, sliding_window=LIMIT))
    check_sequence_parallel(sliding, ParallelConfig(sequence=2), packs=True)
    with pytest.raises(ModelError, match="MistralForCausalLM cannot attend within packed rows"):
        check_sequence_parallel(sliding, ParallelConfig(sequence=2), packs=False)
