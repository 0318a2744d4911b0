"""What trains the models of clients: all parameters of one, or adapters of many beside one base.

Source of the folders: `RUN_DIR/serving/models/<model>/<name>`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.controller.rollout.rejections import INITIAL_STATE
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.serving.given_rows import GivenRows
from areal_sc.serving.journal import Source
from areal_sc.serving.rank_turns import SaveWanted, StepWanted
from areal_sc.serving.trained_model import TrainedModel

_LOSS: Final = NamedLoss("areal_sc.serving.losses:summed")


class _OnRanks:
    """What all hosts have."""

    def __init__(self, actor: TrainController, rows: GivenRows, models: Path) -> None:
        self.rows = rows
        self._actor = actor
        self._models = models

    @property
    def version(self) -> int:
        return self._actor.version

    @property
    def goes_on(self) -> bool:
        return self._actor.found is not None

    @property
    def has_snapshot(self) -> bool:
        return self._actor.ranks.step.num_updates == 0


class WholeModel(_OnRanks):
    """A `Host` of one model, all of whose parameters are trained."""

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

    def rest(self, place: int, model: TrainedModel, wanted: SaveWanted) -> None:
        raise AssertionError("there is one model, and it does not rest")


class Adapters(_OnRanks):
    """A `Host` of adapters, each of which has its own optimizer and steps."""

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
        self._actor.save_adapter(place, folder, with_optimizer=wanted.has_optimizer)

    def rest(self, place: int, model: TrainedModel, wanted: SaveWanted) -> None:
        if not (self._models / model.file_name / wanted.name).is_dir():
            self.save(place, model, wanted)


def _told(metrics: Mapping[str, float], place: int, step: StepWanted) -> dict[str, float]:
    """Of a step of one adapter; it was left out where its gradient is 0, or not finite."""
    norm = metrics.get(f"grad_norm_{place}")
    rest = {"skipped": 1.0} if norm is None else {"grad_norm": norm}
    return {"lr": step.optimizer.lr, **rest}
