"""The training step as one writes it by hand for this model, without areal_sc's engine.

Only the choice of micro-batches is shared. In bfloat16 the loop computes with a copy of float32
parameters, and adds gradients up in float32 after each micro-batch, as the engine does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from train_workload import LEARNING_RATE, Workload, make_rows, minibatches_of
from transformers import AttentionInterface, AutoModelForCausalLM

from areal_sc.algorithms.packing import pack_micro_batches
from areal_sc.transport.packed_rows import PackedRows


def attention_of_rows(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    row_lengths: Sequence[int] = (),
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention, one row after the other."""
    parts = zip(
        *(tensor.split(list(row_lengths), 2) for tensor in (query, key, value)), strict=True
    )
    outputs = [
        F.scaled_dot_product_attention(*row, is_causal=True, enable_gqa=True) for row in parts
    ]
    return torch.cat(outputs, 2).transpose(1, 2), None


class HandwrittenLoop:
    """A model, its optimizer and the rows; `step` trains on all of them.

    Attributes:
        grad_norm: of the newest update.
    """

    def __init__(self, workload: Workload, folder: Path, device: str, dtype: torch.dtype) -> None:
        self.model: Any = self.load(folder, dtype).to(device)
        self.parameters = list(self.model.parameters())
        self.masters = self.parameters
        if dtype != torch.float32:
            self.masters = [parameter.detach().float() for parameter in self.parameters]
            for master in self.masters:
                master.grad = torch.zeros_like(master)
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=LEARNING_RATE, betas=(0.9, 0.999), weight_decay=0.0, fused=True
        )
        self.rows = make_rows(workload)
        self.max_tokens = workload.max_tokens
        self.grad_norm = torch.zeros(())
        self.device = device

    def load(self, folder: Path, dtype: torch.dtype) -> Any:
        AttentionInterface.register("benchmark_rows", attention_of_rows)
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="benchmark_rows"
        ).eval()

    def of_tokens(
        self, hidden: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[A] float32 each, log-probabilities of the tokens and entropies, of [A, H] hidden."""
        distribution = self.model.lm_head(hidden).float().log_softmax(-1)
        with torch.no_grad():
            entropy = -(distribution.exp() * distribution).sum(-1)
        return distribution.gather(1, tokens[:, None])[:, 0], entropy

    def clip(self) -> torch.Tensor:
        """Returns: the norm of the gradients before."""
        return torch.nn.utils.clip_grad_norm_(self.masters, 1.0)

    def step(self) -> torch.Tensor:
        """Log-probabilities of all trained tokens, which are returned; an update a minibatch."""
        proximal = torch.zeros(self.rows.num_tokens)
        starts = torch.tensor(self.rows.starts)
        with torch.no_grad():
            for chosen in pack_micro_batches(self.rows.lengths, self.max_tokens):
                part = self.rows.take(chosen)
                asked = part.fields["loss_mask"].nonzero()[:, 0]
                places = torch.cat(
                    [starts[row] + torch.arange(self.rows.lengths[row]) for row in chosen]
                )
                proximal[places[asked]] = self._logprobs_and_entropy(part, asked)[0].cpu()
        known = replace(self.rows, fields={**self.rows.fields, "proximal_logprobs": proximal})
        for minibatch in minibatches_of(self.rows):
            self._update(known.take(minibatch))
        return proximal

    def _update(self, rows: PackedRows) -> None:
        num_tokens = int(rows.fields["loss_mask"].sum())
        entropy_sum = torch.zeros((), device=self.device)
        for chosen in pack_micro_batches(rows.lengths, self.max_tokens):
            part = rows.take(chosen)
            asked = part.fields["loss_mask"].nonzero()[:, 0]
            logprobs, entropy = self._logprobs_and_entropy(part, asked)
            entropy_sum += entropy.sum()
            fields = {name: v[asked].to(self.device) for name, v in part.fields.items()}
            advantages = torch.repeat_interleave(
                torch.tensor(part.advantages), torch.tensor(part.lengths)
            )[asked].to(self.device)
            ratio = (logprobs - fields["proximal_logprobs"]).exp()
            weight = (fields["proximal_logprobs"] - fields["behavior_logprobs"]).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            (-(weight * gain * (weight <= 5)).sum() / num_tokens).backward()
            if self.masters is not self.parameters:
                for master, parameter in zip(self.masters, self.parameters, strict=True):
                    master.grad += parameter.grad
                    parameter.grad = None
        self.grad_norm = self.clip()
        self.optimizer.step()
        if self.masters is self.parameters:
            self.optimizer.zero_grad()
            return
        self.optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)

    def _logprobs_and_entropy(
        self, part: PackedRows, asked: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[A] float32 each, of the `asked` tokens of the rows."""
        position_ids = torch.cat([torch.arange(length) for length in part.lengths])
        tokens = part.fields["input_ids"].long().to(self.device)
        asked = asked.to(self.device)
        hidden = self.model.model(
            input_ids=tokens[None],
            position_ids=position_ids[None].to(self.device),
            use_cache=False,
            row_lengths=part.lengths,
        ).last_hidden_state[0]
        return self.of_tokens(hidden[asked - 1], tokens[asked])
