"""Routers of each family take the experts that they are given, with their own scores of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from unit.engines.families import EXPERTS, FAMILIES, LATENT, ROUTED_EXPERTS, SAME_HEADS, SIZES

from areal_sc.engines.routers import Routers
from areal_sc.errors import ModelError

NUM_TOKENS = 12

REPLAYING = (
    *("qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "olmoe", "granitemoe", "ernie4_5_moe"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe", "dots1", "minimax_m2", "mimo_v2_flash"),
)


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def drawn_routes(routers: Routers) -> torch.Tensor:
    """[T, L, k] of any experts, the first two tokens of which are not known."""
    sizes = routers.sizes
    scores = torch.rand(NUM_TOKENS, sizes.num_layers, sizes.num_experts)
    routes = scores.topk(sizes.per_token).indices.to(torch.uint8)
    routes[:2] = 0
    return routes


def logits_of(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=token_ids[None], use_cache=False).logits[0]
    return found


@pytest.mark.parametrize("family", REPLAYING)
def test_tokens_go_through_given_experts(family: str) -> None:
    """The same ones in another order change nothing, and others are those that experts get."""
    model = model_of(family)
    token_ids = torch.arange(NUM_TOKENS)
    with torch.no_grad():
        expected = logits_of(model, token_ids)
        routers = Routers(model)
        assert torch.equal(logits_of(model, token_ids), expected)
        own = routers.routes()
        routers.given = own.flip(-1)
        torch.testing.assert_close(logits_of(model, token_ids), expected)
        all_tokens = torch.arange(NUM_TOKENS), torch.ones(NUM_TOKENS, dtype=torch.bool)
        assert routers.count_others(*all_tokens)[0] == 0
        routers.given = given = drawn_routes(routers)
        got = list[torch.Tensor]()
        for module in model.modules():
            if type(module).__name__.endswith("Experts"):
                module.register_forward_pre_hook(lambda _, inputs: got.append(inputs[1]))
        logits_of(model, token_ids)
    of_layers = [given[2:, layer].long() for layer in routers.chosen]
    assert torch.equal(torch.stack(got)[:, 2:], torch.stack(of_layers))
    assert torch.equal(got[0][:2].sort().values, own[:2, min(routers.chosen)].long().sort().values)
    others = sum(
        len(set(it.tolist()) - set(mine.tolist()))
        for number, layer in enumerate(routers.chosen)
        for it, mine in zip(of_layers[number], routers.chosen[layer][2:], strict=True)
    )
    assert others > 0
    num_given = sum(it.numel() for it in of_layers)
    assert routers.count_others(*all_tokens).tolist() == [others, num_given]
    last = torch.tensor([NUM_TOKENS - 1, 2]), torch.tensor([True, False])
    assert routers.count_others(*last)[1] == num_given / (NUM_TOKENS - 2)


def qwen3(router: Any, hidden: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    scores = (hidden @ router.weight.T).softmax(-1).gather(1, given)
    return scores / scores.sum(-1, keepdim=True) if router.norm_topk_prob else scores


def gpt_oss(router: Any, hidden: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    return (hidden @ router.weight.T + router.bias).gather(1, given).softmax(-1)


def deepseek_v3(router: Any, hidden: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    scores = (hidden @ router.weight.T).sigmoid().gather(1, given)
    return scores / scores.sum(-1, keepdim=True) * router.routed_scaling_factor


@pytest.mark.parametrize(
    ("family", "formula"),
    [("qwen3_moe", qwen3), ("gpt_oss", gpt_oss), ("deepseek_v3", deepseek_v3)],
)
def test_weights_and_gradients_are_those_of_the_formula(
    family: str, formula: Callable[..., torch.Tensor]
) -> None:
    """In float64, by autograd through an independent expression."""
    model = model_of(family)
    routers = Routers(model)
    number = max(routers.chosen, default=1)
    [router] = [
        it
        for name, it in model.named_modules()
        if f"layers.{number}." in name and type(it).__name__.lower().endswith("topkrouter")
    ]
    routers.given = drawn_routes(routers)
    given = routers.given[2:, number].long()
    hidden = torch.randn(NUM_TOKENS, model.config.hidden_size)
    factors = torch.randn(NUM_TOKENS - 2, routers.sizes.per_token)
    with torch.enable_grad():
        _, weights, experts = router(hidden)
        (of_found,) = torch.autograd.grad((weights[2:] * factors).sum(), router.weight)
    assert torch.equal(experts[2:], given)
    reference = router.double()
    expected = formula(reference, hidden[2:].double(), given)
    (of_expected,) = torch.autograd.grad((expected * factors).sum(), reference.weight)
    torch.testing.assert_close(weights[2:].double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(of_found.double(), of_expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (FAMILIES["qwen3"], "expected a model with experts, .* got qwen3 with 2 layers of 0"),
        (FAMILIES["llama4"], "expected a model with experts, .* 1 a token"),
        (FAMILIES["phimoe"], "PhimoeTopKRouter does not make the weights"),
        (  # which gives experts of the other groups no score
            lambda: hf.DeepseekV2Config(
                **SAME_HEADS,
                **LATENT,
                **{**ROUTED_EXPERTS, "n_group": 2},
                topk_method="group_limited_greedy",
            ),
            "DeepseekV2TopkRouter does not make the weights",
        ),
    ],
)
def test_other_models_are_refused_by_name(config: Callable[[], Any], message: str) -> None:
    model = hf.AutoModelForCausalLM.from_config(config())
    with pytest.raises(ModelError, match=f"actor.routing_replay: {message}"):
        Routers(model)


def test_experts_beyond_a_byte_take_two() -> None:
    many = {**EXPERTS, "num_experts": 257}
    for sizes, dtype in (({**many, "num_experts": 256}, "uint8"), (many, "int16")):
        config = hf.Qwen3MoeConfig(**SIZES, **sizes)
        model = hf.AutoModelForCausalLM.from_config(config)
        routers = Routers(model)
        logits_of(model, torch.arange(NUM_TOKENS))
        assert routers.sizes.field.type_name == f"{dtype}[2x2]"
        assert str(routers.routes().dtype) == f"torch.{dtype}"
