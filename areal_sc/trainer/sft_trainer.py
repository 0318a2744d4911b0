"""SFTTrainer: supervised fine-tuning on the user's conversations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from areal_sc.algorithms.named_loss import CROSS_ENTROPY
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.demonstrations.rows import encode_demonstrations
from areal_sc.records.metrics import Summary
from areal_sc.trainer.row_trainer import RowTrainer, scores


class SFTTrainer(RowTrainer):
    """Trains one model on what an assistant has answered; see docs/sft.md."""

    def fit(
        self,
        rows: Iterable[Mapping[str, Any]],
        *,
        batch_size: int,
        held_out: Iterable[Mapping[str, Any]] | None = None,
        use_chat_template: bool = True,
        last_turn_only: bool = False,
    ) -> Summary:
        """Trains for `total_steps` steps and leaves the model in `<run_dir>/model`.

        Args:
            rows: with `messages`, or `prompt` and `completion`.
            batch_size: rows a step; every row is taken once before one is taken again.
            held_out: rows whose loss the evaluations measure.
            use_chat_template: False: rows of plain texts, for a base model.
            last_turn_only: of `messages`, only the last turn of the assistant is trained.
        Raises: WorkflowError: a row is none of these, or the chat template does not tell where the
            assistant's turns are; before any worker is started.
        """
        encode = partial(encode_demonstrations, last_turn_only=last_turn_only)
        with self.opened():
            training, judged = self._encoded(
                rows, held_out, encode, use_chat_template=use_chat_template
            )

            def judge(actor: TrainController) -> Mapping[str, float]:
                num_tokens = sum(sum(item["loss_mask"]) for item in judged)
                total = sum(logprob for (logprob,) in scores(actor, judged))
                return {"loss": -total / num_tokens, "num_rows": len(judged)}

            return self._train(training, batch_size, CROSS_ENTROPY, judged, judge)
