"""`STOP_SIGNALS` while a run trains: the first one is a wish, the second one an order.

consumes     signals, in the main thread; and what a cluster tells the agents of its nodes
waits for    the first of them; then for the end of the step and its snapshot
unblocked by the signal, the end of the block, and the time limit, which is the second signal

A closed terminal is told by several SIGHUP, of the kernel and of the shell, and systemd may send
SIGTERM beside them: all of that is one wish. `SNAPSHOT_SIGNALS` wish for a snapshot alone: after
the step the run goes on.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType
from typing import Any, Final

from areal_sc.fleet.worker_life import FleetEvent, Wished
from areal_sc.nodes.spec import Wish
from areal_sc.system import interrupts, telling
from areal_sc.system.process import SNAPSHOT_SIGNALS, STOP_SIGNALS, name_of_stop

_JOIN_LIMIT_S: Final = 5.0


class StopWish:
    """Whether somebody wants the run to stop, or to be saved.

    Args:
        is_noted: whether wishes are noted at all.

    Attributes:
        asked_by: the first signal that arrived; None: the run does not have to stop.
        may_repeat: SIGTERM may arrive once more and mean the same: a cluster sends it to the agents
            and, if it is in a job itself, to the script; systemd beside SIGHUP.
        is_late: the time for the wish is over: whatever arrives is an order.
    """

    def __init__(self, *, is_noted: bool) -> None:
        self.asked_by: signal.Signals | None = None
        self.may_repeat = False
        self.is_late = False
        self.noted: SimpleQueue[signal.Signals | None] = SimpleQueue()  # may interrupt itself
        self._is_noted = is_noted
        self._wants_snapshot = False

    def note_signal(self, asked_by: signal.Signals) -> None:
        """The first one that asks for the end."""
        self.asked_by = asked_by
        self.noted.put(asked_by)

    def hear(self, event: FleetEvent) -> None:
        """A cluster tells its agents; from any thread. All of them tell the same, one by one."""
        if not isinstance(event, Wished):
            return
        if event.wish is Wish.snapshot:
            self._wants_snapshot = self._is_noted
        elif not self._is_noted:
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.asked_by is None:
            self.may_repeat = True
            self.note_signal(signal.SIGTERM)

    @property
    def is_due(self) -> bool:
        """Whether the run is to stop, or to be saved, as soon as it can be."""
        return self._wants_snapshot or self.asked_by is not None

    def takes_snapshot(self) -> bool:
        """Whether one is due now, that nobody has taken yet."""
        is_due = self.is_due
        self._wants_snapshot = False
        return is_due


@contextmanager
def stop_wishes(limit_s: float, tell: Callable[[str], None]) -> Iterator[StopWish]:
    """The first stop signal is noted; a further one does what it did before the block.

    A noted one that the block ends without an error for takes effect at its end. No signal reaches
    another thread than the main one; there `python -m areal_sc stop` stands for Ctrl-C.

    Args:
        limit_s: after which a noted signal arrives again; 0: none is noted.
        tell: is called at once with the name of the noted signal, on a thread of its own.
    """
    if limit_s <= 0:
        yield StopWish(is_noted=False)
        return
    wish = StopWish(is_noted=True)
    before: dict[int, Callable[[int, FrameType | None], Any]] = {}
    is_over = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            telling.leave_closed_terminal()
            if wish.asked_by is not None and not wish.is_late:
                return
        if wish.asked_by is None:
            wish.may_repeat = number == signal.SIGHUP
            wish.note_signal(signal.Signals(number))
        elif wish.may_repeat and number == signal.SIGTERM:
            wish.may_repeat = False
        elif is_main:
            before[number](number, frame)
        else:
            interrupts.interrupt(thread)

    def watch() -> None:
        asked_by = wish.noted.get()
        if asked_by is not None:
            telling.tell(tell, name_of_stop(asked_by))
            if not is_over.wait(limit_s):
                wish.is_late, wish.may_repeat = True, False
                again(asked_by)

    def again(number: signal.Signals) -> None:
        if is_main:
            signal.pthread_kill(thread, number)
        else:
            interrupts.interrupt(thread)

    thread = threading.get_ident()
    is_main = threading.current_thread() is threading.main_thread()
    watcher = threading.Thread(target=watch, name="stop", daemon=True)
    watcher.start()
    notes = dict.fromkeys(STOP_SIGNALS, note) | dict.fromkeys(
        SNAPSHOT_SIGNALS, lambda *_: wish.hear(Wished(Wish.snapshot))
    )
    for number, its in notes.items() if is_main else ():
        handler = signal.getsignal(number)
        if callable(handler):  # what is ignored, or ends the process, stays as it is
            before[number] = handler
            signal.signal(number, its)
    try:
        with interrupts.answered_here(lambda: note(signal.SIGINT, None)):
            yield wish
    except GeneratorExit as left:
        if left.__context__ is not None:  # the loop was left by an error, not by its own will
            wish.asked_by = None
        raise
    except BaseException:
        wish.asked_by = None
        raise
    finally:
        is_over.set()
        wish.noted.put(None)
        for held, its in before.items():
            signal.signal(held, its)
        watcher.join(_JOIN_LIMIT_S)
        if wish.asked_by is not None:
            again(wish.asked_by)
