"""The learning rate of each training step."""

from __future__ import annotations

import math

from areal_sc.config.optimizer_settings import LrSchedule, OptimizerConfig
from areal_sc.errors import ConfigError


def check_schedule(config: OptimizerConfig) -> None:
    """Raises: ConfigError: the learning rate falls, and nothing says over how many steps."""
    if config.schedule != LrSchedule.constant and config.total_steps < 1:
        raise ConfigError(
            f"optimizer.total_steps: expected at least 1 with schedule={config.schedule}, "
            f"got {config.total_steps}"
        )


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Learning rate of training step `step`, counted from 0.

    It rises in equal steps to `lr` over the first `warmup_steps`, and then stays, or falls along
    a line or half a cosine to `lr * min_lr_ratio`, reached after `total_steps`. Steps count also
    where there was nothing to learn and no weight was changed.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps)
    progress = min(1.0, progress)
    if config.schedule == LrSchedule.linear:
        remaining = 1 - progress
    elif config.schedule == LrSchedule.cosine:
        remaining = (1 + math.cos(math.pi * progress)) / 2
    else:
        return config.lr
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining)
