"""DPOTrainer: direct preference optimization on the user's pairs of answers.

The reference is asked once, before training: what it says of a pair is two numbers, which stay in
`reference.json` of the run folder. So no second model is in memory while one is trained.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.config.schema import ActorConfig
from areal_sc.controller.starting import start
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.demonstrations.rows import Item, encode_pairs
from areal_sc.engines.handles import make_actor
from areal_sc.records.metrics import Summary
from areal_sc.trainer.row_trainer import RowTrainer, pair_metrics, scores

logger = logging.getLogger(__name__)


class _Reference(msgspec.Struct, frozen=True):
    """What the reference said.

    Attributes:
        digest: of the pairs and of the reference's name.
        logprobs: of the chosen and the rejected answer of each pair, in nats.
    """

    digest: str
    logprobs: list[tuple[float, float]]


class DPOTrainer(RowTrainer):
    """Trains one model on pairs of which one answer is preferred; see docs/dpo.md."""

    def fit(
        self,
        rows: Iterable[Mapping[str, Any]],
        *,
        batch_size: int,
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        of_margin: str = "sigmoid",
        of_row: str = "sum",
        cross_entropy: float = 0.0,
        held_out: Iterable[Mapping[str, Any]] | None = None,
        reference: ActorConfig | None = None,
        use_chat_template: bool = True,
    ) -> Summary:
        """Trains for `total_steps` steps and leaves the model in `<run_dir>/model`.

        Args:
            rows: with `chosen` and `rejected`, and `prompt` unless these begin alike.
            batch_size: pairs a step; every pair is taken once before one is taken again.
            beta, label_smoothing, of_margin, of_row, cross_entropy: see `algorithms.pairs.dpo`.
            held_out: pairs that the evaluations measure: their loss without a cross entropy, the
                share that is ordered right (`accuracy`) and the mean margin.
            reference: None: the model that training begins with.
            use_chat_template: False: rows of plain texts, for a base model.
        Raises: WorkflowError: a row is no pair, or the chat template does not tell where its
            answers are; ConfigError: a setting of the loss is impossible. Both before any worker
            is started.
        """
        settings = {
            "beta": beta,
            "label_smoothing": label_smoothing,
            "of_margin": of_margin,
            "of_row": of_row,
            "cross_entropy": cross_entropy,
        }
        loss = NamedLoss("dpo", settings)
        loss.check()
        with self.opened():
            training, held = self._encoded(
                rows, held_out, encode_pairs, use_chat_template=use_chat_template
            )
            pairs = [*training, *held]
            if not self.config.dry_run:
                pairs = self._with_reference(pairs, reference or self.config.actor)
            num_training = len(training)
            judged = pairs[num_training:]

            def judge(actor: TrainController) -> Mapping[str, float]:
                margins = []
                for (chosen, rejected), pair in zip(scores(actor, judged), judged, strict=True):
                    gained = _gain(pair["chosen"], chosen, of_row)
                    margins.append(beta * (gained - _gain(pair["rejected"], rejected, of_row)))
                return pair_metrics(margins, label_smoothing, of_margin=of_margin, beta=beta)

            return self._train(pairs[:num_training], batch_size, loss, judged, judge)

    def _with_reference(self, pairs: Sequence[Item], config: ActorConfig) -> list[Item]:
        """The pairs with `reference_logprob` in both answers."""
        path = self.folder.path / "reference.json"
        adapter = [config.lora.path] if config.has_adapter and config.lora.path else []
        named = msgspec.json.encode([config.path, config.seed, pairs, *adapter])
        digest = hashlib.blake2b(named, digest_size=16).hexdigest()
        known: _Reference | None = None
        try:
            known = msgspec.json.decode(path.read_bytes(), type=_Reference)
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError) as error:
            self.display.warning(f"{path} cannot be read, the reference is asked again: {error}")
        if known is None or known.digest != digest:
            frozen = make_actor(replace(config, is_frozen=True))
            model = TrainController(frozen, self.scheduler, role="reference")
            with self.display.phase("reference"), start(model):
                known = _Reference(digest, [(c, r) for c, r in scores(model, pairs)])
            self.folder.write_atomic(path, msgspec.json.encode(known))
        return [
            {
                name: {**pair[name], "reference_logprob": logprob}
                for name, logprob in zip(("chosen", "rejected"), logprobs, strict=True)
            }
            for pair, logprobs in zip(pairs, known.logprobs, strict=True)
        ]


def _gain(answer: Item, logprob: float, of_row: str) -> float:
    """log pi / pi_ref of an answer, or its mean over the tokens; `logprob` is that of pi."""
    gain: float = logprob - answer["reference_logprob"]
    return gain / sum(answer["loss_mask"]) if of_row == "mean" else gain
