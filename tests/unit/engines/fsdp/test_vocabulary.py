"""Which rows of embeddings and output layer a rank keeps, and how these get their gradients."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from unit.engines.families import HEADS_OF_8, SIZES
from unit.engines.fsdp.largest_tensor import LargestTensor

from areal_sc.config.schema import ActorConfig, Dtype, ParallelConfig
from areal_sc.engines.fsdp.model import load_sharded_model
from areal_sc.engines.fsdp.packed_model import PackedModel
from areal_sc.engines.fsdp.vocabulary import _look_up, look_up_whole, spread_vocabulary
from areal_sc.engines.training.process_group import ProcessGroup, ProcessGroups

CPU = torch.device("cpu")
PADDING = 3
TOKENS = torch.tensor([5, PADDING, 9, 5, 60, 0])


def make_model(**settings: Any) -> PackedModel:
    torch.manual_seed(0)
    config = hf.Qwen2Config(**SIZES | {"pad_token_id": PADDING} | settings)
    return PackedModel(hf.AutoModelForCausalLM.from_config(config), chunk_tokens=2)


def go_through(model: PackedModel, seed: int) -> torch.Tensor:
    layout = model.layout([4, 2], CPU)
    positions = torch.arange(len(TOKENS))
    logprobs, entropy = model(TOKENS, layout, positions, TOKENS.flip(0), None)
    weights = torch.rand(len(TOKENS), generator=torch.Generator().manual_seed(seed))
    (logprobs * weights + entropy).sum().backward()
    return logprobs.detach()


@pytest.mark.parametrize("is_tied", [True, False])
def test_gradients_that_are_added_at_once(is_tied: bool) -> None:
    """They are those of autograd; and none is made of all rows where there is a sum already."""
    expected, model = (make_model(tie_word_embeddings=is_tied) for _ in range(2))
    look_up_whole(model.causal_lm)
    model.adds_head_gradient = True
    size = model.causal_lm.get_output_embeddings().weight.numel()
    for seed in range(2):
        right = go_through(expected, seed)
        with LargestTensor() as largest:
            assert torch.equal(go_through(model, seed), right)
        assert (largest.count < size) == (seed == 1)
    found = dict(model.named_parameters())
    for name, parameter in expected.named_parameters():
        assert torch.allclose(found[name].grad, parameter.grad, atol=1e-6), name


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_one_rank_of_the_engine_adds_gradients_at_once(dtype: Dtype, tmp_path: Path) -> None:
    hf.Qwen2Config(**SIZES, tie_word_embeddings=True).save_pretrained(tmp_path)
    config = ActorConfig(path=str(tmp_path), random_init=True, seed=0, dtype=dtype)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    is_needed = dtype is Dtype.bfloat16
    groups = ProcessGroups.join(
        0, 1, address, CPU, ParallelConfig(), hosted=None, is_needed=is_needed
    )
    try:
        model = load_sharded_model(config, groups)[0]
        go_through(model, 0)
        weight = model.causal_lm.get_output_embeddings().weight
        with LargestTensor() as largest:
            go_through(model, 1)
        assert largest.count < weight.numel() or is_needed  # which has a rounded copy
        assert model.adds_head_gradient
        assert model.causal_lm.get_input_embeddings().forward.func is _look_up
    finally:
        groups.close()


@pytest.mark.parametrize("is_tied", [True, False])
def test_what_is_not_trained_has_no_gradient(is_tied: bool) -> None:
    model = make_model(tie_word_embeddings=is_tied)
    look_up_whole(model.causal_lm)
    model.adds_head_gradient = True
    embeddings, head = (
        model.causal_lm.get_input_embeddings(),
        model.causal_lm.get_output_embeddings(),
    )
    for weight in {embeddings.weight, head.weight}:
        weight.requires_grad_(False)
    go_through(model, 0)
    assert embeddings.weight.grad is head.weight.grad is None
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("config", "is_spread"),
    [
        (hf.Qwen2Config(**SIZES, tie_word_embeddings=True), True),
        (hf.Qwen2Config(**SIZES), True),
        (hf.Gemma3TextConfig(**HEADS_OF_8), False),  # scales what it looks up
    ],
)
def test_which_models_are_spread(config: Any, is_spread: bool) -> None:
    causal_lm = hf.AutoModelForCausalLM.from_config(config)
    before = causal_lm.get_output_embeddings().weight
    group = ProcessGroup(0, 2, CPU)
    own, rows = spread_vocabulary(causal_lm, group, torch.float32)
    embeddings, head = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
    assert (embeddings.weight is head.weight) == config.tie_word_embeddings
    if not is_spread:
        assert (own, rows, head.weight is before) == (set(), [], True)
        return
    assert own == {embeddings.weight, head.weight}
    assert len(rows) == len(own)
    assert {tuple(weight.shape) for weight in own} == {(32, 32)}
    assert all(isinstance(weight, nn.Parameter) for weight in own)


def test_rows_that_a_third_module_has_are_not_spread() -> None:
    causal_lm = hf.AutoModelForCausalLM.from_config(hf.Qwen2Config(**SIZES))
    causal_lm.further = nn.Linear(1, 1, bias=False)
    causal_lm.further.weight = before = causal_lm.get_input_embeddings().weight
    group = ProcessGroup(0, 2, CPU)
    assert spread_vocabulary(causal_lm, group, torch.float32) == (set(), [])
    assert causal_lm.get_input_embeddings().weight is causal_lm.further.weight is before
