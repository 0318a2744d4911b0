"""Rows and returns of the calls of a session. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Final

from areal_sc.agents.session_call import SessionCall
from areal_sc.errors import WorkflowError
from areal_sc.metadata import MAX_RETURNS
from areal_sc.workflows.chat_turn import TurnNode, paths_of, transcript_of
from areal_sc.workflows.trajectory import Trajectory


class AgentRows(StrEnum):
    """What becomes a row.

    merge: each way from the first call of a conversation to its last one; an answer that stands in
        several is trained in one, and is context in the others.
    per_call: each call by itself, with what the model read as context.
    longest: the one way with the most tokens; the others are not trained.
    """

    merge = "merge"
    per_call = "per_call"
    longest = "longest"


_WORD_BEFORE_ID: Final = re.compile("^.*[-_]")

Rewards = float | Mapping[str, float]
"""One number for an episode; or one by the id of an answer, or by the model that calls named."""


def returns_of(
    calls: Sequence[SessionCall], reward: Rewards, discount: float
) -> dict[TurnNode, float]:
    """What each answered call is rewarded with: R_k = r_k + discount * R_(k+1), in their order.

    A number is the reward of the last call. One by the model's name is that of the last call which
    named it, and goes back over those calls alone; calls of other names then have no return. By
    answer, calls without one have 0.

    Raises: WorkflowError: there is no reward, or a name is neither an answer's nor a model's.
    """
    if not isinstance(reward, Mapping):
        return _discounted(calls, {calls[-1].answer_id: reward} if calls else {}, discount)
    if not reward:
        raise WorkflowError("rewards: expected a number, or one for each model or answer, got {}")
    # clients show an id behind a word of their dialect: chatcmpl-ID, resp_ID
    by_id = {_WORD_BEFORE_ID.sub("", name): value for name, value in reward.items()}
    if by_id.keys() <= {call.answer_id for call in calls}:
        return _discounted(calls, by_id, discount)
    roles = {call.model for call in calls}
    if unknown := reward.keys() - roles:
        raise WorkflowError(
            f"rewards: expected names of models ({', '.join(sorted(roles)) or 'no call was made'})"
            f" or ids of answers that were delivered, all of one kind, got {sorted(unknown)!r:.200}"
        )
    found = dict[TurnNode, float]()
    for role, value in reward.items():
        own = [call for call in calls if call.model == role]
        found |= _discounted(own, {own[-1].answer_id: value}, discount)
    return found


def _discounted(
    calls: Sequence[SessionCall], rewards: Mapping[str, float], discount: float
) -> dict[TurnNode, float]:
    found = dict[TurnNode, float]()
    later: float | None = None
    for call in reversed(calls):
        own = rewards.get(call.answer_id)
        if later is None or (own is None and discount == 1):
            value = later if own is None else own  # as it was given: a `Score` has parts
        else:
            value = (own or 0.0) + discount * later
        later = found[call.answered] = 0.0 if value is None else value
    return found


def rows_of(
    nodes: Sequence[TurnNode],
    returns: Mapping[TurnNode, float],
    kind: AgentRows,
    metrics: Mapping[str, float],
) -> list[Trajectory]:
    """Each answer that has a return is trained in one row (of `longest`: at most).

    A way with more than `MAX_RETURNS` answers of different returns is several rows.

    Args:
        nodes: of all calls, in their order.
    """
    paths = [node.path for node in nodes] if kind is AgentRows.per_call else paths_of(nodes)
    if kind is AgentRows.longest:
        paths = [max(paths, key=lambda path: len(path[-1].input_ids))] if paths else []
    left = {node for node in nodes if node in returns and node.completion.token_ids}
    are_equal = len({returns[node] for node in left}) <= 1
    rows = list[Trajectory]()
    for path in paths:
        new = path[-1:] if kind is AgentRows.per_call else path
        places = [place for place, node in enumerate(path) if node in left and node in new]
        left -= {path[place] for place in places}
        most = max(1, len(places)) if are_equal else MAX_RETURNS
        for first in range(0, len(places), most):
            trained = [path[place] for place in places[first : first + most]]
            row = transcript_of(path[: places[first : first + most][-1] + 1], trained)
            its = [returns[node] for node in trained]
            made = row.trajectory(its[-1] if are_equal or len(its) == 1 else its, metrics)
            rows.append(replace(made, pictures=row.pictures))
    return rows
