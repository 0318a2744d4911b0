"""What a workflow may return: the checks of an episode before it is sealed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from areal_sc.config.schema import RolloutConfig
from areal_sc.metadata import TRAJECTORY_FIELDS
from areal_sc.workflows.base import Trajectory


@dataclass(frozen=True)
class Rejection:
    """Why an episode is not trained: `cause` is a category that is counted."""

    cause: str
    message: str


def checked_episode(
    returned: Any, limits: RolloutConfig, *, is_trained: bool
) -> list[Trajectory] | Rejection:
    """The rows of an episode; why it is rejected if one of them cannot be used.

    Args:
        returned: what `run_episode` gave.
        limits: the store has room reserved for so many tokens.
        is_trained: False: it is of an evaluation, which may be greedy.
    """
    if returned is None:
        return Rejection("rejected", "the workflow returned None")
    rows = list(returned) if isinstance(returned, list | tuple) else [returned]
    if not rows:
        return Rejection("rejected", "the workflow returned no trajectory")
    for number, row in enumerate(rows, start=1):
        rejection = _check_trajectory(row, limits.max_context_tokens, is_trained=is_trained)
        if rejection:
            where = f"row {number} of {len(rows)}: " if len(rows) > 1 else ""
            return Rejection(rejection.cause, where + rejection.message)
    num_tokens = sum(len(row.input_ids) for row in rows)
    if num_tokens > limits.episode_tokens:
        return Rejection(
            "workflow_error",
            f"the episode's {len(rows)} rows have {num_tokens} tokens together, expected at most "
            f"{limits.episode_tokens}: raise rollout.max_episode_tokens",
        )
    return rows


def _check_trajectory(
    trajectory: Any, max_context_tokens: int, *, is_trained: bool
) -> Rejection | None:
    """Why the trajectory cannot be used, None when it can."""
    if not isinstance(trajectory, Trajectory):
        return Rejection(
            "workflow_error",
            "run_episode must return a Trajectory, a list of them, or None, "
            f"got {type(trajectory).__name__}",
        )
    lengths = {name: len(getattr(trajectory, name)) for name in TRAJECTORY_FIELDS}
    if len(set(lengths.values())) != 1:
        return Rejection("workflow_error", f"the trajectory's fields differ in length: {lengths}")
    num_tokens = len(trajectory.input_ids)
    if num_tokens > max_context_tokens:
        return Rejection(
            "workflow_error",
            f"the trajectory has {num_tokens} tokens, expected at most "
            f"rollout.max_context_tokens={max_context_tokens}",
        )
    if not any(trajectory.loss_mask):
        return Rejection("workflow_error", "the trajectory has no trained token (loss_mask)")
    if is_trained and not all(t > 0 and _is_finite(t) for t in trajectory.temperatures):
        return Rejection(
            "workflow_error",
            "the trajectory has tokens of temperature "
            f"{min(trajectory.temperatures):g}, expected finite numbers above 0: a greedy answer "
            "(0) is no sample of the policy and cannot be trained; sample it, or add it to the "
            "transcript as context, which is not trained",
        )
    if not _is_finite(trajectory.reward):
        return Rejection("reward_error", f"the reward must be finite, got {trajectory.reward!r}")
    for name, value in trajectory.metrics.items():
        if not _is_finite(value):
            return Rejection("workflow_error", f"metric {name!r} must be finite, got {value!r}")
    return None


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except TypeError:
        return False
