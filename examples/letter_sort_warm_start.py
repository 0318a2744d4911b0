"""The model that reinforcement learning starts from: imitation of mostly wrong demonstrations."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from letter_sort_task import LetterSortDemonstrations, write_untrained_folder

from areal_sc import TrainController, make_actor, start
from areal_sc.config.lora_settings import LoraConfig
from areal_sc.config.schema import ActorConfig, LrSchedule, OptimizerConfig
from areal_sc.schedulers.base import Scheduler


@dataclass(frozen=True)
class WarmStart:
    """How the model is made.

    Attributes:
        num_steps: training steps of supervised learning.
        batch_size: demonstrations a step; none is seen twice.
        sizes: of the model, as `write_untrained_folder` takes them.
    """

    num_steps: int = 600
    batch_size: int = 32
    lr: float = 4e-3
    sizes: dict[str, int] | None = None

    def train(
        self,
        actor_config: ActorConfig,
        demonstrations: LetterSortDemonstrations,
        scheduler: Scheduler,
        on_step: Callable[[int, float], None] = lambda step, loss: None,
    ) -> None:
        """Writes the model to `actor_config.path`, through the controller that RL uses too.

        Args:
            on_step: called after each step with its number, from 0, and its loss.
        """
        untrained = Path(scheduler.config.run_dir) / "untrained"
        write_untrained_folder(untrained, **(self.sizes or {}))
        optimizer = OptimizerConfig(
            lr=self.lr,
            beta2=0.98,
            schedule=LrSchedule.cosine,
            warmup_steps=self.num_steps // 20,
            total_steps=self.num_steps,
        )
        imitation = replace(
            actor_config,
            path=str(untrained),
            random_init=True,
            lora=LoraConfig(),  # all of it is trained
            optimizer=optimizer,
        )
        actor = TrainController(make_actor(imitation), scheduler)
        with start(actor):
            for step in range(self.num_steps):
                first = step * self.batch_size
                rows = range(first, first + self.batch_size)
                on_step(step, actor.sft_update(demonstrations, rows)["loss"])
            actor.save_hf(actor_config.path)
        shutil.rmtree(untrained)
