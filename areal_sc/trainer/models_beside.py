"""The models beside the policy, which a run's settings name: what they compute, and the critic.

    for each policy version:
        compute      a field of the batch from each of them       before advantages and updates
        update       those that are trained, on the same batch    after the policy's own updates

A model that is trained makes its next version at once, and the policy makes its own when the step
ends. So one may be a version ahead, where a step is done again: it is not trained twice then.
"""

from __future__ import annotations

from areal_sc.algorithms.named_loss import loss_of
from areal_sc.config.further_models import FURTHER_MODELS, further_models
from areal_sc.config.schema import GRPOConfig
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.engines.handles import make_model
from areal_sc.metadata import BatchMetadata
from areal_sc.schedulers.base import Scheduler


class ModelsBeside:
    """The controllers of these models.

    Attributes:
        controllers: by role.
    """

    def __init__(self, config: GRPOConfig, scheduler: Scheduler) -> None:
        self.controllers = {
            role: TrainController(make_model(config, role), scheduler, role=role)
            for role in further_models(config)
        }

    def compute(self, batch: BatchMetadata) -> BatchMetadata:
        """The batch with a field of each model.

        Raises: BatchLost: rows are gone.
        """
        for role, model in self.controllers.items():
            output, field = FURTHER_MODELS[role]
            batch = model.compute(batch, output, field=field)
        return batch

    def update(self, batch: BatchMetadata, version: int) -> dict[str, float]:
        """Trains those that are not frozen; their metrics, each with the role before its name.

        Args:
            version: of the policy, from which the step begins.
        Raises: BatchLost: rows are gone.
        """
        metrics: dict[str, float] = {}
        for role, model in self.controllers.items():
            if model.config.is_frozen or model.version != version:
                continue
            ppo = model.config.ppo
            found = model.update(batch, loss_of(ppo), num_minibatches=ppo.num_minibatches)
            metrics |= {f"{role}_{name}": number for name, number in found.items()}
        return metrics
