"""Whether the settings of evaluations can be what is meant."""

from __future__ import annotations

import math
from collections import Counter

from areal_sc.config.fields import check_ranges
from areal_sc.config.follow_settings import EvaluationSetConfig
from areal_sc.config.schema import GRPOConfig
from areal_sc.errors import ConfigError


def check_evaluation(config: GRPOConfig) -> None:
    """Checks the sets, and what evaluations decide of.

    Raises: ConfigError: names the setting, its value, and what is allowed.
    """
    evaluation = config.evaluation
    for number, one in enumerate(evaluation.sets, start=1):
        where = f"evaluation.sets, {one.name or f'number {number}'}"
        try:
            check_ranges(one)
            _check_set(one)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    names = Counter(one.name for one in evaluation.sets)
    for name, count in names.items():
        if count > 1:
            raise ConfigError(f"evaluation.sets: expected different names, got {name!r} twice")
    if evaluation.stop_after and not (config.checkpoint.keep_best and evaluation.every_steps):
        raise ConfigError(
            f"evaluation.stop_after={evaluation.stop_after}: expected checkpoint.keep_best, the "
            "number that is to get better, and evaluation.every_steps above 0"
        )


def _check_set(one: EvaluationSetConfig) -> None:
    if not one.name or "/" in one.name:
        raise ConfigError(f"name: expected one without '/', got {one.name!r}")
    if not one.prompts:
        raise ConfigError("prompts: expected a file, or a name of the hub, got an empty one")
    temperature = one.temperature
    if temperature is not None and not (temperature >= 0 and math.isfinite(temperature)):
        raise ConfigError(
            f"temperature: expected a finite number at least 0, or null, got {temperature:g}"
        )
    if temperature == 0 and one.num_samples > 1:
        raise ConfigError(
            f"num_samples: expected 1 with temperature 0, at which all answers to a prompt are the "
            f"same, got {one.num_samples}"
        )
