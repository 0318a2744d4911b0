"""Settings without effect, and settings that are allowed but seldom meant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from areal_sc.config.fields import value_at
from areal_sc.config.loading.presets import preset_warnings
from areal_sc.config.ppo_settings import KLEstimator
from areal_sc.config.schema import GRPOConfig, RolloutEngine
from areal_sc.errors import ModelError
from areal_sc.preflight.idle_settings import ScriptFacts, idle_settings
from areal_sc.sizing.model_context import num_parameters

SMALL_MODEL_PARAMETERS = 1_000_000_000
"""The embedded engine is made for models below this size."""


def settings_warnings(config: GRPOConfig, facts: ScriptFacts) -> Iterator[str]:
    """A sentence for each, with the setting and its value."""
    yield from idle_settings(config, facts)
    yield from _step_warnings(config)
    if not facts.generates:
        return
    yield from _stop_warnings(config)
    yield from _distribution_warnings(config)
    yield from _estimator_warnings(config)
    yield from preset_warnings(config)
    yield from _engine_warnings(config)


def _distribution_warnings(config: GRPOConfig) -> Iterator[str]:
    """Settings by which the trained distribution is not the one that was sampled from."""
    generation = config.generation
    cuts = {"top_p": generation.top_p < 1, "top_k": generation.top_k > 0}
    names = [f"generation.{name}={value_at(generation, name)}" for name in cuts if cuts[name]]
    if names:
        yield (
            f"{' and '.join(names)}: the sampled distribution is cut, and the trainer's is over "
            "the whole vocabulary, since it is not told which tokens were kept. So behavior_kl and "
            "mismatch also measure what was cut off; pi / pi_behav is smaller by the share that "
            "was kept, and with actor.ppo.clip_center=behavior more tokens are clipped; a token "
            "that is always cut off is never tried"
        )


def _stop_warnings(config: GRPOConfig) -> Iterator[str]:
    """Strings that a command line has spelled otherwise than they are meant."""
    for stop in config.generation.stop:
        if "\\n" in stop:
            yield (
                f"generation.stop: {stop} holds a backslash and an n, not the end of a line: set "
                'it in a YAML file, as "\\n"'
            )


def _estimator_warnings(config: GRPOConfig) -> Iterator[str]:
    """An estimator that is no penalty where it stands."""
    ppo = config.actor.ppo
    if ppo.reward_kl_coefficient and ppo.kl_estimator is not KLEstimator.k1:
        yield (
            f"actor.ppo.kl_estimator={ppo.kl_estimator} with actor.ppo.kl_place=reward: near the "
            "reference such a reward has almost no gradient; that of k1 is the gradient of the KL"
        )


def _step_warnings(config: GRPOConfig) -> Iterator[str]:
    """Settings that take no effect in so few training steps."""
    optimizer, defaults = config.actor.optimizer, GRPOConfig()
    if 0 < optimizer.total_steps <= optimizer.num_warmup_steps:
        yield (
            f"actor.optimizer.warmup_steps={optimizer.warmup_steps:g} is not below "
            f"actor.optimizer.total_steps={optimizer.total_steps}: lr is never reached"
        )
    for section in ("evaluation", "checkpoint"):
        every = value_at(config, f"{section}.every_steps")
        is_default = every == value_at(defaults, f"{section}.every_steps")
        if every > config.total_steps and not is_default:
            yield (
                f"{section}.every_steps={every} has no effect with total_steps={config.total_steps}"
            )


def _engine_warnings(config: GRPOConfig) -> Iterator[str]:
    """A model that the embedded engine takes, and is not made for."""
    rollout, number = config.rollout, 0
    if rollout.engine == RolloutEngine.local:
        with suppress(ModelError):  # it is being written
            number = num_parameters(rollout)
    if number > SMALL_MODEL_PARAMETERS:
        yield (
            f"rollout.engine=local is made for small models, and {rollout.path} has "
            f"{number / 1e9:.1f} billion parameters: sglang or vllm generate far faster"
        )
