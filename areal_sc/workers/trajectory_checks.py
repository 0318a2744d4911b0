"""What a workflow may return: the checks of an episode before it is sealed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from areal_sc.algorithms.reward_shaping import soft_length_penalty
from areal_sc.config.length_settings import CutAnswers, SoftLengthConfig
from areal_sc.config.schema import RolloutConfig
from areal_sc.metadata import MAX_RETURNS
from areal_sc.rejection import Rejection, RejectionKind
from areal_sc.rewards.scores import is_finite, problem_of_numbers
from areal_sc.sizing.store_room import field_bytes_of, trajectory_bytes
from areal_sc.token_fields import TRAJECTORY_FIELDS, Declared, aligned
from areal_sc.workflows.base import Trajectory
from areal_sc.workflows.trajectory import ACCURACY, STOPPED


def checked_episode(
    returned: Any,
    limits: RolloutConfig,
    declared: Declared,
    *,
    is_trained: bool,
    workflow: str = "the workflow",
) -> list[Trajectory] | Rejection:
    """The rows of an episode, with fields as arrays; why it is rejected if one cannot be used.

    Args:
        returned: what `run_episode` gave.
        limits: the store has room reserved for so many tokens.
        declared: `Workflow.fields`.
        is_trained: False: it is of an evaluation, which may be greedy.
        workflow: its name, for messages.
    """
    if returned is None:
        return Rejection(RejectionKind.rejected, "the workflow returned None")
    rows = list(returned) if isinstance(returned, list | tuple) else [returned]
    if not rows:
        return Rejection(RejectionKind.rejected, "the workflow returned no trajectory")
    for number, row in enumerate(rows, start=1):
        where = f"row {number} of {len(rows)}: " if len(rows) > 1 else ""
        problem = _problem(row, is_trained=is_trained)
        if not problem and (of_fields := _problem_of_fields(row, declared)):
            problem = f"{workflow}: {of_fields}"
        if problem:
            return Rejection(RejectionKind.workflow_error, where + problem)
        if len(row.input_ids) > limits.max_context_tokens:
            message = (
                f"the trajectory has {len(row.input_ids)} tokens, expected at most "
                f"rollout.max_context_tokens={limits.max_context_tokens}"
            )
            return Rejection(RejectionKind.too_long, where + message)
        for name, value in (("reward", row.reward), ("reward's shaping", row.shaping)):
            if not is_finite(value):
                message = f"the {name} must be finite, got {value!r}"
                return Rejection(RejectionKind.bad_reward, where + message)
    num_tokens = sum(len(row.input_ids) for row in rows)
    if num_tokens > limits.episode_tokens:
        return Rejection(
            RejectionKind.too_long,
            f"the episode's {len(rows)} rows have {num_tokens} tokens together, expected at most "
            f"{limits.episode_tokens}: raise rollout.max_episode_tokens",
        )
    of_rows = [name for name, field in declared.items() if field.per_row]
    num_bytes = sum(aligned(sum(row.fields[name].nbytes for row in rows)) for name in of_rows)
    sizes = field_bytes_of(declared)
    room = sizes.row + trajectory_bytes(limits.episode_tokens, sizes.token)
    room -= trajectory_bytes(num_tokens, sizes.token)
    if num_bytes > room:
        return Rejection(
            RejectionKind.too_long,
            f"{workflow}: the episode's {len(rows)} rows have {num_bytes} bytes in the fields "
            f"{of_rows}, expected at most {room} beside their {num_tokens} tokens: raise "
            "rollout.max_episode_tokens",
        )
    return rows


def shaped(rows: list[Trajectory], limits: RolloutConfig, *, is_trained: bool) -> list[Trajectory]:
    """Checked rows, once their rewards are known.

    Rows whose answer was cut count what `generation.cut_answers` says. Rows that are trained have
    what `rollout.soft_length` takes from their rewards.
    """
    cut_answers = limits.generation.cut_answers
    rows = [_cut(row, cut_answers) if row.metrics.get(STOPPED) == 0 else row for row in rows]
    is_limited = is_trained and limits.soft_length.limit_tokens > 0
    return [_with_soft_length(row, limits.soft_length) for row in rows] if is_limited else rows


def _cut(row: Trajectory, cut_answers: CutAnswers) -> Trajectory:
    """A row whose answer was cut, with what that counts."""
    if cut_answers.is_inaccurate and ACCURACY in row.metrics:
        row = replace(row, metrics={**row.metrics, ACCURACY: 0.0})
    if cut_answers is not CutAnswers.wrong:
        return row
    cost = min(row.shaping, 0.0)

    def at_most_0(value: float) -> float:
        return min(float(value) - row.shaping, 0.0) + cost

    returns = [(at_most_0(value), size) for value, size in row.returns]
    # the parts add up to what it was worth before, so it has none that count
    return replace(row, reward=at_most_0(row.reward), returns=returns, shaping=cost, weights={})


def _with_soft_length(row: Trajectory, limit: SoftLengthConfig) -> Trajectory:
    """With what its sampled tokens cost, which is also its metric `length_penalty`."""
    num_tokens = int(np.count_nonzero(row.loss_mask))
    cost = limit.penalty * soft_length_penalty(num_tokens, limit.limit_tokens, limit.margin_tokens)
    metrics = {**row.metrics, "length_penalty": cost}
    return replace(
        row,
        reward=float(row.reward) + cost,
        returns=[(value + cost, size) for value, size in row.returns],
        shaping=row.shaping + cost,
        metrics=metrics,
    )


def _problem(row: Any, *, is_trained: bool) -> str:
    """Why a row cannot be used; "" if it can, and its fields are arrays from now on."""
    if not isinstance(row, Trajectory):
        found = type(row).__name__
        return f"run_episode must return a Trajectory, a list of them, or None, got {found}"
    lengths = {name: len(getattr(row, name)) for name in TRAJECTORY_FIELDS}
    if len(set(lengths.values())) != 1:
        return f"the trajectory's fields differ in length: {lengths}"
    for name, dtype in TRAJECTORY_FIELDS.items():
        held = _held(_as_array(getattr(row, name), dtype), dtype)
        if held is None or held.ndim != 1:
            return f"the trajectory's {name} are not what {dtype} can hold: one would be changed"
        setattr(row, name, held)
    if not np.asarray(row.loss_mask).any():
        return "the trajectory has no trained token (loss_mask)"
    if is_trained and np.asarray(row.temperatures).min() <= 0:
        return (
            f"the trajectory has tokens of temperature {min(row.temperatures):g}, expected finite "
            "numbers above 0: a greedy answer (0) is no sample of the policy and cannot be "
            "trained; sample it, or add it to the transcript as context, which is not trained"
        )
    num_trained = int(np.count_nonzero(row.loss_mask))
    if not _are_returns(row.returns, num_trained):
        return (
            f"the trajectory's returns are {row.returns!r:.200}: expected finite ones, at most "
            f"{MAX_RETURNS}, each with its trained tokens, of which there are {num_trained}"
        )
    for name in ("answer", "vote"):
        said = getattr(row, name)
        if not _is_text(said) and not (name == "vote" and said is None):
            return f"the trajectory's {name} must be text that UTF-8 can hold, got {said!r:.200}"
    return problem_of_numbers("metric", row.metrics) or problem_of_numbers("weight", row.weights)


def _is_text(given: Any) -> bool:
    """Whether UTF-8 can hold it, as a lone half of a character cannot be held."""
    return isinstance(given, str) and not any("\ud800" <= it <= "\udfff" for it in given)


def _are_returns(given: Any, num_trained: int) -> bool:
    """Whether they are none, or finite ones of all trained tokens."""
    if not isinstance(given, list | tuple) or len(given) > MAX_RETURNS:
        return False
    for part in given:
        if not (isinstance(part, list | tuple) and len(part) == 2 and is_finite(part[0])):
            return False
        if not (isinstance(part[1], int | np.integer) and part[1] > 0):
            return False
    return not given or sum(size for _, size in given) == num_trained


def _as_array(values: Any, dtype: str) -> Any:
    """An array of a field; one that holds None if there is none."""
    errors = (TypeError, ValueError, OverflowError, RuntimeError)  # those of torch, too
    try:
        return np.asarray(values)
    except errors:
        if dtype != "float32":
            return np.array(None)
    try:  # numpy knows no bfloat16, and takes no tensor that requires a gradient
        return np.array([float(v.detach() if hasattr(v, "detach") else v) for v in values])
    except errors:
        return np.array(None)


def _problem_of_fields(row: Trajectory, declared: Declared) -> str:
    """Why the row's own fields cannot be used; "" if they can, and are arrays from now on."""
    if row.fields.keys() != declared.keys():
        return (
            f"the trajectory has the fields {sorted(row.fields)}, and Workflow.fields declares "
            f"{sorted(declared)}"
        )
    arrays = {}
    for name, field in declared.items():
        shape = field.shape_for(len(row.input_ids))
        try:
            values = np.asarray(row.fields[name])
        except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors of a GPU
            return f"field {name!r} is no array: {error}"
        if field.has_own_length and values.shape == (0,):  # an empty list does not tell of what
            values = values.reshape(0, *field.sizes)
        sizes = zip(values.shape, shape, strict=False)
        if values.ndim != len(shape) or any(size not in (its, None) for its, size in sizes):
            return f"field {name!r} has the shape {values.shape}, expected {shape}"
        held = _held(values, field.dtype)
        if held is None:
            return f"field {name!r} is not what {field.dtype} can hold: a value would be changed"
        if field.max_bytes and held.nbytes > field.max_bytes:
            return (
                f"field {name!r} has a value of {held.nbytes} bytes, expected at most "
                f"max_bytes={field.max_bytes}"
            )
        arrays[name] = held
    row.fields = arrays
    return ""


@np.errstate(over="ignore", invalid="ignore")  # what is too large for a type is seen below
def _held(values: Any, dtype: str) -> Any:
    """The values as an array of this dtype; None if it cannot hold them."""
    if values.dtype == dtype and values.dtype.kind in "bi":
        return values
    if values.size == 0:
        return values.astype(dtype)
    if np.dtype(dtype).kind == "f":
        if values.dtype.kind not in "fiub":
            return None
        held = values.astype(dtype)
        return held if np.isfinite(held).all() else None
    # nothing is rounded; true and false may also be told by the numbers 1 and 0
    if values.dtype.kind not in ("fiub" if dtype == "bool" else "iub"):
        return None
    held = values.astype(dtype)
    return held if (held == values).all() else None
