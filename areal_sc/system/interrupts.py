"""Clean-up that Ctrl-C, and the other signals that end a run, cannot cut short."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Final

from areal_sc.system.process import STOP_SIGNALS

logger = logging.getLogger(__name__)

_asked: Final[set[str]] = set()
_answers: Final[list[Callable[[], None]]] = []
"""Calls that stop runs in other threads than the main one; each answers one request, the newest
first."""


def ask_to_stop(request: str) -> None:
    """Does as Ctrl-C does in this process, or in the thread in which it runs; called on any thread.

    Args:
        request: names one request from outside. Several controllers hear of it, and the first of
            them acts.
    """
    if request in _asked:
        return
    _asked.add(request)
    logger.warning("the run is asked to stop from outside, by `python -m areal_sc stop`")
    if _answers:
        _answers.pop()()
        return
    # a script in the background of a shell may ignore SIGINT
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGTERM if is_ignored else signal.SIGINT)


def interrupt(thread: int) -> None:
    """Raises KeyboardInterrupt in a thread, when that runs Python code again."""
    raised = ctypes.py_object(KeyboardInterrupt)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


@contextmanager
def answered_here(answer: Callable[[], None] | None = None) -> Iterator[None]:
    """A run is in the block: it is asked to stop where it is, if that is not the main thread.

    Args:
        answer: in place of a KeyboardInterrupt.
    """
    if threading.current_thread() is threading.main_thread():
        yield
        return
    its = answer or partial(interrupt, threading.get_ident())
    _answers.append(its)
    try:
        yield
    finally:
        if its in _answers:
            _answers.remove(its)


@contextmanager
def deferred(*, are_dropped: bool = False) -> Iterator[None]:
    """Holds back the signals that would raise in this thread; what the block does is bounded.

    One that arrived takes effect after the block, unless a KeyboardInterrupt is on its way already:
    then the script is ending, and the signal asks for nothing else.

    Args:
        are_dropped: signals that arrive have no effect at all.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals raise in the main thread alone
        return
    has_effect = not are_dropped and not isinstance(sys.exception(), KeyboardInterrupt)
    arrived: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    # what is ignored, or ends the process without a word, stays as it is
    before = {n: handler for n in STOP_SIGNALS if callable(handler := signal.getsignal(n))}
    for number in before:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if arrived and has_effect:
            signal.raise_signal(arrived[0])
