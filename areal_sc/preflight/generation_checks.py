"""Whether what generates can do it as it is set: engine, stores, and how it shares GPUs."""

from __future__ import annotations

from collections.abc import Callable

from areal_sc.config.fields import value_at
from areal_sc.config.parallel_settings import Placement
from areal_sc.config.schema import GRPOConfig
from areal_sc.engines.handles import make_generator
from areal_sc.errors import ConfigError
from areal_sc.preflight.placement import check_turns
from areal_sc.sizing.store_room import describe_largest_group, max_group_bytes
from areal_sc.sources.prompt_choice import PromptChoice


def check_generation(config: GRPOConfig, count_devices: Callable[[], int]) -> None:
    """Checks the engine, the choice of prompts, and what the stores have room for.

    Args:
        count_devices: CUDA devices of this machine; asked only when it matters.
    Raises: ConfigError: names the setting, its value, and what is allowed.
    """
    _check_store(config)
    PromptChoice(config.rollout.choose_prompts, config.rollout.seed)  # raises where there is none
    generator = make_generator(config.rollout)
    generator.check(config)
    if config.rollout.placement is Placement.turns:
        check_turns(config, count_devices)
    elif config.rollout.autoscale.max:
        generator.check_scaling()


def _check_store(config: GRPOConfig) -> None:
    """Each limit leaves room for the groups of a batch that may lie there, each as a whole."""
    rollout = config.rollout
    num_groups = {
        "store_bytes": -(-rollout.train_batch_groups // rollout.fewest_workers),
        "node_store_bytes": rollout.train_batch_groups,  # all workers are on one node
    }
    for name, count in num_groups.items():
        limit, least = value_at(rollout, name), count * max_group_bytes(rollout)
        if limit < least and (limit or name == "store_bytes"):
            raise ConfigError(
                f"rollout.{name}: expected at least {least} (room for {count} of the "
                f"rollout.train_batch_groups={rollout.train_batch_groups} groups of a batch; "
                f"{describe_largest_group(rollout)}), got {limit}; give more room, or set smaller "
                "batches, or a smaller rollout.max_context_tokens"
            )
