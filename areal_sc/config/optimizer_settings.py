"""The optimizer of a trained model, and its learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from areal_sc.config.fields import Section, apart, setting
from areal_sc.user_code import folder_of_module


class LrSchedule(StrEnum):
    """The learning rate's way from `lr` to its end at `total_steps`."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


ADAMW: Final = "adamw"


@dataclass
class OptimizerConfig(Section):
    """The learning rate is constant within a training step."""

    type: str = setting(ADAMW, "adamw, or package.module:Class, a torch.optim.Optimizer")
    lr: float = setting(1e-6, "highest learning rate", ge=0)
    beta1: float = setting(0.9, "decay of the gradient's mean", ge=0, lt=1)
    beta2: float = setting(0.999, "decay of the squared gradient's mean", ge=0, lt=1)
    eps: float = setting(1e-8, "added to the root of the squared gradient's mean", gt=0)
    weight_decay: float = setting(0.0, "AdamW's weight decay", ge=0)
    max_grad_norm: float = setting(1.0, "clips the gradient's norm; 0: no clipping", ge=0)
    schedule: LrSchedule = setting(LrSchedule.constant)
    warmup_steps: float = setting(
        0, "training steps from 0 to lr; below 1: a share of total_steps", ge=0
    )
    min_lr_ratio: float = setting(
        0.0, "where the schedule ends, as a share of lr", ge=0, le=1, idle=("schedule=constant",)
    )
    total_steps: int = apart(
        "${total_steps}",
        0,
        "training steps of the schedule",
        ge=1,
        idle=("schedule=constant and warmup_steps=0",),
    )

    def folder_of_own(self) -> str | None:
        """The folder that a process needs on `sys.path` for an optimizer of the user's own.

        Raises: ConfigError: there is no such module.
        """
        expected = f"{ADAMW} or package.module:Class"
        is_own = self.type != ADAMW
        return folder_of_module(self.type, "actor.optimizer.type", expected) if is_own else None

    @property
    def num_warmup_steps(self) -> int:
        """What `warmup_steps` comes to."""
        share = self.warmup_steps < 1
        return round(self.warmup_steps * self.total_steps if share else self.warmup_steps)
