"""Settings without effect, and settings that are allowed but seldom meant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from areal_sc.config.fields import value_at
from areal_sc.config.loading.presets import preset_warnings
from areal_sc.config.schema import GRPOConfig, RolloutEngine
from areal_sc.errors import ModelError
from areal_sc.preflight.idle_settings import ScriptFacts, idle_settings
from areal_sc.sizing.model_context import known_shape, num_parameters
from areal_sc.sizing.worker_plan import format_bytes

SMALL_MODEL_PARAMETERS = 1_000_000_000
"""The embedded engine is made for models below this size."""

_LARGE_SCORES = 1 << 30


def settings_warnings(config: GRPOConfig, facts: ScriptFacts) -> Iterator[str]:
    """A sentence for each, with the setting and its value."""
    yield from idle_settings(config, facts)
    yield from _step_warnings(config)
    yield from _attention_warnings(config)
    if not facts.generates:
        return
    yield from _stop_warnings(config)
    yield from _distribution_warnings(config)
    yield from preset_warnings(config)
    yield from _rank_warnings(config)
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


def _step_warnings(config: GRPOConfig) -> Iterator[str]:
    """Settings that take no effect in so few training steps."""
    optimizer, defaults = config.actor.optimizer, GRPOConfig()
    if 0 < optimizer.total_steps <= optimizer.warmup_steps:
        yield (
            f"actor.optimizer.warmup_steps={optimizer.warmup_steps} is not below "
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


def _attention_warnings(config: GRPOConfig) -> Iterator[str]:
    """A model whose attention keeps the scores of whole rows."""
    actor, shape = config.actor, None
    with suppress(ModelError):  # it is being written
        shape = known_shape(actor.path)
    limits = config.rollout.max_context_tokens, actor.max_tokens_per_micro_batch
    row_tokens = min(filter(None, limits))
    num_bytes = shape.layer.score_bytes(row_tokens) if shape and shape.layer else 0
    if num_bytes >= _LARGE_SCORES:
        yield (
            f"{actor.path} caps attention scores or has sinks, which no fused kernel computes: a "
            f"row of {row_tokens} tokens takes {format_bytes(num_bytes)} in each layer that is "
            "kept; actor.activation_checkpointing=layers keeps one, and shorter rows "
            "(rollout.max_context_tokens) take less"
        )


def _rank_warnings(config: GRPOConfig) -> Iterator[str]:
    rollout, ranks = config.rollout, config.actor.parallel.data
    rows = rollout.train_batch_groups * rollout.group_size // config.actor.ppo.num_minibatches
    if rows < ranks:
        yield (
            f"actor.parallel.data={ranks}: a minibatch has {rows} rows, so some ranks are idle "
            "in it"
        )
