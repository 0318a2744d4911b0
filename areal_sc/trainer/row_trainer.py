"""RowTrainer: a run that trains on rows of a data set; nothing is generated.

    before any worker starts    the rows are tokenized; what is wrong with one is told
    for each step               update_rows                    trains, version += 1    train_s
    now and then                score_rows of held-out rows    evaluation

The rows of a step follow from its number and the seed. So a run that was killed goes on with the
same ones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.config.schema import ModelHead
from areal_sc.controller.background import Standstill
from areal_sc.controller.ledger.ledger_records import LedgerState
from areal_sc.controller.rollout.rejections import RejectionCounts, RolloutState
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.demonstrations.rows import EncodedRows, Item
from areal_sc.demonstrations.turns import TurnEncoder
from areal_sc.engines.handles import make_actor
from areal_sc.errors import StepLost
from areal_sc.hub import local_model
from areal_sc.preflight.checks import check_models
from areal_sc.records.metrics import (
    EvaluationResult,
    StepMetrics,
    Summary,
    without_empty_means,
)
from areal_sc.records.metrics_log import History
from areal_sc.sources.prompts import prompt_at
from areal_sc.trainer.checkpoints import Checkpoints
from areal_sc.trainer.evaluation.best_model import BestModel
from areal_sc.trainer.run import Run
from areal_sc.trainer.steps import BareStep

logger = logging.getLogger(__name__)

_SCORED_AT_ONCE = 256
"""Rows of one call: so none takes long, however many rows are held out."""

Judge = Callable[[TrainController], Mapping[str, float]]
"""What an evaluation says of the present weights."""


@dataclass(frozen=True)
class NoRollout:
    """What snapshots keep of a run that generates nothing."""

    actor: TrainController

    @property
    def standstill(self) -> Standstill:
        """Whether the run is paused."""
        return self.actor.standstill

    def state(self) -> RolloutState:
        """The version alone."""
        return RolloutState(LedgerState(version=self.actor.version), RejectionCounts({}, 0))

    def go_back(self, state: RolloutState) -> None:
        """The rows of a step follow from its number."""


class RowTrainer(Run):
    """Base of the trainers of rows.

    Attributes:
        head: of the model that is trained.
    """

    head = ModelHead.lm
    generates = False

    def _encoded(
        self,
        rows: Iterable[Mapping[str, Any]],
        held_out: Iterable[Mapping[str, Any]] | None,
        encode: Callable[[Iterable[Mapping[str, Any]], TurnEncoder, int], EncodedRows],
        *,
        use_chat_template: bool,
    ) -> tuple[list[Item], list[Item]]:
        """The items to train on, and those that are held out, for the model of the settings.

        Args:
            encode: see `demonstrations.rows`.
        Raises: WorkflowError: a row cannot be used. ModelError: the model has no tokenizer.
        """
        from areal_sc.engines.tokenizer import load_tokenizer, read_end_token_ids

        with self.display.phase("datasets"):
            check_models(self.config)
            actor = self.config.actor
            folder = local_model(actor.path)
            tokenizer = load_tokenizer(folder)
            ends = read_end_token_ids(folder, tokenizer)
            encoder = TurnEncoder(tokenizer, ends, use_chat_template=use_chat_template)
            items: dict[str, list[Item]] = {"training": [], "held-out": []}
            for name, given in zip(items, (rows, held_out), strict=True):
                if given is None:
                    continue
                found = encode(given, encoder, actor.max_tokens_per_micro_batch)
                items[name] = found.items
                if found.num_too_long:
                    self.display.warning(
                        f"{found.num_too_long} of {found.num_too_long + len(found.items)} {name} "
                        "rows are left out: they have more than actor.max_tokens_per_micro_batch="
                        f"{actor.max_tokens_per_micro_batch} tokens"
                    )
            for text in encoder.complaints.values():
                self.display.warning(text)
        return items["training"], items["held-out"]

    def _train(
        self,
        items: Sequence[Item],
        batch_size: int,
        loss: NamedLoss,
        judged: Sequence[Item],
        judge: Judge,
    ) -> Summary:
        """Trains for `total_steps` steps.

        Args:
            batch_size: items a step.
            judged: rows that are held out.
            judge: evaluates on them before, after and every `evaluation.every_steps`, if any are.
        """
        ppo = replace(
            self.config.actor.ppo, loss=loss.name, loss_settings=dict(loss.settings)
        )  # the loss that ranks try, and a dry run
        config = replace(self.config.actor, head=self.head, ppo=ppo)
        actor = TrainController(make_actor(config), self.scheduler)
        for rows in (items, judged):  # in this order, also where nothing is evaluated at first
            if rows:
                actor.copy_prompts(rows)
        rollout = NoRollout(actor)
        checkpoints = Checkpoints(self, actor, rollout)
        every_steps, total = self.config.evaluation.every_steps, self.config.total_steps
        done = {(it.name, it.step) for it in History.read(self.folder.metrics_path).evaluations}
        best = BestModel(self, {})

        def evaluate(name: str) -> None:
            if judged and (name, actor.version) not in done:
                if name != "before":
                    best.begin()
                best.note_results([self._tell_evaluation(name, actor.version, judge(actor))])

        def begin() -> BareStep:  # where wishes to stop are heard
            if actor.version == 0:
                evaluate("before")
                done.add(("before", 0))
            return BareStep(actor, actor.standstill)

        steps = self._steps(actor, rollout, begin)
        with self._started(actor, rollout), closing(steps):
            best.remember(History.read(self.folder.metrics_path).evaluations, actor.version)
            for step in steps:
                version = actor.version
                best.remember(best.results, version)  # the run may have gone back
                if best.has_enough:
                    break
                places = range(version * batch_size, (version + 1) * batch_size)
                indices = [prompt_at(place, len(items), self.config.seed) for place in places]
                try:
                    stats = actor.update_rows(items, indices, loss)
                except StepLost as error:
                    step.lose(error)
                    continue
                num_rows = sum(2 if "chosen" in items[index] else 1 for index in indices)
                self._tell_row_step(actor, num_rows, step.seconds, stats)
                checkpoints.after_step()
                if every_steps and actor.version % every_steps == 0 and actor.version < total:
                    evaluate("periodic")
                best.settle()
            self.keep_last_step()
            evaluate("after")
            best.finish()
            self._write_model(actor)
            return self._write_summary(History.read(self.folder.metrics_path))

    def _tell_row_step(
        self, actor: TrainController, num_rows: int, seconds: float, stats: Mapping[str, float]
    ) -> None:
        metrics = StepMetrics(
            step=actor.version,
            reward=math.nan,  # there is none
            group_staleness_mean=0.0,
            group_staleness_max=0,
            token_staleness_mean=0.0,
            token_staleness_max=0,
            num_rows=num_rows,
            num_generated_tokens=0,
            num_trained_tokens=int(stats["num_loss_tokens"]),
            step_time_s=seconds,
            wait_s=0.0,
            train_s=seconds,
            sync_s=0.0,
            mean_sequence_length=stats["num_tokens"] / num_rows,
            num_train_workers=actor.engine.num_workers,
            train=without_empty_means(stats),
        )
        self._tell_metrics(metrics)

    def _tell_evaluation(
        self, name: str, version: int, found: Mapping[str, float]
    ) -> EvaluationResult:
        result = EvaluationResult(
            name=name,
            step=version,
            reward=math.nan,
            num_prompts=int(found["num_rows"]),
            version_min=version,
            version_max=version,
            temperature=1.0,
            workflow={key: value for key, value in found.items() if key != "num_rows"},
        )
        self.tell(lambda tracker: tracker.on_evaluation(result))
        return result


def scores(
    model: TrainController, items: Sequence[Item], output: str = "logprobs"
) -> list[tuple[float, ...]]:
    """The score of each demonstration, or of both answers of each pair.

    Args:
        output: `logprobs`, in nats, or `scores`, of a model with a value head.
    """
    found = list[tuple[float, ...]]()
    for first in range(0, len(items), _SCORED_AT_ONCE):
        last = min(first + _SCORED_AT_ONCE, len(items))
        found += model.score_rows(items, range(first, last), output)
    return found


def pair_metrics(
    margins: Sequence[float],
    label_smoothing: float = 0.0,
    *,
    of_margin: str = "sigmoid",
    beta: float = 1.0,
) -> dict[str, float]:
    """The loss of pairs, the share that is ordered right, and the mean margin.

    Args:
        margins: see `algorithms.pairs`: above 0 where the chosen answer is preferred.
        label_smoothing, of_margin, beta: see `algorithms.pairs.dpo`.
    """
    s, count = label_smoothing, len(margins)
    losses = {
        "sigmoid": lambda m: (1 - s) * _softplus(-m) + s * _softplus(m),
        "square": lambda m: ((m - 0.5) / beta) ** 2,
        "hinge": lambda m: max(0.0, 1 - m),
    }
    return {
        "loss": math.fsum(map(losses[of_margin], margins)) / count,
        "accuracy": sum(margin > 0 for margin in margins) / count,
        "margin": math.fsum(margins) / count,
        "num_rows": count,
    }


def _softplus(x: float) -> float:
    """log(1 + e^x), also where e^x is infinite."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
