"""One rank that computes in bfloat16 with float32 parameters, without FSDP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf
from builders import packed_rows
from torch import nn
from torch.distributed.fsdp import FSDPModule

from areal_sc.algorithms.loss_tokens import LossTokens
from areal_sc.config.schema import ActorConfig, Device, Dtype, OptimizerConfig
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.engines.fsdp.rounded_copies import RoundedCopies
from areal_sc.transport.packed_rows import PackedRows

LENGTHS = (9, 14, 5, 11)
LR = 1e-3


class Layer(nn.Module):
    """Remembers the types of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = list[torch.dtype]()

    def forward(
        self,
        values: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        *,
        places: torch.Tensor,
    ) -> torch.Tensor:
        self.seen += [values.dtype, *(it.dtype for it in angles), places.dtype]
        return self.linear(values)


def model_and_copies() -> tuple[nn.Sequential, Layer, RoundedCopies]:
    torch.manual_seed(0)
    layer = Layer()
    model = nn.Sequential(nn.Embedding(7, 4), layer, nn.Linear(4, 7, bias=False))
    model[2].weight = model[0].weight  # tied
    return model, layer, RoundedCopies(model, [layer], [], torch.bfloat16)


def test_copies_stand_in_while_the_model_computes_and_no_longer() -> None:
    model, layer, copies = model_and_copies()
    before = dict(model.named_parameters())
    with copies.in_place():
        during = dict(model.named_parameters())
        assert during.keys() == before.keys()
        for name, copy in during.items():
            assert torch.equal(copy, before[name].bfloat16())
        assert model[0].weight is model[2].weight
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    with torch.no_grad():
        layer.linear.bias.fill_(3.0)
    with copies.in_place():
        assert layer.linear.bias.eq(3.0).all(), "a change of the parameters is seen"
    with pytest.raises(KeyError), copies.in_place():
        raise KeyError
    assert layer.linear.bias is before["1.linear.bias"]


def test_fractions_that_a_layer_gets_are_rounded() -> None:
    _, layer, copies = model_and_copies()
    with copies.in_place():
        layer(torch.ones(2, 4), (torch.ones(2), torch.ones(2).bfloat16()), places=torch.arange(2))
    assert layer.seen == [torch.bfloat16] * 3 + [torch.int64]


def test_gradients_of_micro_batches_add_up_in_float32() -> None:
    _, layer, copies = model_and_copies()
    inputs = [torch.full((1, 4), value) for value in (1.0, 2**-9)]  # their sum is not in bfloat16
    with copies.in_place():
        for values in inputs:
            layer(values, (values, values), places=torch.arange(1)).sum().backward()
            copies.take_gradients()
    gradient = layer.linear.weight.grad
    assert gradient is not None
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, torch.full((4, 4), 1 + 2**-9))


def test_gradients_of_a_layer_are_added_when_its_backward_is_done() -> None:
    """Not those of the whole model at its end: they would all be in memory at one time."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(3)]
    copies = RoundedCopies(nn.Sequential(*layers), layers, [], torch.bfloat16)
    held = list[int]()

    def count_gradients(_: torch.Tensor) -> None:
        held.append(sum(copy.grad is not None for copy in copies.tensors))

    with copies.in_place():
        values = torch.ones(2, 4).bfloat16().requires_grad_() * 1
        for layer in layers:
            values.register_hook(count_gradients)
            values = layer(values)
        values.sum().backward()
    assert max(held) <= 2, "of one layer: weight and bias"
    assert all(layer.weight.grad is not None for layer in layers)


def mean_logprob(tokens: LossTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -tokens.mean(tokens.logprobs), {}


def rows() -> PackedRows:
    is_trained = torch.cat([torch.arange(length) > 0 for length in LENGTHS])
    return packed_rows(LENGTHS, 1, loss_mask=is_trained, advantages=(1.0,) * len(LENGTHS))


def test_an_update_is_that_of_a_plain_loop(tiny_model_folder: Path) -> None:
    """Micro-batch by micro-batch: a model in bfloat16, whose gradients are added in float32."""
    config = ActorConfig(
        path=str(tiny_model_folder),
        device=Device.cpu,
        dtype=Dtype.bfloat16,
        max_tokens_per_micro_batch=16,
        optimizer=OptimizerConfig(lr=LR, total_steps=10, max_grad_norm=0.0, weight_decay=0.0),
    )
    engine = FSDPEngine(config)
    engine.initialize(0, 1, "")
    assert not any(isinstance(module, FSDPModule) for module in engine._model.modules())
    masters = hf.AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    found = engine.forward(rows(), "logprobs")
    norm = engine.update([rows()], mean_logprob, step=0)["grad_norm"]
    changed = engine.forward(rows(), "logprobs")
    trained = {name: p.detach().clone() for name, p in engine._model.causal_lm.named_parameters()}
    engine.close()

    rounded = hf.AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.bfloat16)
    count = sum(LENGTHS) - len(LENGTHS)
    total = {name: torch.zeros_like(p) for name, p in masters.named_parameters()}
    ids = rows().fields["input_ids"].long()
    expected = list[torch.Tensor]()
    for row in torch.split(ids, LENGTHS):
        logits = rounded(input_ids=row[None], use_cache=False).logits[0, :-1].float()
        logprobs = logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]
        expected.append(logprobs.detach())
        (-logprobs.sum() / count).backward()
        for name, parameter in rounded.named_parameters():
            total[name] += parameter.grad.float()
            parameter.grad = None
    given = torch.cat([row[1:] for row in torch.split(found, LENGTHS)])
    assert (given - torch.cat(expected)).abs().max() < 0.05
    assert (changed - found).sum() > 0
    whole = torch.cat([gradient.flatten() for gradient in total.values()])
    assert norm == pytest.approx(float(whole.norm()), rel=0.02)
    for name, parameter in masters.named_parameters():
        step = trained[name] - parameter.detach()
        assert trained[name].dtype == torch.float32
        if total[name].norm() > 1e-6:  # Adam's first step goes by the signs
            agreement = step.sign() * -total[name].sign()
            assert agreement.mean() > 0.7, name
