"""What models wish for, and what trains them: all parameters of one, or adapters of many.

Source of the folders: `RUN_DIR/serving/models/<model>/<name>`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.config.optimizer_settings import OptimizerConfig
from areal_sc.controller.rollout.rejections import INITIAL_STATE
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.serving.given_rows import GivenRows
from areal_sc.serving.journal import Source
from areal_sc.serving.trained_model import TrainedModel

_LOSS: Final = NamedLoss("areal_sc.serving.losses:summed")


RESTING: Final = "resting"
"""Begins the names of folders of models that rest."""


@dataclass(frozen=True)
class ScoreWanted:
    """The log-probabilities of rows: each row's, [T], nats."""

    rows: Sequence[int]


@dataclass(frozen=True)
class StepWanted:
    """An optimizer update on rows: its metrics."""

    rows: Sequence[int]
    optimizer: OptimizerConfig


@dataclass(frozen=True)
class SaveWanted:
    """The weights as they are, in a folder of the model.

    Attributes:
        has_optimizer: with the optimizer's state.
        is_shown: for samplers, from the next request of theirs on.
    """

    name: str
    has_optimizer: bool = False
    is_shown: bool = False


@dataclass(frozen=True)
class LoadWanted:
    """Other weights in place of those of the model."""

    source: Source


class Host(ABC):
    """What trains the models. Its methods block.

    Attributes:
        num_places: models that are trained together.
        publishes: weights for samplers are a version of the policy, and there is one model.
        rows: of all models, by number.
    """

    num_places: int
    publishes: bool

    def __init__(self, actor: TrainController, rows: GivenRows, models: Path) -> None:
        self.rows = rows
        self._actor = actor
        self._models = models

    @property
    def version(self) -> int:
        """Of the ranks."""
        return self._actor.version

    @property
    def goes_on(self) -> bool:
        """Whether the ranks are those of an earlier start; else they began anew."""
        return self._actor.found is not None

    @property
    def has_snapshot(self) -> bool:
        """Whether the ranks have changed nothing since they came to their version."""
        return self._actor.ranks.step.num_updates == 0

    @abstractmethod
    def enter(self, place: int, source: Source) -> None:
        """The weights at a place are those of a source."""

    @abstractmethod
    def score(self, rows: Mapping[int, Sequence[int]]) -> dict[int, list[Any]]:
        """By place, of rows by number, the log-probabilities."""

    @abstractmethod
    def step(self, steps: Mapping[int, StepWanted]) -> dict[int, dict[str, float]]:
        """By place, the metrics of an update."""

    @abstractmethod
    def save(self, place: int, model: TrainedModel, wanted: SaveWanted) -> None:
        """Writes a folder, unless it is one of a model that rests and is there; or publishes."""


class WholeModel(Host):
    """One model, all of whose parameters are trained."""

    num_places = 1
    publishes = True

    def __init__(
        self, actor: TrainController, rollout: RolloutController, rows: GivenRows, models: Path
    ) -> None:
        super().__init__(actor, rows, models)
        self._rollout = rollout

    def enter(self, place: int, source: Source) -> None:
        self._actor.load_snapshot(0)
        self._rollout.go_back(INITIAL_STATE)
        self._actor.share_weights(self._rollout)

    def score(self, rows: Mapping[int, Sequence[int]]) -> dict[int, list[Any]]:
        ((place, numbers),) = rows.items()
        return {place: self._actor.score_rows(self.rows, numbers, per_token=True)}

    def step(self, steps: Mapping[int, StepWanted]) -> dict[int, dict[str, float]]:
        ((place, wanted),) = steps.items()
        metrics = self._actor.update_rows(
            self.rows, wanted.rows, _LOSS, advances=False, optimizer=wanted.optimizer
        )
        return {place: metrics}

    def save(self, place: int, model: TrainedModel, wanted: SaveWanted) -> None:
        if wanted.is_shown:
            self._actor.publish_weights(self._rollout)
        else:
            self._actor.save_hf(self._models / model.file_name / wanted.name)


class Adapters(Host):
    """Adapters, each of which has its own optimizer and steps."""

    publishes = False

    def __init__(self, actor: TrainController, rows: GivenRows, models: Path) -> None:
        super().__init__(actor, rows, models)
        self.num_places = actor.config.lora.places

    def enter(self, place: int, source: Source) -> None:
        self._actor.fill_adapter(
            place,
            self._models / source.folder if source.folder else None,
            rank=source.rank or None,
            seed=source.seed,
            with_optimizer=source.has_optimizer,
        )

    def score(self, rows: Mapping[int, Sequence[int]]) -> dict[int, list[Any]]:
        numbers = [number for its in rows.values() for number in its]
        places = [place for place, its in rows.items() for _ in its]
        scores = iter(self._actor.score_rows(self.rows, numbers, per_token=True, adapters=places))
        return {place: [next(scores) for _ in its] for place, its in rows.items()}

    def step(self, steps: Mapping[int, StepWanted]) -> dict[int, dict[str, float]]:
        metrics = self._actor.update_rows(
            self.rows,
            [number for it in steps.values() for number in it.rows],
            _LOSS,
            optimizer={place: it.optimizer for place, it in steps.items()},
            adapters=[place for place, it in steps.items() for _ in it.rows],
        )
        return {place: _told(metrics, place, it) for place, it in steps.items()}

    def save(self, place: int, model: TrainedModel, wanted: SaveWanted) -> None:
        folder = self._models / model.file_name / wanted.name
        if not (wanted.name.startswith(RESTING) and folder.is_dir()):
            self._actor.save_adapter(place, folder, with_optimizer=wanted.has_optimizer)


def _told(metrics: Mapping[str, float], place: int, step: StepWanted) -> dict[str, float]:
    """Of a step of one adapter; it was left out where its gradient is 0, or not finite."""
    norm = metrics.get(f"grad_norm_{place}")
    rest = {"skipped": 1.0} if norm is None else {"grad_norm": norm}
    return {"lr": step.optimizer.lr, **rest}
