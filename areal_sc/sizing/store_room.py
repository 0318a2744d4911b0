"""How much room a group needs at most: settings are checked against it, admission reserves it."""

from __future__ import annotations

from areal_sc.config.schema import RolloutConfig
from areal_sc.token_fields import (
    FIELD_DTYPES,
    NO_FIELDS,
    TRAJECTORY_FIELDS,
    Declared,
    FieldBytes,
    aligned,
)


def field_bytes_of(fields: Declared) -> FieldBytes:
    """Most bytes of the fields that a workflow adds."""
    sizes = [(it, it.value_bytes) for it in fields.values()]
    return FieldBytes(
        sum(size for it, size in sizes if it.per_token),
        sum(aligned(size) for it, size in sizes if it.per_row),
        sum(aligned(size) for it, size in sizes if it.per_group),
    )


def trajectory_bytes(num_tokens: int, field_bytes: int = 0) -> int:
    """Most bytes of a sealed shard of trajectories that have so many tokens together.

    Args:
        field_bytes: a token, of the fields that workflows add; each of their columns has a dtype of
            one byte at least.
    """
    sizes = (FIELD_DTYPES[dtype] * num_tokens for dtype in TRAJECTORY_FIELDS.values())
    return sum(map(aligned, sizes)) + field_bytes * aligned(num_tokens)


def max_group_bytes(rollout: RolloutConfig, field_bytes: FieldBytes = NO_FIELDS) -> int:
    """What a store counts for a group all of whose episodes have as many tokens as they may.

    Each episode is a shard. It has one row of so many tokens, or more rows that leave room in the
    tokens for what they have beyond one.

    Args:
        field_bytes: of the fields that workflows add.
    """
    of_tokens = trajectory_bytes(rollout.episode_tokens, field_bytes.token)
    return rollout.group_size * (of_tokens + field_bytes.row) + field_bytes.group


def live_row_bytes(rollout: RolloutConfig) -> int:
    """Most bytes of rows in one store: eta + 1 admitted batches, and the one being trained.

    Without a bound these are groups for all slots in place of eta batches; more are admitted only
    where training is slower than generation, up to `rollout.store_bytes`.
    """
    slots = rollout.max_running_sequences * rollout.most_workers
    live_groups = 2 * rollout.train_batch_groups + (
        -(-slots // rollout.group_size)
        if rollout.max_staleness is None
        else rollout.max_staleness * rollout.train_batch_groups
    )
    share = -(-live_groups * max_group_bytes(rollout) // rollout.fewest_workers)
    return min(rollout.store_bytes or share, share)


def top_tokens_bytes(rollout: RolloutConfig, top_k: int) -> int:
    """Most bytes of a batch's most probable tokens of a teacher: a number and a log-probability of
    each, at each token of the rows."""
    num_tokens = rollout.train_batch_groups * rollout.group_size * rollout.episode_tokens
    return num_tokens * top_k * (FIELD_DTYPES["int32"] + FIELD_DTYPES["float32"])


def describe_largest_group(rollout: RolloutConfig, field_bytes: FieldBytes = NO_FIELDS) -> str:
    """`max_group_bytes` and the settings that it comes from, for messages."""
    key = "max_episode_tokens" if rollout.max_episode_tokens else "max_context_tokens"
    return (
        f"a group takes up to {max_group_bytes(rollout, field_bytes)} bytes: "
        f"rollout.group_size={rollout.group_size} episodes of "
        f"rollout.{key}={rollout.episode_tokens} tokens"
    )
