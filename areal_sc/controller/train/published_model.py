"""A model whose versions a rollout controller reads: it gets each, and hears what becomes of them.

consumes     `publish`, one at a time; what the ranks tell of steps and weights
waits for    the journal of the rollout controller, and what `Publisher` waits for
unblocked by them; a death of ranks repeats what goes on, see `ranks`
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_sc.controller.events import TrainingLost, WeightsMoved
from areal_sc.controller.train.model_place import PlaceFile
from areal_sc.controller.train.publication import Publisher
from areal_sc.controller.train.ranks import Ranks
from areal_sc.controller.train.train_step import TrainStep
from areal_sc.controller.weights.weights_reader import WeightsReader
from areal_sc.weights import WeightsReference
from areal_sc.workers.operations import Kind


@dataclass(eq=False)
class PublishedModel:
    """Publishes the versions of one model, and tells its reader what becomes of them.

    Attributes:
        reader: of what was published; None: nothing was, so far.
    """

    ranks: Ranks
    step: TrainStep
    publisher: Publisher
    place: PlaceFile

    def __post_init__(self) -> None:
        self.reader: WeightsReader | None = None

    async def publish(self, rollout: WeightsReader, version: int) -> None:
        """Gives rollout workers the present version, or the next one, which it makes."""
        await self.place.begin_to_publish()
        is_new = version > self.ranks.state.version

        async def take_snapshot() -> None:
            if is_new:
                await self.ranks.take_snapshot(version)

        async def announce(weights: WeightsReference) -> None:
            self.note_reader(rollout)
            if is_new:
                step = self.ranks.step
                await rollout.record_version_async(version, step.trained_rows, step.splits)
                self.ranks.advance(version)
            rollout.receive_weights(weights)

        async def publish() -> None:
            if is_new and self.ranks.state.version == version:
                return  # a repeat
            if is_new:
                self.step.check(rollout)
            operation = self.ranks.operation(Kind.publish, str(version))
            await self.publisher.publish(operation, version, rollout, take_snapshot, announce)

        await self.ranks.repeated(publish)

    def note_reader(self, rollout: WeightsReader) -> None:
        """Workers of this controller get the weights, now or from an earlier start."""
        self.reader, self.ranks.is_published = rollout, True
        rollout.follow(self.ranks.step, self.ranks.memory.yield_memory)

    def hear(self, event: TrainingLost | WeightsMoved) -> None:
        """The reader acts on it."""
        match event:
            case TrainingLost() if self.reader is not None:
                self.reader.lose_steps()
            case WeightsMoved(weights) if self.reader is not None:
                self.reader.updates.renew(weights)
