"""The first Ctrl-C is a wish, the second one an order."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from functools import partial
from types import FrameType

import pytest

from areal_sc.fleet.worker_life import Wished
from areal_sc.nodes.spec import Wish
from areal_sc.system import interrupts
from areal_sc.system.process import SNAPSHOT_SIGNALS, STOP_SIGNALS, name_of_stop
from areal_sc.trainer.failure import Terminated
from areal_sc.trainer.stopping import StopWish, stop_wishes

LIMIT_S = 60.0


def steps(told: list[str], limit_s: float) -> Generator[StopWish, None, None]:
    """As a `Run` gives them; endless without a wish."""
    with stop_wishes(limit_s, told.append) as wish:
        while wish.asked_by is None:
            yield wish
        raise Terminated(wish.asked_by)


def train(
    step: Callable[[], None],
    told: list[str] | None = None,
    *,
    limit_s: float = LIMIT_S,
    is_left: bool = False,
) -> None:
    """A loop of steps, closed as `Run.training` does; it may be left after the first one."""
    with closing(steps([] if told is None else told, limit_s)) as loop:
        for _ in loop:
            step()
            if is_left:
                break


@contextmanager
def answered(
    handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals
) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, its in before.items():
            signal.signal(number, its)


def raise_terminated(number: int, frame: FrameType | None) -> None:
    """As the handler of `run_script` does."""
    raise Terminated(signal.Signals(number))


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("asked_by", STOP_SIGNALS)
def test_the_first_one_is_told_and_ends_the_loop_after_the_step(asked_by: signal.Signals) -> None:
    def step() -> None:
        signal.raise_signal(asked_by)
        done.append("the step")

    told: list[str] = []
    done: list[str] = []
    with answered(raise_terminated, *STOP_SIGNALS[1:]):
        with pytest.raises(Terminated) as ended:
            train(step, told)
        assert signal.getsignal(signal.SIGTERM) is raise_terminated
    assert (done, told) == (["the step"], [name_of_stop(asked_by)])
    assert ended.value.exit_code == 128 + asked_by
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_a_cluster_tells_agents_and_script_is_one_wish() -> None:
    told: list[str] = []
    with answered(raise_terminated, signal.SIGTERM):
        loop = steps(told, LIMIT_S)
        wish = next(loop)
        for _ in range(3):  # an agent each
            wish.hear(Wished(Wish.leave))
        signal.raise_signal(signal.SIGTERM)
        assert wish.takes_snapshot()
        with pytest.raises(Terminated):
            next(loop)
    assert told == ["SIGTERM"]


def test_a_snapshot_is_taken_once_and_the_loop_goes_on() -> None:
    with (
        answered(lambda *_: None, *SNAPSHOT_SIGNALS),
        closing(steps([], LIMIT_S)) as loop,
    ):
        wish = next(loop)
        assert not wish.takes_snapshot()
        for wished in (
            partial(wish.hear, Wished(Wish.snapshot)),
            *(partial(signal.raise_signal, number) for number in SNAPSHOT_SIGNALS),
        ):
            wished()
            assert wish.takes_snapshot()
            assert not wish.takes_snapshot()
            next(loop)


@pytest.mark.parametrize(
    "sent",
    [
        [signal.SIGHUP, signal.SIGHUP, signal.SIGHUP],  # of the kernel, and of the shell
        [signal.SIGHUP, signal.SIGTERM],
        [signal.SIGTERM, signal.SIGHUP],  # of systemd, for a session that ends
        [signal.SIGHUP, signal.SIGTERM, signal.SIGHUP],
    ],
)
def test_all_that_tells_of_a_closed_terminal_is_one_wish(sent: list[signal.Signals]) -> None:
    def step() -> None:
        for number in sent:
            signal.raise_signal(number)
        done.append("the step")

    done: list[str] = []
    told: list[str] = []
    with answered(raise_terminated, *STOP_SIGNALS[1:]), pytest.raises(Terminated) as ended:
        train(step, told)
    assert (done, told, ended.value.stopped_by) == (["the step"], [sent[0].name], sent[0])


def test_a_closed_terminal_does_not_hold_up_who_wants_the_end_now() -> None:
    def step() -> None:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        raise AssertionError("it went on")

    with answered(raise_terminated, *STOP_SIGNALS[1:]), pytest.raises(Terminated):
        train(step)


def test_the_second_one_stops_at_once() -> None:
    def step() -> None:
        press_ctrl_c()
        press_ctrl_c()
        raise AssertionError("it went on")

    with pytest.raises(KeyboardInterrupt) as ended:
        train(step)
    assert not isinstance(ended.value, Terminated)


@pytest.mark.parametrize("asked_by", [signal.SIGINT, signal.SIGHUP])
def test_a_step_that_takes_too_long_is_stopped(asked_by: signal.Signals) -> None:
    def step() -> None:
        signal.raise_signal(asked_by)
        time.sleep(LIMIT_S)
        raise AssertionError("it went on")

    with answered(raise_terminated, signal.SIGHUP), pytest.raises(KeyboardInterrupt):
        train(step, limit_s=0.1)


def test_a_wish_that_the_loop_does_not_see_takes_effect_behind_it() -> None:
    with pytest.raises(KeyboardInterrupt):
        train(press_ctrl_c, is_left=True)


def test_an_error_of_the_step_is_not_hidden_by_a_wish() -> None:
    def step() -> None:
        press_ctrl_c()
        raise LookupError("of the step")

    with pytest.raises(LookupError):
        train(step)


def test_without_a_limit_nothing_is_noted() -> None:
    with stop_wishes(0.0, lambda asked_by: None):
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("ends_by", ["the step", "the second request", "the clock"])
def test_a_run_in_another_thread_hears_requests_to_stop(ends_by: str) -> None:
    """As it hears Ctrl-C in the main thread, which is left alone."""
    done: list[str] = []

    def step() -> None:
        interrupts.ask_to_stop(f"first, {ends_by}")
        if ends_by == "the second request":
            interrupts.ask_to_stop(f"second, {ends_by}")
        give_up_s = time.monotonic() + (0.0 if ends_by == "the step" else 20.0)
        while time.monotonic() < give_up_s:
            time.sleep(0.001)
        done.append("the step")

    def run() -> None:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        try:
            with interrupts.answered_here():  # as `start` does
                train(step, limit_s=0.01 if ends_by == "the clock" else LIMIT_S)
        except KeyboardInterrupt as error:
            done.append(type(error).__name__)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    expected = ["the step", "Terminated"] if ends_by == "the step" else ["KeyboardInterrupt"]
    assert done == expected


def test_a_request_after_a_cluster_s_wish_ends_a_run_in_another_thread_at_once() -> None:
    done: list[str] = []

    def run() -> None:
        try:
            with stop_wishes(LIMIT_S, lambda asked_by: None) as wish:
                wish.hear(Wished(Wish.leave))
                interrupts.ask_to_stop("after a wish")
                time.sleep(0.01)
                done.append("went on")
        except KeyboardInterrupt:
            done.append("ended")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert done == ["ended"]
