"""Runs that train on rows of a data set, in which nothing is generated: SFT, reward models, DPO.

    before any worker starts    the rows are tokenized; what is wrong with one is told
    for each step               update_rows                    trains, version += 1    train_s
    now and then                score_rows of held-out rows    evaluation

The rows of a step follow from its number and the seed. So a run that was killed goes on with the
same ones.

DPO asks its reference once, before training: what it says of a pair is two numbers, which stay in
`reference.json` of the run folder. So no second model is in memory while one is trained.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from areal_sc.algorithms.named_loss import CROSS_ENTROPY, NamedLoss
from areal_sc.config.schema import ActorConfig, ModelHead
from areal_sc.controller.background import Standstill
from areal_sc.controller.ledger.ledger_records import LedgerState
from areal_sc.controller.rollout.rejections import RejectionCounts, RolloutState
from areal_sc.controller.starting import start
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.demonstrations.rows import EncodedRows, Item, encode_demonstrations, encode_pairs
from areal_sc.demonstrations.turns import TurnEncoder
from areal_sc.engines.base import SCORES
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
        from areal_sc.engines.picture_processor import picture_processor
        from areal_sc.engines.tokenizer import load_tokenizer, read_end_token_ids

        with self.display.phase("datasets"):
            check_models(self.config)
            actor = self.config.actor
            folder = local_model(actor.path)
            tokenizer = load_tokenizer(folder)
            ends = read_end_token_ids(folder, tokenizer)
            encoder = TurnEncoder(
                tokenizer,
                ends,
                use_chat_template=use_chat_template,
                processor=picture_processor(folder, tokenizer),
            )
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
