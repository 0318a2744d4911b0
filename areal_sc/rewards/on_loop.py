"""Async rewards: on the worker's event loop, with a time limit. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from areal_sc.errors import NeverWorks, RewardError
from areal_sc.rejection import RejectionKind
from areal_sc.rewards.base import RUN_CODE, RunCode, Score, place_of_definition, runs_code
from areal_sc.rewards.process import failure_of
from areal_sc.rewards.scores import finite_score
from areal_sc.sources.values import from_wire
from areal_sc.user_code import Raised, await_user_code, last_frames, place_of


async def score_on_loop(
    reward: Callable[..., Any], name: str, arguments: Any, *, limit_s: float, run_code: RunCode
) -> Score:
    """The reward's number, and the parts that it gave.

    Args:
        arguments: `to_wire` of prompt, completion and further arguments: it gets its own.
        limit_s: of rewards that run no code.
    Raises: RewardError: it raised, returned no finite number, or passed its time limit. NeverWorks:
        it raised that.
    """
    prompt, completion, extra = from_wire(arguments)
    limited_s = limit_s
    if runs_code(reward):  # it waits for programs of others, and each has limits of its own
        extra[RUN_CODE], limited_s = run_code, math.inf

    async def call() -> Score:
        return finite_score(await reward(prompt, completion, **extra))

    try:
        return await await_user_code(call, limited_s)
    except Raised as raised:
        if isinstance(raised.error, NeverWorks):
            raise raised.error from None
        if raised.is_late:
            where = {"place": place_of(raised.error), "frames": last_frames(raised.error)}
            raise took_too_long(name, limit_s, **where) from raised.error
        what, details = failure_of(raised.error)
        raise RewardError(
            f"reward {name}: {what}", **{"place": place_of_definition(reward), **details}
        ) from raised.error


def took_too_long(name: str, limit_s: float, doing: str = "", **where: str) -> RewardError:
    """What a reward is rejected with that passes its limit."""
    return RewardError(
        f"reward {name}: {doing}took longer than {limit_s:g} s; make it faster, "
        "or raise rollout.reward_timeout_s",
        kind=RejectionKind.reward_timeout,
        **where,
    )
