"""Hugging Face tensors and Megatron-core's parameters hold the same values, on every mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from areal_sc.config.parallel_settings import ParallelConfig
from areal_sc.engines.megatron.family import ModelSizes
from areal_sc.engines.megatron.mapping import MegatronParts, MeshPlace, Slot
from areal_sc.engines.training.parts import Box
from areal_sc.errors import ModelError

SIZES = {
    "vocab_size": 31,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "intermediate_size": 40,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
MODELS = {
    "qwen2": hf.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": hf.Qwen3Config(**SIZES, tie_word_embeddings=False),
    "llama": hf.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3_moe": hf.Qwen3MoeConfig(**SIZES, **EXPERTS, decoder_sparse_step=2),
    "mixtral": hf.MixtralConfig(**SIZES, num_local_experts=4),
}
WITH_EXPERTS = ("qwen3_moe", "mixtral")
MESHES = [
    ParallelConfig(),
    ParallelConfig(tensor=2),
    ParallelConfig(tensor=4, data=2),
    ParallelConfig(tensor=8),  # more than key-value heads
    ParallelConfig(pipeline=2),
    ParallelConfig(pipeline=2, virtual_pipeline=2, tensor=2),
    ParallelConfig(pipeline=4, data=2),
]
EXPERT_MESHES = [
    ParallelConfig(),
    ParallelConfig(data=4, expert=2),
    ParallelConfig(tensor=2, data=2, expert=4, pipeline=2),
]
CASES = [
    (name, mesh) for name in MODELS for mesh in (EXPERT_MESHES if name in WITH_EXPERTS else MESHES)
]


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(MODELS[name])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def parts_of(model: Any, mesh: ParallelConfig, rank: int, **settings: Any) -> MegatronParts:
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    sizes = ModelSizes.of(model.config.to_dict())
    return MegatronParts(shapes, sizes, mesh, rank, **{"has_fused_norms": False, **settings})


def megatron_parameters(model: Any, parts: MegatronParts) -> dict[Slot, torch.Tensor]:
    """Those of a rank, filled with the model's values; what is not filled is NaN."""
    heights: dict[Slot, int] = {}
    for piece in parts.pieces:
        heights[piece.slot] = max(piece.num_groups * piece.stop, heights.get(piece.slot, 0))
    parameters = {
        piece.slot: torch.full(
            (heights[piece.slot], *piece.box.sizes[len(piece.box.sizes) - _width(piece) :]),
            torch.nan,
        )
        for piece in parts.pieces
    }
    for piece in parts.pieces:
        whole = model.get_parameter(piece.name).detach()
        values = whole[piece.box.within(Box.whole(whole.shape))]
        piece.write(parameters[piece.slot], values)
    return parameters


def _width(piece: Any) -> int:
    """Dimensions of a parameter behind its rows."""
    return 0 if len(piece.box.sizes) == 1 else 1


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_every_value_is_given_once_and_comes_back_to_the_bit(
    name: str, mesh: ParallelConfig
) -> None:
    model = model_of(name)
    whole = {n: torch.full_like(p, torch.nan) for n, p in model.named_parameters()}
    for rank in range(mesh.num_ranks):
        parts = parts_of(model, mesh, rank)
        parameters = megatron_parameters(model, parts)
        assert not any(values.isnan().any() for values in parameters.values())
        for piece in parts.pieces:
            if parts.given_by(piece.name, rank) is None:
                continue
            target = whole[piece.name][piece.box.within(Box.whole(whole[piece.name].shape))]
            assert target.isnan().all(), piece.name  # nobody else has given it
            target.copy_(piece.read(parameters[piece.slot]))
    for parameter_name, parameter in model.named_parameters():
        assert torch.equal(whole[parameter_name], parameter)


def test_queries_keys_and_values_lie_group_by_group() -> None:
    model = model_of("qwen2")
    parameters = megatron_parameters(model, parts_of(model, ParallelConfig(), 0))
    for kind in ("weight", "bias"):
        found = parameters[Slot(0, f"decoder.layers.1.self_attention.linear_qkv.{kind}")]
        attention = model.model.layers[1].self_attn
        q, k, v = (getattr(attention, f"{letter}_proj").get_parameter(kind) for letter in "qkv")
        expected = []
        for group in range(4):  # of two query heads each
            expected += [q[12 * group : 12 * group + 12], k[6 * group : 6 * group + 6]]
            expected += [v[6 * group : 6 * group + 6]]
        assert torch.equal(found, torch.cat(expected))


