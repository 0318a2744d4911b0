"""Training of a model of half a billion parameters: FSDPEngine against a loop written by hand.

A step recomputes the log-probabilities of all rows, then makes two optimizer updates. Both sides
compute in bfloat16 over float32 parameters and AdamW state, on the same packed micro-batches. The
loop keeps a bfloat16 copy of the parameters, adds gradients up in float32 after each micro-batch,
and has full logits of the trained tokens.

Model FLOPs of a token are 2 N forward and 4 N backward, N parameters, and of a row of L tokens
2 L^2 * heads * head dimension a layer for causal attention forward, twice that backward. What is
computed again, or for padding, does not count.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import report
import torch
from gpu_common import (
    ModelSizes,
    Setting,
    measured_bf16_flops,
    peak_allocated,
    peak_bf16_flops,
    sizes_for,
    synchronize,
)
from train_throughput import Step, attention_of_rows, engine_step, ratio
from train_throughput import measure as measure_sides
from train_workload import Workload, make_rows, minibatches_of_rank
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from areal_sc.algorithms.packing import pack_micro_batches
from areal_sc.config.schema import ActorConfig, Device, Dtype, OptimizerConfig, PPOConfig
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.transport.packed_rows import PackedRows

LEARNING_RATE = 1e-6


def measure(setting: Setting) -> report.Metrics:
    hf_logging.disable_progress_bar()
    sizes, workload = sizes_for(setting), _workload(setting)
    recompute = not setting.has_large_card() and setting.is_cuda
    rounds = (3 if setting.is_quick else 7) if setting.is_cuda else 1
    with tempfile.TemporaryDirectory(prefix="areal-sc-benchmark-") as name:
        folder = Path(name)
        model = sizes.build(torch.float32)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        model.save_pretrained(folder)
        del model
        engine = FSDPEngine(_actor_config(workload, folder, setting, recompute))
        steps: dict[str, Step] = {"engine": _waited_for(engine_step(engine, workload), setting)}
        peak = {"engine": peak_allocated(setting.device, steps["engine"])}
        if not recompute:  # a second trainer would not fit beside the first
            of_engine = torch.cuda.memory_allocated() if setting.is_cuda else 0
            by_hand = HandwrittenLoop(workload, folder, setting.device)
            steps["handwritten"] = _waited_for(by_hand.step, setting)
            peak["handwritten"] = peak_allocated(setting.device, steps["handwritten"]) - of_engine
        times = measure_sides(steps, rounds)
        engine.close()
    return _report(setting, workload, _flops(sizes, num_parameters, workload), times.wall_s, peak)


def _workload(setting: Setting) -> Workload:
    """Lognormal lengths, median 400 and at most 2,048, as of answers to school mathematics."""
    sizes = sizes_for(setting)
    generator = random.Random(0)
    num_rows, median, longest = (128, 400, 2048) if setting.is_cuda else (8, 20, 64)
    if setting.is_cuda and setting.is_quick:
        num_rows = 64
    drawn = (int(median * generator.lognormvariate(0, 0.6)) for _ in range(num_rows))
    lengths = tuple(min(longest, max(16, length)) for length in drawn)
    max_tokens = 16384 if setting.has_large_card() else 4096
    return Workload(
        sizes.name,
        sizes.hidden,
        sizes.num_layers,
        sizes.feed_forward,
        sizes.vocabulary,
        max_tokens if setting.is_cuda else 128,
        lengths,
    )


def _actor_config(
    workload: Workload, folder: Path, setting: Setting, recompute: bool
) -> ActorConfig:
    return ActorConfig(
        path=str(folder),
        device=Device(setting.device),
        dtype=Dtype.bfloat16,
        max_tokens_per_micro_batch=workload.max_tokens,
        activation_checkpointing=recompute,
        seed=0,
        optimizer=OptimizerConfig(lr=LEARNING_RATE, total_steps=100),
        ppo=PPOConfig(num_minibatches=2),
    )


def _waited_for(step: Step, setting: Setting) -> Step:
    def waited_for() -> None:
        step()
        synchronize(setting.device)

    return waited_for


class HandwrittenLoop:
    """The same step as one would write it for this model, without areal_sc's engine."""

    def __init__(self, workload: Workload, folder: Path, device: str) -> None:
        AttentionInterface.register("benchmark_rows", attention_of_rows)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="benchmark_rows"
        )
        self.model.to(device).eval()
        self.masters = [p.detach().float() for p in self.model.parameters()]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=LEARNING_RATE, weight_decay=0.0, fused=True
        )
        self.rows = make_rows(workload)
        self.max_tokens = workload.max_tokens
        self.device = device

    def step(self) -> None:
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
        for minibatch in minibatches_of_rank(self.rows, 0, 1):
            self._update(known.take(minibatch))

    def _update(self, rows: PackedRows) -> None:
        num_tokens = int(rows.fields["loss_mask"].sum())
        entropy_sum = torch.zeros((), device=self.device)
        for chosen in pack_micro_batches(rows.lengths, self.max_tokens):
            part = rows.take(chosen)
            asked = part.fields["loss_mask"].nonzero()[:, 0]
            logprobs, entropy = self._logprobs_and_entropy(part, asked)
            entropy_sum += entropy.sum()
            fields = {n: values[asked].to(self.device) for n, values in part.fields.items()}
            assert part.advantages is not None
            advantages = torch.repeat_interleave(
                torch.tensor(part.advantages), torch.tensor(part.lengths)
            )[asked].to(self.device)
            ratios = (logprobs - fields["proximal_logprobs"]).exp()
            weight = (fields["proximal_logprobs"] - fields["behavior_logprobs"]).exp()
            gain = torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages)
            (-(weight * gain * (weight <= 5)).sum() / num_tokens).backward()
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                master.grad += parameter.grad
                parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(self.model.parameters()), self.masters)
        for master in self.masters:
            master.grad.zero_()

    def _logprobs_and_entropy(
        self, part: PackedRows, asked: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        position_ids = torch.cat([torch.arange(length) for length in part.lengths])
        tokens = part.fields["input_ids"].long().to(self.device)
        asked = asked.to(self.device)
        hidden = self.model.model(
            input_ids=tokens[None],
            position_ids=position_ids[None].to(self.device),
            use_cache=False,
            row_lengths=part.lengths,
        ).last_hidden_state[0]
        distribution = self.model.lm_head(hidden[asked - 1]).float().log_softmax(-1)
        with torch.no_grad():
            entropy = -(distribution.exp() * distribution).sum(-1)
        return distribution.gather(1, tokens[asked, None])[:, 0], entropy


@dataclass(frozen=True)
class Flops:
    """Model FLOPs of one step."""

    dense: float
    attention: float

    @property
    def total(self) -> float:
        return self.dense + self.attention


def _flops(sizes: ModelSizes, num_parameters: int, workload: Workload) -> Flops:
    """A forward for the log-probabilities, a forward and a backward for the updates."""
    pairs = sum(length**2 for length in workload.lengths)
    forward = 2 * pairs * sizes.hidden * sizes.num_layers
    return Flops((2 + 6) * num_parameters * workload.num_tokens, (1 + 3) * forward)


def _report(
    setting: Setting,
    workload: Workload,
    flops: Flops,
    wall_s: dict[str, list[float]],
    peak: dict[str, int],
) -> report.Metrics:
    reached, sheet = measured_bf16_flops(setting.device), peak_bf16_flops()
    metrics: dict[str, tuple[float, str]] = {"train_matmul_flops": (reached, "FLOP/s")}
    rows = []
    for side, seconds in wall_s.items():
        median = statistics.median(seconds)
        rate = flops.total / median
        of_sheet = rate / sheet if sheet else None
        metrics[f"train_{side}_tokens_per_s"] = (workload.num_tokens / median, "tokens/s")
        metrics[f"train_{side}_share_of_matmul"] = (rate / reached, "share")
        metrics[f"train_{side}_peak_bytes"] = (peak[side], "B")
        if of_sheet is not None:
            metrics[f"train_{side}_share_of_peak"] = (of_sheet, "share")
        rows.append(
            (
                side,
                workload.num_tokens / median,
                median,
                "-" if of_sheet is None else of_sheet,
                rate / reached,
                peak[side] / (1 << 30),
            )
        )
    if "handwritten" in wall_s:
        metrics["train_step_vs_handwritten"] = (ratio(wall_s, "engine", "handwritten"), "x")
    report.print_table(
        f"Training step in bfloat16, {workload.name}",
        {
            "rows": len(workload.lengths),
            "tokens": workload.num_tokens,
            "longest": max(workload.lengths),
            "micro-batch budget": workload.max_tokens,
            "attention's share of FLOPs": f"{flops.attention / flops.total:.3f}",
        },
        ("side", "tokens/s", "s a step", "of peak", "of a matmul", "peak GiB"),
        rows,
    )
    return metrics
