"""The number of rollout workers while a run goes on: they come, and leave when nobody needs them.

    scale(n) ──► more   a worker that leaves stays; else a further one is started, as a lost one is
             └─► fewer  some get no new groups, and leave when all of theirs is done with

consumes     `scale`, by the script; a person's wish; batches, which tell the autoscaler
waits for    a worker that leaves: its groups, rows that are still to be trained, an evaluation;
             nodes that are on their way, where the stores of the workers do not hold a batch yet
unblocked by the end of these, seen at the next look. The wait for a node has no limit

Where the nodes have no room for more, further ones are asked for: their workers start when they are
there, and the autoscaler does not count them before. When the number falls, workers whose node has
not come yet leave first, at once; and a node that nobody works on is given back.

Nobody is killed for it. A worker that is lost meanwhile is started again, as any other, if rows of
it are needed. The number is on the disk before anything of it is done: a later start of the script
that finds workers goes on with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Final

from areal_sc.controller.ledger.group import GroupState
from areal_sc.controller.rollout.autoscale import Autoscaler, SeenStep, SizeChange
from areal_sc.controller.rollout.rollout_workers import RolloutWorkers
from areal_sc.controller.rollout.training_groups import TrainingGroups
from areal_sc.controller.rollout.worker_set import RolloutWorkerState
from areal_sc.errors import ArealError, ConfigError, RunFolderError, SchedulerSilent
from areal_sc.fleet.member import Member
from areal_sc.fleet.recovery import Recovery
from areal_sc.fleet.worker_life import RunFailed, Scaled, Wanted
from areal_sc.nodes.spec import ROLLOUT_ROLE, WorkerOrder
from areal_sc.run.run_status import ScaleWish
from areal_sc.system.disk import Disk
from areal_sc.system.durable import os_errors_as
from areal_sc.system.waiting import bounded

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.2
"""Between two looks at workers that leave."""

OrderOf = Callable[[int], WorkerOrder]
"""The order of a worker, by its number."""


@dataclass(eq=False)
class Scaling:
    """Changes the number of workers of one RolloutController.

    Args:
        check: raises ConfigError where the number is fixed.
        answer: is told how a person's wish ended: why it was refused, or "".
        path: of the file that keeps the number.
        before_end: is awaited with each worker that leaves, while it still answers.
    """

    recovery: Recovery
    workers: RolloutWorkers
    groups: TrainingGroups
    disk: Disk
    check: Callable[[], None]
    answer: Callable[[ScaleWish, str], None]
    path: Path
    order_of: OrderOf
    before_end: Callable[[Member], Awaitable[object]]

    def __post_init__(self) -> None:
        self._fleet = self.recovery.fleet
        self._wish: ScaleWish | None = None
        self._followed: ScaleWish | None = None
        self._one_change = asyncio.Lock()
        self._leaving: asyncio.Task[None] | None = None
        autoscale = self.workers.config.autoscale
        self._autoscaler = Autoscaler(autoscale) if autoscale.max else None
        self._seen_restarts = self._num_surplus = 0

    async def first_orders(self, *, adopts: bool) -> list[WorkerOrder]:
        """The workers to begin with.

        Args:
            adopts: goes on with the number of an earlier start, if that has left workers; more than
                these are there where some were to leave, see `see_surplus_off`.
        Raises: RunFolderError: the number cannot be read, or not be written.
        """
        found = await self._fleet.found(ROLLOUT_ROLE) if adopts else []
        kept = self._read()
        number = kept if found and kept else self.workers.config.num_workers
        if kept not in (None, number):
            await self._record(number)
        free = (index for index in count() if index not in found)
        first = found if number == kept else found[:number]
        self._num_surplus = max(len(first) - number, 0)
        return [*map(self.order_of, sorted([*first, *islice(free, max(number - len(first), 0))]))]

    def see_surplus_off(self) -> None:
        """So many of the first workers are to leave as were when the earlier start ended."""
        self._retire(self._dispensable(self._num_surplus))

    async def scale(self, num_workers: int, why: str) -> None:
        """Returns when it is certain; workers start, and leave, beside whatever comes next.

        Raises: ConfigError: there cannot be so many, or so few. SchedulerSilent: it is not known
            whether a further node can be had. RunFolderError: the number cannot be written.
        """
        if type(num_workers) is not int or num_workers < 1:
            raise ConfigError(
                f"scale: expected a number of rollout workers, at least 1, got {num_workers!r}"
            )
        self.check()
        async with self._one_change:
            workers = self.workers.set
            before = len(workers.staying)
            if num_workers < before:
                surplus = self._dispensable(before - num_workers)
                workers.check_room_of([s for s in workers.staying if s not in surplus])
                await self._record(num_workers)
                self._retire(surplus)
            elif num_workers > before:
                await self._grow(num_workers - before, num_workers)
            else:
                return
            logger.info("rollout_workers=%d before=%d %s", num_workers, before, why)
            self.recovery.announce(Scaled(before, num_workers, why))

    def hear(self, wish: ScaleWish | None) -> None:
        """What a person wishes now."""
        self._wish = wish
        self.follow_wish()

    def follow_wish(self) -> None:
        """Fulfils it beside whatever comes next: once, and not before the first batch is begun."""
        wish, is_begun = self._wish, self.groups.ledger.journal is not None
        if wish is not None and wish != self._followed and is_begun:
            self._followed = wish
            self.workers.background.start(self._fulfil(wish), "a wish for workers")

    async def _fulfil(self, wish: ScaleWish) -> None:
        refusal = ""
        try:
            await self.scale(wish.num_workers, f"as {wish.by} has asked for")
        except (ConfigError, SchedulerSilent) as error:
            refusal = str(error)
            logger.warning("the number of rollout workers stays as it is: %s", error)
        self.answer(wish, refusal)

    async def wait_for_room(self) -> None:
        """Returns when the workers that have come hold a batch.

        Raises: ConfigError: all have come, and do not.
        """
        workers = self.workers.set
        while not workers.holds_batch and not all(s.life.has_served for s in workers.staying):
            self.workers.background.raise_failure()
            await asyncio.sleep(LOOK_S)
        workers.check_room()

    def note_batch(self) -> None:
        """A batch was formed."""
        if self._autoscaler is None:
            return
        admission, coming = self.groups.admission, self._fleet.coming
        states = [s for s in self.workers.set.states if s.name not in coming]
        num_workers = sum(not state.life.is_leaving for state in states)
        num_restarts, self._seen_restarts = self._seen_restarts, self.recovery.num_restarts
        is_steady = self._seen_restarts == num_restarts and all(
            not state.store.num_running if state.life.is_leaving else state.life.is_up
            for state in states
        )
        seen = SeenStep(
            num_workers,
            admission.slack,
            admission.spare_lead,
            is_steady,
            len(self.workers.set.staying) - num_workers,
        )
        if change := self._autoscaler.note_step(seen):
            self.workers.background.start(self._follow(change), "autoscaling")

    async def _follow(self, change: SizeChange) -> None:
        assert self._autoscaler is not None
        try:
            await self.scale(change.num_workers, change.why)
        except ConfigError as error:
            logger.warning("the number of rollout workers stays as it is: %s", error)
            self._autoscaler.refuse(change.num_workers)
        except SchedulerSilent as error:
            logger.warning("the number of rollout workers stays as it is for now: %s", error)

    async def _grow(self, num_more: int, num_workers: int) -> None:
        workers = self.workers.set
        back = sorted(workers.leaving, key=lambda state: not state.life.is_up)[:num_more]
        for state in back:
            workers.keep(state)
        members = []
        if num_new := num_more - len(back):
            taken = {member.index for member in self._fleet.members}
            free = (index for index in count() if index not in taken)
            orders = [self.order_of(index) for index in islice(free, num_new)]
            try:
                members = await self._fleet.expect(orders)
            except ArealError:
                self._retire(back)
                raise
        await self._record(num_workers)
        for member in members:
            workers.add(member)
            self._fleet.tell(Wanted(member.life.unit))

    def _dispensable(self, number: int) -> list[RolloutWorkerState]:
        """The first workers to leave: those that do no work now, and then those that came last."""
        staying = self.workers.set.staying
        return sorted(staying, key=lambda state: (state.life.is_up, -state.number))[:number]

    def _retire(self, states: Sequence[RolloutWorkerState]) -> None:
        for state in states:
            self.workers.set.retire(state)
        if states and (self._leaving is None or self._leaving.done()):
            self._leaving = self.workers.background.start(self._see_off(), "workers that leave")

    async def _see_off(self) -> None:
        """Looks at workers that leave, until there are none."""
        while leaving := self.workers.set.leaving:
            for state in leaving:
                if self.workers.may_leave(state, self.groups.ledger.num(GroupState.queued)):
                    self.workers.let_go(state)
                    self.workers.background.start(self._end(state.member), f"end of {state.name}")
            await asyncio.sleep(LOOK_S)

    async def _end(self, member: Member) -> None:
        await self.recovery.wait_until_left(member.life.unit)
        if member.failure is None:
            await self.before_end(member)
        await self._fleet.dismiss(member)
        logger.info("worker=%s has left", member.name)

    async def _record(self, num_workers: int) -> None:
        """Raises: RunFolderError: it cannot be written."""
        content = f"{num_workers}\n".encode()
        written = self.disk.run(lambda: self.disk.create(self.path, content))
        limit_s = self._fleet.config.transport.write_timeout_s
        what = f"the disk of {self.path} to take the number of rollout workers"
        try:
            await bounded(written, limit_s, what, "transport.write_timeout_s")
        except OSError as error:
            failure = RunFolderError(f"cannot write {self.path}: {error.strerror or error}")
            self.recovery.announce(RunFailed(failure))  # as of the journal
            raise failure from error

    def _read(self) -> int | None:
        """The number that was written last; None: none was, or it is damaged."""
        with os_errors_as(RunFolderError, f"cannot read {self.path}"):
            if self.path.name not in self.disk.names(self.path.parent):
                return None
            text = self.disk.read(self.path).decode(errors="replace").strip()
        return int(text) if text.isdecimal() and int(text) else None
