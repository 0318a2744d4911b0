"""What a trainer sees of the controller whose workers read its weights."""

from __future__ import annotations

from collections.abc import Iterable

from areal_sc.controller.background import Background
from areal_sc.controller.base import Controller, blocking
from areal_sc.controller.ledger.journal import Journal
from areal_sc.controller.ledger.ledger_records import Split
from areal_sc.controller.rollout.outside_groups import OutsideGroups
from areal_sc.controller.rollout.rollout_workers import RolloutWorkers, YieldMemory
from areal_sc.controller.rollout.training_groups import TrainingGroups
from areal_sc.controller.step_life import StepLife
from areal_sc.controller.turns import Side
from areal_sc.controller.weights.weight_updates import WeightUpdates
from areal_sc.metadata import RowMetadata
from areal_sc.weights import WeightsReference


class WeightsReader(Controller):
    """Brings new policy versions to its workers, and to what is counted from them.

    Attributes:
        groups: those of training, whose staleness is counted in versions.
    """

    groups: TrainingGroups
    _workers: RolloutWorkers
    _background: Background
    _journal: Journal
    _outside: OutsideGroups

    def follow(self, step: StepLife, yield_memory: YieldMemory) -> None:
        """The workers get the weights of the model that makes this step.

        Args:
            yield_memory: see `RolloutWorkers`.
        """
        step.take_in(self.groups.step)
        self.groups.step = self._outside.step = step
        self._workers.yield_memory = yield_memory

    def receive_weights(self, weights: WeightsReference) -> None:
        """A new policy version exists: workers begin to pull it, admission counts from it."""
        self.groups.begin_version(weights.version)
        self.updates.receive(weights)
        self.groups.admit()
        self._background.notify()

    async def record_version_async(
        self, version: int, trained_rows: Iterable[RowMetadata], splits: tuple[Split, ...]
    ) -> None:
        """Notes that a policy version exists; `receive_weights` with it follows.

        Args:
            trained_rows: the rows whose training made it.
            splits: as of the journal's record of it.
        Raises: RunFolderError: the journal cannot be written.
        """
        self.groups.record_version(version, trained_rows, splits)
        await self._journal.durable()

    def has_taken_back(self, rows: Iterable[RowMetadata]) -> bool:
        """Whether some of these rows were in a batch that was formed anew."""
        return any(map(self.groups.ledger.was_taken_back, rows))

    def lose_steps(self) -> None:
        """Whoever waits for rows or evaluations gets StepsLost."""
        self._outside.lose_steps()
        self._background.notify()

    @property
    def updates(self) -> WeightUpdates:
        """Updates of the workers' weights."""
        return self._workers.updates

    async def wait_for_weights_async(self) -> None:
        """Waits until every worker holds the newest version, but for those that are lost.

        These get it when they are started again, before anything else.
        """
        with self._workers.card.wanted(Side.generation):
            await self.updates.wait_until_newest()

    wait_for_weights = blocking(wait_for_weights_async)
