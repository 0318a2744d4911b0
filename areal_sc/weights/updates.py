"""Which policy version each rollout worker holds, and its way to the newest one.

consumes     new versions; workers that are there again after a restart; see `tree` for
             whom each of them reads from
waits for    the reply of each worker that updates; as many do so at one time as may stand still
unblocked by that reply, its deadline, or the loss of the worker

One update a worker at a time, always to the newest version; none begins while the trainer seals the
next one, or while an evaluation holds the worker. What a worker cannot read, because the trainer is
being started again, it reads when the trainer is there: the update is repeated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from msgspec.structs import replace

from areal_sc.config.parallel_settings import Placement
from areal_sc.config.schema import OnWeightUpdate, WeightUpdateMethod
from areal_sc.controller.background import Background
from areal_sc.controller.rollout.worker_set import NO_VERSION, RolloutWorkerState, goes_on
from areal_sc.engines.handle_base import GeneratorHandle
from areal_sc.errors import TransportError, WorkerError
from areal_sc.fleet.fleet import Fleet
from areal_sc.fleet.member import Member
from areal_sc.weights.methods import ADOPT_WEIGHTS
from areal_sc.weights.published import WeightsReference
from areal_sc.weights.tree import RPC_MARGIN_S, Refused, WeightTree

logger = logging.getLogger(__name__)

UPDATE_STEPS: Final = 4
"""A weight update has so many steps; each may take `weight_update.step_timeout_s`."""

RETRY_S: Final = 0.5
"""Between two attempts to read the same weights."""

BEGUN_PER_TURN: Final = 32
"""Most calls of workers that begin in one turn of the event loop; they take some milliseconds."""

_ALL: Final = 1 << 40
"""More workers than there will ever be."""


class WeightUpdates:
    """Brings the workers of one RolloutController to the newest version.

    Args:
        on_version: is told of each worker whose version has changed, or that an evaluation holds,
            or lets go of.

    Attributes:
        states: of all workers; those that are lost are left out of everything until they are up.
    """

    def __init__(
        self,
        engine: GeneratorHandle,
        fleet: Fleet,
        background: Background,
        on_version: Callable[[RolloutWorkerState], None],
    ) -> None:
        self.states: Sequence[RolloutWorkerState] = ()
        self._engine = engine
        self._config = config = engine.config
        self._fleet = fleet
        self._background = background
        self.on_version = on_version
        self._weights: WeightsReference | None = None
        # what the engine is built with is no version's: the ranks' weights come before any work
        self._is_forgotten = self._are_held = config.waits_for_weights
        self._is_stopped = self._has_stopped = False
        self._round: asyncio.Task[None] | None = None
        self._slots = asyncio.Semaphore(config.max_unavailable or _ALL)
        self._tree = WeightTree(
            config,
            fleet,
            lambda: (state.member for state in self.states if not self._is_newest(state)),
        )

    def adopt(self, weights: WeightsReference) -> None:
        """Workers begin to adopt the new version."""
        self._weights = weights
        self._tree.adopt(weights)
        self._are_held = self._is_forgotten = False
        self.begin_all()

    def forget(self) -> None:
        """A new lineage has begun: what workers hold, or still get, is of no use any more.

        None does any work before `adopt`. Where nothing was received yet, they hold their first
        weights, and go on.
        """
        if self._weights is not None or self._is_forgotten:
            self._weights = None
            self._are_held = self._is_forgotten = True
            for state in self.states:
                self._set_version(state, NO_VERSION)

    def take_over(self, version: int, *, goes_on: bool) -> None:
        """Workers hold what an earlier start of the script has given them, up to that version.

        Others do no work before `adopt`.
        """
        self._is_forgotten = version > 0 or self._config.waits_for_weights
        if self._has_stopped and goes_on:  # else they get others
            self._name_first_weights()
            self.begin_all()

    def await_takeover(self) -> None:
        """It is not known yet which weights workers are to have: `take_over` follows."""
        self._is_forgotten = True

    async def stop(self) -> None:
        """Workers lose their weights, whatever these are, and none gets any before `go_on`."""
        self._is_stopped = self._has_stopped = True
        self._name_first_weights()
        await self._background.wait_until(
            lambda: not any(state.is_updating for state in self.states),
            "rollout workers to update their weights",
        )
        for state in self.states:
            if state.has_memory:  # else its engine is not built yet
                self._set_version(state, NO_VERSION)

    def go_on(self) -> None:
        """Workers get the newest weights again."""
        self._is_stopped = False
        self.begin_all()

    def _name_first_weights(self) -> None:
        """Before there are others, a worker that has lost its weights reads those of the folder."""
        if self._weights is None and not self._is_forgotten:
            self._weights = WeightsReference(0)

    def renew(self, weights: WeightsReference) -> None:
        """The weights that workers update to are to be had elsewhere."""
        if self._weights is not None and self._weights.policy == weights.policy:
            self._weights = weights
            self._tree.adopt(weights)

    def leave_out(self, state: RolloutWorkerState) -> None:
        """The worker updates to nothing, and nobody reads from it, until it is there again."""
        state.version = NO_VERSION
        state.holds.clear()
        if state.update is not None:
            state.update.cancel()
        self._tree.forget(state.member)

    async def hold(self) -> int:
        """Waits until no worker updates its weights; none begins before `adopt`.

        Returns: the oldest version that a worker holds.
        """
        self._are_held = True
        await self._background.wait_until(
            lambda: not (goes_on(self._round) or any(s.is_updating for s in self.states)),
            "rollout workers to update their weights",
        )
        newest = self._weights.version if self._weights else 0
        return min((s.version for s in self.states if s.version != NO_VERSION), default=newest)

    def end_hold(self) -> None:
        """No new version comes for now: workers may update to the newest one."""
        self._are_held = False
        self.begin_all()

    def may_leave(self, state: RolloutWorkerState) -> bool:
        """Whether no weight update counts on the worker, and no evaluation on its weights."""
        is_settled = self._is_newest(state) or not state.life.is_up
        return is_settled and not (self._are_held or state.is_updating or state.holds)

    @property
    def current_members(self) -> list[Member]:
        """The workers that hold weights. Only they take part in a broadcast: the others pull."""
        return [state.member for state in self.states if state.version != NO_VERSION]

    async def wait_until_newest(self) -> None:
        """Waits until every worker that is up holds the newest version."""
        await self._background.wait_until(
            lambda: all(self._is_newest(state) for state in self.states if state.life.is_up),
            "rollout workers to hold the newest weights",
        )

    async def bring_to_newest(self, state: RolloutWorkerState) -> None:
        """The weights of a worker that was started again."""
        if self._weights is None and not self._is_forgotten:  # its engine has the first ones
            self._set_version(state, 0)
        self._begin(state)
        await self._background.wait_until(
            lambda: state.version != NO_VERSION, f"{state.name} to get the newest weights"
        )

    @asynccontextmanager
    async def held_for_evaluation(self) -> AsyncIterator[HeldWorker]:
        """A worker that keeps its weights for the while.

        It does not if it is the only one, or if weights are broadcast, which needs all of them, or
        if the worker has to give them up for training.
        """
        held = HeldWorker(self, self._background, keeps_weights=self._keeps_weights)
        try:
            yield held
        finally:
            held.release()
            self.begin_all()

    @property
    def _keeps_weights(self) -> bool:
        """Whether a worker is held for an evaluation."""
        is_broadcast = self._config.weight_update.method == WeightUpdateMethod.collective
        takes_turns = self._config.placement is Placement.turns
        num_staying = sum(not state.life.is_leaving for state in self.states)
        return num_staying > 1 and not (is_broadcast or takes_turns)

    def begin_all(self) -> None:
        """Every worker that may begins to update, if it has to."""
        if self._may_begin:
            self._round = self._background.start(
                begin_in_turns(list(self.states), self._begin), "weight updates"
            )

    def _begin(self, state: RolloutWorkerState) -> bool:
        is_idle = state.life.is_up and not state.is_updating and not state.holds
        if not is_idle or not self._may_begin or self._is_newest(state):
            return False
        state.update = self._background.start(self._update(state), f"update {state.name}")
        return True

    @property
    def _may_begin(self) -> bool:
        return not (self._are_held or self._is_stopped)

    def _is_newest(self, state: RolloutWorkerState) -> bool:
        return state.version == (self._weights.version if self._weights else 0)

    def _set_version(self, state: RolloutWorkerState, version: int) -> None:
        state.version = version
        self.on_version(state)
        self._background.notify()

    async def _update(self, state: RolloutWorkerState) -> None:
        """Until the worker holds the newest version, or must not update any more.

        Raises: TransportError: for too long, whoever it reads the weights from was not there.
        """
        loop, incarnation = asyncio.get_running_loop(), state.member.worker.incarnation
        timeout_s = update_timeout_s(self._engine)
        retry_limit_s = timeout_s if self._fleet.config.max_deaths else 0.0
        refused: Refused = set()
        failing_since_s: float | None = None
        while (weights := self._wanted(state)) is not None:
            num_refused, began_s = len(refused), loop.time()
            try:
                await self._tree.bring_near(state.member, weights, refused)
                async with self._slots:
                    if (weights := self._wanted(state)) is None:
                        return
                    if self._tree.wants_copy(state.member, weights):
                        continue  # there are newer weights by now
                    began_s = loop.time()
                    async with self._tree.reading(state.member, weights, refused) as source:
                        if self._wanted(state) != weights:
                            continue  # a source was waited for, and the run has gone on, or back
                        await self._fleet.call(
                            state.member, ADOPT_WEIGHTS, source, timeout_s=timeout_s
                        )
            except WorkerError as error:
                self._fleet.lose(state.member, incarnation, f"has kept old weights: {error}")
                return  # once it is started again, new ones come first
            except TransportError as error:
                limit = "the limit of a step of a weight update"
                if await self._fleet.lose_hung(error, [state.member], limit):
                    return  # as above
                logger.warning("worker=%s reads its weights again: %s", state.name, error)
                if len(refused) > num_refused:
                    continue  # from elsewhere
                failing_since_s = failing_since_s or began_s
                if self._fleet.awaits_machines:  # perhaps one that has the weights
                    failing_since_s = loop.time()
                if loop.time() - failing_since_s >= retry_limit_s:
                    raise
                await asyncio.sleep(RETRY_S)
                if not self._may_begin:
                    return  # the next version will be another update
            else:
                refused.clear()
                failing_since_s = None
                if self._weights and self._weights.lineage == weights.lineage:
                    self._set_version(state, weights.version)

    def _wanted(self, state: RolloutWorkerState) -> WeightsReference | None:
        """What the worker is to have next; None: it stays as it is."""
        if self._weights is None or self._is_newest(state) or state.holds or self._is_stopped:
            return None
        if state.version == NO_VERSION:
            return replace(self._weights, broadcast=None)
        return self._weights


class HeldWorker:
    """The worker that an evaluation runs on; when it is lost, another one."""

    def __init__(
        self, updates: WeightUpdates, background: Background, *, keeps_weights: bool
    ) -> None:
        self._updates = updates
        self._background = background
        self._keeps_weights = keeps_weights
        self._state: RolloutWorkerState | None = None
        self._incarnation = ""
        self._choice = asyncio.Lock()

    async def worker(self) -> RolloutWorkerState:
        """The worker, once it does not update its weights any more, and no pause goes on.

        Raises: StepLost: see `Standstill.hold`.
        """
        async with self._choice:
            await self._background.wait_for_pause_end()
            while self._state is None or not self._lives(self._state):
                await self._choose()
            return self._state

    def release(self) -> None:
        """It may update its weights again."""
        if self._state is not None:
            self._state.holds.discard(self)
            self._updates.on_version(self._state)
            self._state = None

    def _lives(self, state: RolloutWorkerState) -> bool:
        is_same = state.member.worker.incarnation == self._incarnation
        is_going = state.life.is_leaving and self not in state.holds
        return is_same and state.version != NO_VERSION and not is_going

    async def _choose(self) -> None:
        self.release()
        able: list[RolloutWorkerState] = []

        def is_any_able() -> bool:
            states = self._updates.states
            able[:] = [s for s in states if s.version != NO_VERSION and not s.life.is_leaving]
            return bool(able)

        await self._background.wait_until(is_any_able, "a rollout worker to evaluate on")
        state = max(able, key=lambda state: (state.version, -state.store.num_running))
        self._state, self._incarnation = state, state.member.worker.incarnation
        if self._keeps_weights:
            state.holds.add(self)
            self._updates.on_version(state)
            await self._background.wait_until(
                lambda: not state.is_updating, f"{state.name} to update its weights"
            )


def update_timeout_s(engine: GeneratorHandle) -> float:
    """What one worker's weight update may take."""
    config = engine.config
    step_s = UPDATE_STEPS * config.weight_update.step_timeout_s
    if config.on_weight_update == OnWeightUpdate.finish_running:
        step_s += config.group_timeout_s
    return step_s + RPC_MARGIN_S


async def begin_in_turns(
    states: Sequence[RolloutWorkerState], begin: Callable[[RolloutWorkerState], bool]
) -> None:
    """Begins something at every worker, a few of them in each turn of the event loop."""
    num_begun = 0
    for state in states:
        num_begun += begin(state)
        if num_begun == BEGUN_PER_TURN:
            num_begun = 0
            await asyncio.sleep(0)
