"""Whether what generates can do it as it is set: engine, stores, and how it shares GPUs."""

from __future__ import annotations

from collections.abc import Callable

from areal_sc.config.fields import value_at
from areal_sc.config.parallel_settings import Placement
from areal_sc.config.schema import GRPOConfig
from areal_sc.engines.handle_base import FLOAT32_BYTES
from areal_sc.engines.handles import make_generator
from areal_sc.errors import ConfigError
from areal_sc.preflight.placement import check_turns
from areal_sc.preflight.plan import plan_ranks
from areal_sc.sizing.store_room import describe_largest_group, max_group_bytes
from areal_sc.sources.prompt_choice import PromptChoice
from areal_sc.token_fields import MADE_FIELDS


def check_generation(config: GRPOConfig, count_devices: Callable[[], int]) -> None:
    """Checks the engine, the choice of prompts, and what the stores have room for.

    Args:
        count_devices: CUDA devices of this machine; asked only when it matters.
    Raises: ConfigError: names the setting, its value, and what is allowed.
    """
    _check_store_of_ranks(config)
    _check_stores(config)
    PromptChoice(config.rollout.choose_prompts, config.rollout.seed)  # raises where there is none
    generator = make_generator(config.rollout)
    generator.check(config)
    if config.rollout.placement is Placement.turns:
        check_turns(config, count_devices)
    elif config.rollout.autoscale.max:
        generator.check_scaling()


def _check_store_of_ranks(config: GRPOConfig) -> None:
    """A limit that is set leaves room for weights, and for what is computed of a batch."""
    limit, rollout = config.actor.store_bytes, config.rollout
    if not limit:
        return
    num_tokens = rollout.train_batch_groups * rollout.group_size * rollout.episode_tokens
    of_rows = len(MADE_FIELDS) * FLOAT32_BYTES * num_tokens
    least = max(rank.store_bytes for rank in plan_ranks(config.actor)) + of_rows
    if limit < least:
        raise ConfigError(
            f"actor.store_bytes: expected 0, which sets no limit, or at least {least} (a rank's "
            "share of two versions of the weights, as one is sealed while the one before is still "
            "read; with weight_update.whole_every_steps above 1 of three, for what has changed; "
            f"and {of_rows} for what is computed of a batch), got {limit}"
        )


def _check_stores(config: GRPOConfig) -> None:
    """Each limit leaves room for the groups of a batch that may lie there, each as a whole."""
    rollout = config.rollout
    num_groups = {
        "store_bytes": -(-rollout.train_batch_groups // rollout.fewest_workers),
        "node_store_bytes": rollout.train_batch_groups,  # all workers are on one node
    }
    for name, count in num_groups.items():
        limit, least = value_at(rollout, name), count * max_group_bytes(rollout)
        if 0 < limit < least:
            raise ConfigError(
                f"rollout.{name}: expected at least {least} (room for {count} of the "
                f"rollout.train_batch_groups={rollout.train_batch_groups} groups of a batch; "
                f"{describe_largest_group(rollout)}), got {limit}; give more room, or set smaller "
                "batches, or a smaller rollout.max_context_tokens"
            )
