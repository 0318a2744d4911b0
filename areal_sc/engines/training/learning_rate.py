"""The learning rate of each training step."""

from __future__ import annotations

import math

from areal_sc.config.optimizer_settings import LrSchedule, OptimizerConfig
from areal_sc.errors import ConfigError


def check_schedule(config: OptimizerConfig) -> None:
    """Raises: ConfigError: the learning rate changes, and nothing says over how many steps."""
    is_share = 0 < config.warmup_steps < 1
    if (config.schedule != LrSchedule.constant or is_share) and config.total_steps < 1:
        raise ConfigError(
            f"optimizer.total_steps: expected at least 1 with schedule={config.schedule} and "
            f"warmup_steps={config.warmup_steps:g}, got {config.total_steps}"
        )


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Learning rate of training step `step`, counted from 0.

    It rises in equal steps to `lr` over the first `num_warmup_steps`, and then stays, or falls
    along a line or half a cosine to `lr * min_lr_ratio`, reached after `total_steps`. Steps count
    also where there was nothing to learn and no weight was changed.
    """
    warmup = config.num_warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.total_steps - warmup)
    progress = min(1.0, progress)
    if config.schedule == LrSchedule.linear:
        remaining = 1 - progress
    elif config.schedule == LrSchedule.cosine:
        remaining = (1 + math.cos(math.pi * progress)) / 2
    else:
        return config.lr
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining)
