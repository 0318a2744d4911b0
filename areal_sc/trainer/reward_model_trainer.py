"""RewardModelTrainer: a model that says how good an answer is, from the user's pairs of answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.config.schema import ModelHead
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.demonstrations.rows import encode_pairs
from areal_sc.engines.base import SCORES
from areal_sc.records.metrics import Summary
from areal_sc.trainer.row_trainer import RowTrainer, pair_metrics, scores


class RewardModelTrainer(RowTrainer):
    """Trains one model with a value head; see docs/reward-model.md."""

    head = ModelHead.value

    def fit(
        self,
        rows: Iterable[Mapping[str, Any]],
        *,
        batch_size: int,
        label_smoothing: float = 0.0,
        held_out: Iterable[Mapping[str, Any]] | None = None,
        use_chat_template: bool = True,
    ) -> Summary:
        """Trains for `total_steps` steps and leaves the model in `<run_dir>/model`.

        Args:
            rows: with `chosen` and `rejected`, and `prompt` unless these begin alike.
            batch_size: pairs a step; every pair is taken once before one is taken again.
            label_smoothing: share of labels that may be wrong.
            held_out: pairs that the evaluations measure: their loss, the share that is ordered
                right (`accuracy`) and the mean margin.
            use_chat_template: False: rows of plain texts, for a base model.
        Raises: WorkflowError: a row is no pair, or the chat template does not tell where its
            answers are; ConfigError: label_smoothing is impossible. Both before any worker is
            started.
        """
        loss = NamedLoss("bradley_terry", {"label_smoothing": label_smoothing})
        loss.check()
        with self.opened():
            training, held = self._encoded(
                rows, held_out, encode_pairs, use_chat_template=use_chat_template
            )

            def judge(model: TrainController) -> Mapping[str, float]:
                margins = [chosen - rejected for chosen, rejected in scores(model, held, SCORES)]
                return pair_metrics(margins, label_smoothing)

            return self._train(training, batch_size, loss, held, judge)
