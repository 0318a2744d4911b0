"""Whatever the user's code raises is a cause with its line; real cancellations stay real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from areal_sc import user_code as border
from areal_sc.errors import RewardError, WorkflowError
from areal_sc.rejection import Rejection, RejectionKind
from areal_sc.transport.rpc.codec import failure_of
from areal_sc.user_code import (
    EpisodeClock,
    Raised,
    await_user_code,
    describe,
    place_of,
    run_worker_loop,
    user_code,
)


class Outcome(BaseException):
    """As test runners and cancel scopes raise."""


class Nameless(Exception):
    def __str__(self) -> str:
        raise Outcome

    __repr__ = __str__


ERRORS = [
    Outcome("wrong"),
    SystemExit(2),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError(),
    RecursionError("too deep"),
    Nameless(),
    ExceptionGroup("several", [ValueError("inner")]),
]


def fail(error: BaseException) -> None:
    raise error


PLACE = f"test_user_code.py:{fail.__code__.co_firstlineno + 1}"


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_what_awaited_code_raises_is_its_own(error: BaseException) -> None:
    async def code() -> None:
        await asyncio.sleep(0)
        fail(error)

    with pytest.raises(Raised) as raised:
        await await_user_code(code, 60.0)
    assert raised.value.error is error
    assert not raised.value.is_late
    if not isinstance(error, ExceptionGroup):
        cause = f"workflow_error: {type(error).__name__} at {PLACE}"
        assert Rejection.of(error).cause == cause
    assert "of_prompt" not in Rejection.of(error).of_prompt(3, {"prompt": error}, "log").describe()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_what_code_raises_that_is_not_awaited_has_its_line(error: BaseException) -> None:
    with pytest.raises(WorkflowError) as raised, user_code("the loss"):
        fail(error)
    assert str(raised.value) == f"the loss raised {describe(error)} at {PLACE}"
    assert failure_of(error, "id").error_type == type(error).__name__


async def cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(60)


async def cancel_itself_and_return() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def await_what_was_given_up() -> None:
    call = asyncio.ensure_future(asyncio.sleep(60))
    call.cancel()
    await call


@pytest.mark.parametrize("code", [cancel_itself, cancel_itself_and_return, await_what_was_given_up])
async def test_who_cancels_itself_cancels_nobody_else(code: Callable[[], object]) -> None:
    with pytest.raises(Raised, match="CancelledError"):
        await await_user_code(code, 60.0)  # type: ignore[arg-type]


async def test_a_real_cancellation_reaches_the_code_and_goes_on() -> None:
    told = list[str]()

    async def code() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            told.append("cancelled")
            raise SystemExit from None  # what it makes of that is of no interest

    task = asyncio.create_task(await_user_code(code, 60.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert told == ["cancelled"]


async def test_code_that_swallows_its_cancellation_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(border, "CANCEL_GRACE_S", 0.01)
    is_over = asyncio.Event()

    async def code() -> None:
        while not is_over.is_set():
            try:
                await is_over.wait()
            except asyncio.CancelledError:
                continue

    with pytest.raises(Raised) as raised:
        await await_user_code(code, 0.01)
    assert raised.value.is_late
    is_over.set()


async def test_a_limit_stands_still_while_the_engine_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(border, "_ASLEEP_LOOK_S", 0.01)
    clock, is_asked = EpisodeClock(), asyncio.Event()

    async def code() -> None:
        is_asked.set()
        await asyncio.sleep(600)

    clock.stop()
    running = asyncio.create_task(await_user_code(code, 0.01, clock))
    await is_asked.wait()
    before_s = clock.now_s
    await asyncio.wait([running], timeout=0.1)
    assert not running.done()
    clock.stop()  # a repeat changes nothing
    assert clock.now_s == before_s
    clock.go_on()
    clock.go_on()
    with pytest.raises(Raised) as raised:
        await running
    assert raised.value.is_late
    assert clock.now_s - before_s >= 0.01


async def test_the_place_of_late_code_is_where_it_waited() -> None:
    async def tool() -> None:
        await asyncio.sleep(600)

    with pytest.raises(Raised) as late:
        await await_user_code(tool, 0.01)
    assert late.value.is_late
    place = f"test_user_code.py:{tool.__code__.co_firstlineno + 1}"
    assert border.place_of(late.value.error) == place


def test_a_reward_error_within_a_task_group_is_the_rewards() -> None:
    failed = RewardError("reward r: it is NaN", kind="bad_reward", place="task.py:3")
    group = ExceptionGroup("unhandled errors in a TaskGroup", [failed, ValueError()])
    assert Rejection.of(group).kind is RejectionKind.bad_reward


def test_tasks_of_the_user_do_not_end_a_workers_loop() -> None:
    told = list[str]()

    async def call(error: BaseException) -> None:
        await asyncio.sleep(0)
        raise error

    async def code() -> None:
        await asyncio.gather(call(SystemExit(3)), asyncio.sleep(60))

    async def serve() -> None:
        for error in (SystemExit(3), KeyboardInterrupt()):
            task = asyncio.ensure_future(call(error))
            await asyncio.wait([task])
            told.append(type(task.exception()).__name__)
        try:
            await await_user_code(code, 60.0)
        except Raised as raised:
            told.append(type(raised.error).__name__)

    run_worker_loop(serve())
    assert told == ["SystemExit", "KeyboardInterrupt", "SystemExit"]

    async def end() -> None:
        raise SystemExit(4)

    with pytest.raises(SystemExit):
        run_worker_loop(end())


async def test_a_coroutine_that_raises_stop_iteration_is_told_with_its_line() -> None:
    async def stops() -> None:
        raise StopIteration

    with pytest.raises(Raised) as raised:
        await await_user_code(stops)
    assert place_of(raised.value.error) == f"test_user_code.py:{stops.__code__.co_firstlineno + 1}"


def test_an_error_that_is_its_own_cause_has_an_end() -> None:
    one, other = ValueError("one"), KeyError("other")
    one.__cause__, other.__cause__ = other, one
    assert border.causes_of(one) == [one, other]
    assert border.blame(one) == "ValueError: one"
