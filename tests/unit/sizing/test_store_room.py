"""The room that is reserved for a group against what a real store counts."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_sc.config.schema import RolloutConfig
from areal_sc.sizing.store_room import (
    describe_largest_group,
    live_row_bytes,
    max_group_bytes,
    trajectory_bytes,
)
from areal_sc.token_fields import TRAJECTORY_FIELDS
from areal_sc.transport.shards.layout import ShardLayout
from areal_sc.transport.shards.store import TensorStore
from areal_sc.transport.tensor_bytes import dtype_named


def trajectory_tensors(num_tokens: int) -> dict[str, torch.Tensor]:
    """The fields of a shard of trajectories that have so many tokens together."""
    return {
        name: torch.zeros(num_tokens, dtype=dtype_named(dtype))
        for name, dtype in TRAJECTORY_FIELDS.items()
    }


@st.composite
def groups(draw: st.DrawFn) -> tuple[RolloutConfig, list[list[int]]]:
    """Settings, and the lengths of the rows that one group may have: some may be rejected."""
    max_rows = draw(st.integers(1, 3))  # of an episode
    context = draw(st.integers(2, 200))
    rollout = RolloutConfig(
        group_size=draw(st.integers(1, 9)),
        max_context_tokens=context,
        max_episode_tokens=0 if max_rows == 1 else max_rows * context,
    )
    episode = st.lists(st.integers(1, context), min_size=1, max_size=max_rows)
    episodes = draw(st.lists(episode, min_size=1, max_size=rollout.group_size))
    return rollout, episodes


@settings(max_examples=300, derandomize=True)
@given(groups())
def test_no_group_takes_more_than_is_reserved(
    group: tuple[RolloutConfig, list[list[int]]],
) -> None:
    rollout, episodes = group
    group_bytes = 0
    for row_lengths in episodes:
        num_tokens = sum(row_lengths)
        layout = ShardLayout.of(trajectory_tensors(num_tokens), row_lengths)
        assert layout.num_bytes == trajectory_bytes(num_tokens)
        group_bytes += layout.num_bytes
    assert group_bytes <= max_group_bytes(rollout)


@settings(max_examples=50, derandomize=True)
@given(st.integers(1, 9), st.integers(2, 200))
def test_a_group_of_full_rows_fills_a_store_of_that_size(
    group_size: int, max_context_tokens: int
) -> None:
    rollout = RolloutConfig(group_size=group_size, max_context_tokens=max_context_tokens)
    num_bytes = max_group_bytes(rollout)
    store = TensorStore("rollout/0", "00", max_bytes=num_bytes)
    for _ in range(group_size):
        store.put(trajectory_tensors(max_context_tokens), [max_context_tokens])
    assert store.num_bytes == num_bytes


def test_the_padding_of_short_rows_counts() -> None:
    rollout = RolloutConfig(group_size=1, max_context_tokens=57)
    assert max_group_bytes(rollout) == 4 * 256 + 64  # not 57 * 17 = 969
    assert describe_largest_group(rollout) == (
        "a group takes up to 1088 bytes: rollout.group_size=1 episodes of "
        "rollout.max_context_tokens=57 tokens"
    )
    rollout = RolloutConfig(group_size=1, max_context_tokens=57, max_episode_tokens=114)
    assert max_group_bytes(rollout) == 4 * 512 + 128
    assert "=1 episodes of rollout.max_episode_tokens=114 tokens" in describe_largest_group(rollout)


def test_rows_of_a_run_without_a_bound_are_those_of_all_slots() -> None:
    rollout = RolloutConfig(
        max_staleness=None, max_running_sequences=20, group_size=8, train_batch_groups=5
    )
    assert live_row_bytes(rollout) == (5 * 2 + 3) * max_group_bytes(rollout)
    assert live_row_bytes(RolloutConfig(max_staleness=3)) == 5 * 32 * max_group_bytes(rollout)
