from __future__ import annotations

import signal
import threading

import pytest

from areal_sc.system import interrupts


def clean_up(done: list[str], error: BaseException | None = None) -> None:
    """Three steps, with a Ctrl-C in each, after `error`."""
    try:
        if error is not None:
            raise error
    finally:
        with interrupts.deferred():
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
                done.append("step")
        done.append("after it")


def test_ctrl_c_takes_effect_after_the_block() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        clean_up(done)
    assert done == ["step"] * 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_script_that_is_ending_already_is_not_interrupted_again() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt, match="the first"):
        clean_up(done, KeyboardInterrupt("the first"))
    assert done == [*["step"] * 3, "after it"]


def test_at_the_end_of_the_process_it_has_no_effect() -> None:
    with interrupts.deferred(are_dropped=True), interrupts.deferred():
        signal.raise_signal(signal.SIGINT)


def test_other_threads_hold_nothing_back() -> None:
    handlers = []

    def look() -> None:
        with interrupts.deferred():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(20)
    assert handlers == [signal.default_int_handler]
