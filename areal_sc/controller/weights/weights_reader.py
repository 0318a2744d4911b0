"""Whose workers read the weights that a trainer publishes, as far as the trainer is concerned."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from areal_sc.controller.ledger.ledger_records import Split
from areal_sc.controller.step_life import StepLife
from areal_sc.controller.weights.weight_updates import WeightUpdates
from areal_sc.errors import StoreFull
from areal_sc.fleet.fleet import Fleet
from areal_sc.metadata import RowMetadata
from areal_sc.weights import WeightsReference

YieldMemory = Callable[[StoreFull], Awaitable[bool]]
"""Has what can be spared give its memory up, for rows; tells whether it has."""


class WeightsReader(Protocol):
    """A controller that brings each new policy version to its workers.

    Attributes:
        fleet: those workers.
        updates: which version each of them has, and its way to the newest one.
    """

    fleet: Fleet

    @property
    def updates(self) -> WeightUpdates: ...

    def follow(self, step: StepLife, yield_memory: YieldMemory) -> None:
        """Its workers get the weights of the model that makes this step."""

    async def record_version_async(
        self, version: int, trained_rows: Iterable[RowMetadata], splits: tuple[Split, ...]
    ) -> None:
        """Notes that a policy version exists; `receive_weights` with it follows.

        Args:
            trained_rows: the rows whose training made it.
            splits: how the ranks shared these rows.
        Raises: RunFolderError: the journal cannot be written.
        """

    def receive_weights(self, weights: WeightsReference) -> None:
        """Workers begin to read a policy version, and admission counts from it."""

    async def wait_for_weights_async(self) -> None:
        """Returns when every worker holds the newest version, but for those that are lost.

        These get it when they are started again, before anything else.
        """

    def has_taken_back(self, rows: Iterable[RowMetadata]) -> bool:
        """Whether some of these rows were in a batch that was formed anew."""

    def lose_steps(self) -> None:
        """Whoever waits for rows or evaluations gets StepsLost."""
