"""What trainers of pairs share: the pairs, and what held-out ones say of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from areal_sc.demonstrations.rows import Item, encode_pairs
from areal_sc.trainer.row_trainer import RowTrainer


class PairTrainer(RowTrainer):
    """Base of the trainers of pairs of answers, of which one is preferred."""

    def _encode_pairs(
        self,
        rows: Iterable[Mapping[str, Any]],
        held_out: Iterable[Mapping[str, Any]] | None,
        *,
        use_chat_template: bool,
    ) -> tuple[list[Item], list[Item]]:
        """The pairs to train on, and those that are held out.

        Raises: WorkflowError: a row is no pair.
        """
        with self.display.phase("datasets"):
            encoder = self._encoder(use_chat_template=use_chat_template)
            limit = self.config.actor.max_tokens_per_micro_batch
            training = encode_pairs(rows, encoder, limit)
            self._tell_left_out(training, "training")
            held = None if held_out is None else encode_pairs(held_out, encoder, limit)
            if held is not None:
                self._tell_left_out(held, "held-out")
            self._tell_complaints(encoder)
        return training.items, [] if held is None else held.items


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
