"""Keeps `status.json` of a run: who lives, what it does, and what it waits for; hears wishes.

consumes     what the script tells of its phases and its end; what controllers know, when asked; the
             wishes in the run folder, which it tells controllers
waits for    a change, or the next time that is due
unblocked by `note_phases`, `close`, and the clock

A thread of its own asks each controller on that controller's event loop, and writes. So the file
stays fresh while the script computes, and `RoleStatus.looked` says if an event loop stands still.
The pause after a write is so long that all of this takes a thousandth of a core at most.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Final

from areal_sc.errors import RunFolderError, exit_code_of
from areal_sc.run.run_files import RunFiles
from areal_sc.run.run_owner import RunTerm
from areal_sc.run.run_status import (
    Phase,
    RoleStatus,
    RunEnd,
    RunStatus,
    RunWishes,
    ScaleAnswer,
    ScaleWish,
    TenantStatus,
    drop_scale,
)
from areal_sc.system.durable import own_file
from areal_sc.system.json_lines import to_json
from areal_sc.system.process import machine_id

logger = logging.getLogger(__name__)

Hear = Callable[[RunWishes], None]

EVERY_S: Final = 2.0
MIN_PAUSE_S: Final = 0.25
MAX_SHARE: Final = 0.001
"""Largest share of one core that writing the status file may use."""
LOOK_LIMIT_S: Final = 0.5
"""A write waits so long for an event loop; then it says what the loop said before."""
_JOIN_LIMIT_S: Final = 10.0


class StatusBoard:
    """What a run says of itself. Without `keep` nothing is written. Every thread may use it."""

    def __init__(self) -> None:
        now = time.time()
        self._status = RunStatus(
            host=socket.gethostname(),
            machine=machine_id(),
            pid=os.getpid(),
            began=now,
            orphan_timeout_s=0.0,
            written=now,
            progressed=now,
            every_s=EVERY_S,
        )
        self._followed: dict[str, _Followed] = {}
        self._progress: object = None
        self._names: list[str] = []  # of the phases at the last progress
        self._phases: list[Phase] = []  # for the next write
        self._is_writable = True
        self._wishes = RunWishes()
        self._told = set[str]()  # of wishes that cannot be read
        self._answered: list[ScaleWish] = []
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, files: RunFiles, term: RunTerm | None, orphan_timeout_s: float) -> None:
        """Writes the file now, and keeps it fresh until `close`, or a later term has begun."""
        self._files = files
        self._path = files.status_path
        self._term = term
        self._hear_wishes()
        self._status.term = term.number if term else 0
        self._status.orphan_timeout_s = orphan_timeout_s
        self._write()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Says how the script ended, without an error if nobody has told of one."""
        if self._thread is None:
            return
        self._closed.set()
        self._changed.set()
        self._thread.join(_JOIN_LIMIT_S)
        self._thread = None
        self._status.end = self._status.end or RunEnd(time.time(), 0)
        self._write()

    def follow(
        self, role: str, look: Callable[[], RoleStatus], hear: Hear = lambda wishes: None
    ) -> None:
        """Asks a controller from now on; called on its event loop, on which both are called.

        Args:
            hear: takes what is wished, at once and after each change.
        """
        self._followed[role] = _Followed(asyncio.get_running_loop(), look, hear)
        hear(self._wishes)
        self._status.end = None  # that of an earlier block, whose error the script has borne
        self._changed.set()

    def leave(self, role: str) -> None:
        """The controller ends; what it says now stays, without its workers. On its event loop."""
        followed = self._followed.pop(role, None)
        if followed is not None:
            said = self._status.roles[role] = followed.look()
            said.workers, said.agents, said.waits = [], [], []

    def note_tenants(self, tenants: Sequence[TenantStatus]) -> None:
        """Whom the run serves."""
        self._status.tenants = list(tenants)

    def note_phases(self, phases: Sequence[Phase]) -> None:
        """What goes on now, the innermost last."""
        self._phases = list(phases)
        self._changed.set()

    def answer(self, wish: ScaleWish, refusal: str) -> None:
        """A wish was followed or, with a reason, refused: it is none any more."""
        self._status.wishes.scale = ScaleAnswer(wish.id, wish.num_workers, refusal)
        self._answered.append(wish)
        self._changed.set()

    def note_end(self, error: BaseException | None) -> None:
        """The script ends, as far as it looks now; what `close` writes says why."""
        cause = f"{type(error).__name__}: {error}".partition("\n")[0] if error else ""
        self._status.end = RunEnd(time.time(), exit_code_of(error), cause)

    def tell_once(self, text: str) -> None:
        """Warns, unless it has done so with these words."""
        if text not in self._told:
            self._told.add(text)
            logger.warning("%s", text)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._changed.clear()
            began_s = time.thread_time()
            self._hear_wishes()
            looks_s = self._look()
            answered = len(self._answered)
            self._write()
            for wish in self._answered[:answered]:
                drop_scale(self._files, wish)
            del self._answered[:answered]
            cost_s = looks_s + time.thread_time() - began_s
            self._closed.wait(max(MIN_PAUSE_S, cost_s / MAX_SHARE))
            self._changed.wait(EVERY_S)

    def _hear_wishes(self) -> None:
        before = self._wishes
        self._wishes = before.renewed(self._files, self.tell_once)
        self._status.wishes.pause = self._wishes.pause
        if self._wishes != before:
            for followed in list(self._followed.values()):
                followed.tell(self._wishes)

    def _look(self) -> float:
        """Asks all controllers; returns for how many seconds that kept them busy."""
        followed = list(self._followed.items())
        looks = [one.begin_look() for _, one in followed]
        wait(looks, LOOK_LIMIT_S)
        took_s = 0.0
        for (role, one), look in zip(followed, looks, strict=True):
            if look.done():
                one.pending = None
                said, seconds = look.result()
                took_s += seconds
                if said is not None and role in self._followed:
                    self._status.roles[role] = said
        return took_s

    def _note_progress(self) -> None:
        status, now = self._status, time.time()
        if status.wishes.pause is not None:
            status.progressed = now  # the time stands still
            return
        progress = (
            [(phase.name, phase.done, phase.since) for phase in status.phases],
            {name: (said.version, said.num_finished) for name, said in status.roles.items()},
            [tenant.num_answered for tenant in status.tenants],
        )
        if progress == self._progress:
            return
        names = [phase.name for phase in status.phases]
        if names == self._names:
            status.longest_quiet_s = max(status.longest_quiet_s, now - status.progressed)
        else:
            status.longest_quiet_s = 0.0
        self._names, self._progress, status.progressed = names, progress, now

    def _write(self) -> None:
        """Replaces the file. It is for people who look now, so nothing waits for the disk."""
        self._status.phases = self._phases  # of one moment with the progress that is noted
        self._note_progress()
        self._status.written = time.time()
        partial = self._path.with_name(f".{self._path.name}.partial")
        try:
            if self._term is not None:
                self._term.check()  # else the file is another process's
            with open(partial, "wb", opener=own_file) as file:
                file.write(to_json(self._status))
            partial.replace(self._path)
        except (OSError, RunFolderError) as error:
            if self._is_writable:
                logger.warning("%s is not written any more: %s", self._path, error)
        else:
            self._is_writable = True
            return
        self._is_writable = False


class _Followed:
    """A controller that is asked."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, look: Callable[[], RoleStatus], hear: Hear
    ) -> None:
        self._loop = loop
        self.look = look
        self._hear = hear
        self.pending: Future[tuple[RoleStatus | None, float]] | None = None

    def tell(self, wishes: RunWishes) -> None:
        """Has it hear them; nobody does when its event loop has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._hear, wishes)

    def begin_look(self) -> Future[tuple[RoleStatus | None, float]]:
        """What it says, and the seconds that took; None: its event loop has ended."""
        if self.pending is None:
            answer = Future[tuple[RoleStatus | None, float]]()
            self.pending = answer
            try:
                self._loop.call_soon_threadsafe(self._answer, answer)
            except RuntimeError:
                answer.set_result((None, 0.0))
        return self.pending

    def _answer(self, answer: Future[tuple[RoleStatus | None, float]]) -> None:
        began_s = time.perf_counter()
        said = None
        try:
            said = self.look()
        except Exception:  # a callback's end: the run does not depend on it
            logger.exception("a controller cannot say how it is")
        answer.set_result((said, time.perf_counter() - began_s))