@pytest.mark.parametrize("count", [2, 8])
def test_tensor_ranks_have_equally_many_rows_of_heads(count: int) -> None:
    """Also where key-value heads are fewer: 4 here, whose rows two ranks then share."""
    model = model_of("qwen2")

    def parameter(mesh: ParallelConfig, rank: int) -> torch.Tensor:
        slot = Slot(0, "decoder.layers.1.self_attention.linear_qkv.weight")
        return megatron_parameters(model, parts_of(model, mesh, rank))[slot]

    shares = [parameter(ParallelConfig(tensor=count), rank) for rank in range(count)]
    assert {len(share) for share in shares} == {16 * 6 // count}
    assert torch.equal(torch.cat(shares), parameter(ParallelConfig(), 0))


def test_tensor_ranks_have_their_heads_features_and_tokens() -> None:
    model, mesh = model_of("qwen3"), ParallelConfig(tensor=2)
    second = megatron_parameters(model, parts_of(model, mesh, 1))
    layer = model.model.layers[0]
    feed_forward = second[Slot(0, "decoder.layers.0.mlp.linear_fc1.weight")]
    gate, up = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
    assert torch.equal(feed_forward, torch.cat([gate[20:], up[20:]]))
    down = second[Slot(0, "decoder.layers.0.mlp.linear_fc2.weight")]
    assert torch.equal(down, layer.mlp.down_proj.weight[:, 20:])
    outputs = second[Slot(0, "decoder.layers.0.self_attention.linear_proj.weight")]
    assert torch.equal(outputs, layer.self_attn.o_proj.weight[:, 24:])
    assert torch.equal(second[Slot(0, "output_layer.weight")], model.lm_head.weight[16:])


def test_interleaved_stages_take_turns() -> None:
    model, mesh = model_of("qwen2"), ParallelConfig(pipeline=2, virtual_pipeline=2)
    first, last = (parts_of(model, mesh, rank) for rank in range(2))
    norm = "model.layers.{}.input_layernorm.weight"
    slots = {piece.name: piece.slot for piece in first.pieces}
    assert slots[norm.format(0)].chunk == 0
    assert slots[norm.format(2)].chunk == 1
    slots = {piece.name: piece.slot for piece in last.pieces}
    assert (slots[norm.format(1)].chunk, slots[norm.format(3)].chunk) == (0, 1)
    assert slots["model.embed_tokens.weight"] == Slot(1, "output_layer.weight")  # they are tied


def test_experts_are_spread_over_tensor_ranks_and_shares_of_rows() -> None:
    model, mesh = model_of("qwen3_moe"), ParallelConfig(tensor=2, data=2, expert=4)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    starts = [parts_of(model, mesh, 0).box(name, rank).starts[0] for rank in range(4)]
    assert starts == [0, 1, 2, 3]
    assert [MeshPlace.of(rank, mesh) for rank in (1, 2)] == [
        MeshPlace(1, 0, 0, 1),
        MeshPlace(0, 1, 0, 2),
    ]


def test_transformer_engine_has_norms_in_the_layers_behind_them() -> None:
    for name, second in (
        ("qwen2", "mlp.linear_fc1.layer_norm_weight"),
        ("mixtral", "pre_mlp_layernorm.weight"),
    ):
        model = model_of(name)
        parts = parts_of(model, ParallelConfig(), 0, has_fused_norms=True)
        slots = {piece.name: piece.slot.parameter for piece in parts.pieces}
        layer = "decoder.layers.0."
        norm = slots["model.layers.0.input_layernorm.weight"]
        assert norm == layer + "self_attention.linear_qkv.layer_norm_weight"
        assert slots["model.layers.0.post_attention_layernorm.weight"] == layer + second


def test_parameters_that_the_family_does_not_have_are_refused() -> None:
    shapes = {name: p.shape for name, p in model_of("qwen2").named_parameters()}
    sizes = ModelSizes.of(MODELS["qwen2"].to_dict())
    more = {**shapes, "model.adapter.weight": torch.Size((2, 2))}
    fewer = {name: shape for name, shape in shapes.items() if name != "model.norm.weight"}
    for odd, message in (
        (more, "not those.*model.adapter.weight"),
        (fewer, "not those.*model.norm.weight"),
    ):
        with pytest.raises(ModelError, match=message):
            MegatronParts(odd, sizes, ParallelConfig(), 0, has_fused_norms=False)
