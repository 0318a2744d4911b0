from __future__ import annotations

import asyncio
import json

import pytest
from msgspec import msgpack

from areal_sc.errors import ConfigError, NeverWorks, RewardError, WorkflowError
from areal_sc.rejection import Rejection, RejectionKind, describe_counts, place_of
from areal_sc.rewards.process import failure_of
from areal_sc.user_code import Raised


def parse(text: str) -> object:
    return json.loads(text)  # this line is to blame, not the library's


PLACE = f"test_rejection.py:{parse.__code__.co_firstlineno + 1}"


def test_the_place_is_the_users_line_that_called_a_library() -> None:
    assert place_of(ValueError("never raised")) == ""
    with pytest.raises(ValueError, match="property name") as raised:
        parse("{")
    assert place_of(raised.value) == PLACE


def test_what_a_workflow_raises_is_counted_by_exception_and_place() -> None:
    with pytest.raises(ValueError, match="property name") as raised:
        parse("{")
    rejection = Rejection.of(raised.value)
    assert rejection.cause == f"workflow_error: JSONDecodeError at {PLACE}"
    assert "return json.loads(text)" in rejection.describe()
    assert Rejection.of(WorkflowError("no room")).cause == "prompt_error"
    dead = RewardError("it ended", kind=RejectionKind.reward_process_died, place="task.py:3")
    assert Rejection.of(dead).cause == "reward_process_died: task.py:3"


@pytest.mark.parametrize("error", [NeverWorks("no template"), ConfigError("no such setting")])
def test_what_would_be_the_same_in_every_episode_is_raised(error: Exception) -> None:
    for raised in (error, ExceptionGroup("of a task group", [error])):
        with pytest.raises(type(error), match=str(error)):
            Rejection.of_episode(Raised(raised), 60.0)
    assert Rejection.of_episode(Raised(WorkflowError("it")), 60.0).cause == "prompt_error"


class OfAUser(RewardError):
    def __init__(self) -> None:
        """Without the attributes of its base."""


def test_errors_of_this_package_that_a_user_raises_are_causes_too() -> None:
    other = Rejection.of(RewardError("no box", kind="format"))
    assert (other.kind, other.message) == (RejectionKind.reward_error, "no box")
    assert Rejection.of(OfAUser()).cause == "workflow_error: OfAUser"
    _, details = failure_of(OfAUser())
    assert (details["kind"], details["error_type"]) == ("reward_error", "OfAUser")


async def test_the_place_of_a_timeout_is_where_the_code_waited() -> None:
    async def tool() -> None:
        await asyncio.sleep(600)

    with pytest.raises(TimeoutError) as late:
        async with asyncio.timeout(0):
            await tool()
    assert late.value.__cause__ is not None
    assert place_of(late.value.__cause__) == f"test_rejection.py:{tool.__code__.co_firstlineno + 1}"


def test_a_rejection_travels_and_is_shown_whatever_was_sampled() -> None:
    rejection = Rejection(RejectionKind.bad_reward, "\x1b[2J and half a \ud83d, twice\nover")
    told = rejection.of_prompt(7, {"prompt": "x" * 500 + "\x07"}, "/run/logs/rollout-0.log")
    assert msgpack.decode(msgpack.encode(told), type=Rejection) == told
    text = told.describe()
    assert text.startswith("bad_reward: \\x1b[2J and half a \\ud83d, twice\nover; prompt 7: 'xxx")
    assert text.endswith("xxx...; more in /run/logs/rollout-0.log")
    assert len(text) < 300


def test_counts_are_named_by_their_size() -> None:
    assert describe_counts({}) == "none"
    assert describe_counts({"timeout": 1, "rejected": 9}) == "rejected x9, timeout x1"
