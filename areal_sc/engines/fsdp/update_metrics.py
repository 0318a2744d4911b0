"""What an update reports: sums over micro-batches and ranks, turned into means at the end."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from areal_sc.engines.fsdp.process_group import ProcessGroup

# sums of the losses -> the mean over effective tokens that they are reported as
_MEAN_NAMES = {
    "num_clipped": "clip_fraction",
    "num_capped": "capped_fraction",
    "sum_ratio": "ratio",
    "sum_behavior_weight": "behavior_weight",
    "sum_abs_advantage": "abs_advantage",
    "sum_proximal_kl": "proximal_kl",
    "sum_behavior_kl": "behavior_kl",
    "sum_logprob": "logprob",
    "sum_entropy": "entropy",
}


@dataclass
class UpdateMetrics:
    """Collects over the updates of one call.

    Attributes:
        sums: this rank's metric sums and loss, on the device, without gradient.
        gradient_norms: global norm of each update, before clipping; finite ones.
        num_updates: updates made.
        num_skipped: updates left out, as the gradient norm was not finite.
        num_micro_batches: of each rank.
    """

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    gradient_norms: list[float] = field(default_factory=list)
    num_updates: int = 0
    num_skipped: int = 0
    num_micro_batches: int = 0

    def add(self, **values: torch.Tensor) -> None:
        for name, value in values.items():
            detached = value.detach()
            self.sums[name] = self.sums[name] + detached if name in self.sums else detached

    def add_update(self, gradient_norm: float, num_micro_batches: int) -> None:
        """Counts an update; one with a norm that is not finite was skipped."""
        self.num_micro_batches += num_micro_batches
        if math.isfinite(gradient_norm):
            self.num_updates += 1
            self.gradient_norms.append(gradient_norm)
        else:
            self.num_skipped += 1

    def summary(
        self, group: ProcessGroup, *, num_tokens: int, num_loss_tokens: int, lr: float
    ) -> dict[str, float]:
        """The same numbers on every rank.

        Args:
            num_tokens: tokens of this rank's rows, trained or not.
            num_loss_tokens: trained tokens of all ranks.
            lr: learning rate of the step.
        Returns: `loss` and `grad_norm`, means over the updates; means over the effective tokens:
            `entropy`, and for PPO `clip_fraction`, `capped_fraction`, `ratio`,
            `behavior_weight`, `abs_advantage`, `proximal_kl`, `behavior_kl`, for SFT `logprob`;
            `lr`; and `num_tokens`, `num_loss_tokens`, `num_effective_tokens`, `num_updates`,
            `num_skipped_updates`, `num_micro_batches` (of each rank). Effective tokens are trained
            ones that go through the model: not those of rows of advantage 0. Without any, the
            means over them are NaN.
        """
        names = sorted(self.sums)
        local = torch.tensor(
            [*(float(self.sums[name]) for name in names), num_tokens], dtype=torch.float64
        )
        *totals, all_tokens = group.sum(local).tolist()
        total = dict(zip(names, totals, strict=True))
        num_effective = total.get("num_tokens", 0.0)
        summary = {
            "loss": total.get("loss", 0.0) / max(1, self.num_updates + self.num_skipped),
            "grad_norm": sum(self.gradient_norms) / max(1, self.num_updates),
            "lr": lr,
            "num_tokens": all_tokens,
            "num_loss_tokens": float(num_loss_tokens),
            "num_effective_tokens": num_effective,
            "num_updates": float(self.num_updates),
            "num_skipped_updates": float(self.num_skipped),
            "num_micro_batches": float(self.num_micro_batches),
        }
        for sum_name, mean_name in _MEAN_NAMES.items():
            if sum_name in total:
                summary[mean_name] = total[sum_name] / num_effective if num_effective else math.nan
        return summary
