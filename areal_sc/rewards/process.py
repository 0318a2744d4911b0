"""What runs inside a reward process: load the user's function, call it, say what came of it.

Requests are lists in JSON, one a line, on a stream socket; replies are signed, see `Replies`:

    ["load", number, key, reference]   -> ["loaded", number] | ["failed", number, what, details]
    ["call", number, key, arguments]   -> ["value", number, reward] | ["failed", ...]
    ["vote", number, key, completion]  -> ["value", number, text or None] | ["failed", ...]

where the number is that of the call, the arguments are `values.to_wire([prompt, completion,
extra])`, and the details are the attributes of a RewardError; and at the start one ["ready",
process id, layer, why no stronger one], or ["unfit", why it cannot be as narrow as it is declared].
Before an answer there may be ["warned", text]: what the user's code has logged. The process ends
with the connection, or by SIGKILL.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_sc.errors import RewardError, WorkflowError
from areal_sc.log import setup_logging, take_warnings
from areal_sc.rejection import RejectionKind, kind_of
from areal_sc.rewards.base import DECLARATION, VOTE, RewardDeclaration
from areal_sc.sources.reference import ObjectReference, resolve
from areal_sc.sources.values import from_wire
from areal_sc.system.process import bury_left
from areal_sc.system.replies import Replies
from areal_sc.system.sandbox.own_code import begin_apart
from areal_sc.user_code import (
    MAX_TEXT_CHARS,
    describe,
    first_of,
    last_frames,
    place_of,
    text_of,
)

_REQUESTS_A_BURIAL = 2048
"""A reward may leave processes at each call; to look for them takes milliseconds."""


def finite_reward(value: Any) -> float:
    """`value` as a float: a Python, numpy or one-element torch number.

    Raises: RewardError: it is no number, or NaN or infinite.
    """
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise RewardError(
            "the reward function returned an awaitable: declare it with `async def`, "
            "or return a number",
            kind=RejectionKind.bad_reward,
        )
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise RewardError(
            f"the reward function returned {type(value).__name__} {text_of(value)[:80]!r}: "
            "expected a finite number",
            kind=RejectionKind.bad_reward,
        )
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(
            f"the reward function returned {number}: expected a finite number",
            kind=RejectionKind.bad_reward,
        )
    return number


def failure_of(error: BaseException) -> tuple[str, dict[str, str]]:
    """The message and the attributes of the RewardError for a reward that raised this."""
    error = first_of(error)
    if type(error) is RewardError:
        return text_of(error)[:MAX_TEXT_CHARS], {"kind": kind_of(error).value}
    raised = error
    if isinstance(error, WorkflowError) and error.__cause__ is not None:
        raised = error.__cause__  # by the user's module, while it was imported
    return describe(error), {
        "kind": RejectionKind.reward_error.value,
        "error_type": type(raised).__name__,
        "place": place_of(raised),
        "frames": last_frames(raised),
    }


def run_reward_process(spec: dict[str, Any]) -> int:
    """Entry point. Returns at the end of file of the socket to the pool.

    Args:
        spec: what `begin_apart` takes.
    """
    sources = Path(spec["sources"])
    rewards: dict[int, Callable[..., Any]] = {}
    setup_logging("reward")
    connection = begin_apart(spec)
    if connection is None:
        return 0
    replies = Replies(connection)
    with connection, connection.makefile("rb") as lines:
        left: set[int] = set()
        for count, line in enumerate(lines, start=1):
            kind, number, key, given = json.loads(line)
            told, *rest = _answer(kind, key, given, rewards, sources)
            replies.end_if_forked()
            for text in take_warnings():
                replies.send("warned", text)
            replies.send(told, number, *rest)
            if count % _REQUESTS_A_BURIAL == 0:
                left = bury_left(left)
    return 0


def _answer(
    kind: str, key: int, given: Any, rewards: dict[int, Callable[..., Any]], sources: Path
) -> list[Any]:
    """What comes of a request; the number of its call is still missing."""
    try:
        if kind == "load":
            rewards[key] = resolve(ObjectReference.from_wire(given), sources)
            declaration: RewardDeclaration | None = getattr(rewards[key], DECLARATION, None)
            if declaration is not None and declaration.prepare is not None:
                declaration.prepare()
            return ["loaded"]
        if kind == VOTE:
            vote = getattr(rewards[key], VOTE)(given)
            return ["value", None if vote is None else str(vote)]
        prompt, completion, extra = from_wire(given)
        return ["value", finite_reward(rewards[key](prompt, completion, **extra))]
    except BaseException as error:  # the user's code: whatever it raises is its answer
        return ["failed", *failure_of(error)]
