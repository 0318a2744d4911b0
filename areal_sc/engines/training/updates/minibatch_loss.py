"""The loss of a minibatch, as gradients of the model's outputs: one micro-batch after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from areal_sc.algorithms.loss_tokens import LossCounts, LossTokens
from areal_sc.algorithms.losses import Loss, Metric, Metrics, checked
from areal_sc.config.schema import ModelHead
from areal_sc.engines.training.updates.micro_batches import MicroBatch, TokenFields
from areal_sc.engines.training.updates.update_metrics import MISMATCH, NUM_COMPARED, UpdateMetrics
from areal_sc.engines.training.updates.update_trace import UpdateTrace
from areal_sc.token_fields import GIVEN_WEIGHTS
from areal_sc.transport.packed_rows import PackedRows

Outputs = tuple[torch.Tensor, torch.Tensor]
"""[N] or [N, 1 + k] log-probabilities, as `MicroBatch.targets`, and [N] entropies, with gradient;
nats."""


@dataclass
class MinibatchLoss:
    """The loss of one micro-batch after the other, and what it reports.

    Attributes:
        compute_loss: of the tokens.
        rows: that the micro-batches are taken from.
        counts: what the minibatch holds on all ranks; the denominators.
        is_first: no weight has changed since the step began.
        version: of the policy that the step begins from.
        head: of the model.
        metrics: of the step; those of each micro-batch are added.
        trace: gets the outputs of some rows.

    The loss may be a user's. It sees copies of the outputs and gives their gradients, so whatever
    it returns or raises, the model's backward, in which ranks meet, is the same on all ranks.
    """

    compute_loss: Loss
    rows: PackedRows
    counts: LossCounts
    is_first: bool
    version: int
    head: ModelHead
    metrics: UpdateMetrics
    trace: UpdateTrace | None = None

    def of(self, batch: MicroBatch, outputs: Outputs) -> torch.Tensor:
        """A scalar with the gradient of this rank's summand of the minibatch's loss.

        Where the loss has failed that is 0, and `metrics.failure` says why.
        """
        logprobs, entropy = outputs
        logprobs = logprobs if logprobs.dim() == 2 else logprobs[:, None]
        known = batch.whole(torch.cat([logprobs.detach().t(), entropy.detach()[None]]))
        if self.trace is not None:
            self.trace.add(batch.token_index, torch.stack([known[0], known[-1]]))
        copies = known[:-1].t().requires_grad_(), known[-1].requires_grad_()
        gradients: Sequence[torch.Tensor | None] = (None, None)
        if self.metrics.failure is None:
            try:
                with torch.enable_grad():  # and afterwards, whatever the loss has set
                    gradients = self._gradients(batch, *copies)
            except KeyboardInterrupt:
                raise
            except BaseException as failure:  # the loss may raise anything
                self.metrics.failure = failure
        own = (None if it is None else it[batch.own] for it in gradients)
        of_logprobs, of_entropy = own
        value = (
            logprobs * (torch.zeros_like(logprobs) if of_logprobs is None else of_logprobs)
        ).sum()
        return value if of_entropy is None else value + (entropy * of_entropy).sum()

    def _gradients(
        self, batch: MicroBatch, outputs: torch.Tensor, entropy: torch.Tensor
    ) -> Sequence[torch.Tensor | None]:
        """Gradients of the loss by [N, 1 + k] log-probabilities, or values, and entropy; None: it
        does not depend on them."""
        assert batch.loss_rows is not None
        fields = TokenFields(batch.fields, batch.loss_rows, self.rows)
        is_lm = self.head is ModelHead.lm
        output = outputs[:, 0]
        if self.is_first and is_lm:
            own = output.detach()
            if "proximal_logprobs" in self.rows.fields:
                given = fields["proximal_logprobs"]
                own = torch.where(given.isnan(), own, given)
            fields["proximal_logprobs"] = own
        tokens = LossTokens(
            output if is_lm else torch.zeros_like(output),
            entropy,
            fields,
            batch.loss_rows,
            self.counts,
            values=None if is_lm else output,
            top_logprobs=outputs[:, 1:] if is_lm else None,
        )
        value, of_loss = checked(self.compute_loss(tokens))
        self.metrics.add(
            loss=Metric.sum(value),
            **({"entropy": Metric.mean(entropy)} if is_lm else {}),
            num_effective_tokens=Metric.sum(torch.ones_like(entropy)),
            **self._mismatch(fields, output.detach()),
            **of_loss,
        )
        if not value.requires_grad:
            return None, None
        return torch.autograd.grad(value, (outputs, entropy), allow_unused=True)

    def _mismatch(self, fields: TokenFields, output: torch.Tensor) -> Metrics:
        """How far the sampler's log-probabilities are from these, of tokens of the same weights."""
        names = ("behavior_logprobs", "versions")
        if not self.is_first or self.head is not ModelHead.lm:
            return {}
        if not all(name in self.rows.fields for name in names):
            return {}
        behavior, versions = (fields[name] for name in names)
        is_same = versions == self.version
        if GIVEN_WEIGHTS in fields:  # nobody has sampled these
            is_same &= fields[GIVEN_WEIGHTS] == 0
        gaps = (output - behavior).abs().masked_fill(~is_same, 0)
        if len(gaps):
            of_tokens = torch.stack([gaps, fields["input_ids"].float(), behavior, output])
            self.metrics.worst.append(of_tokens.index_select(1, gaps.argmax()[None])[:, 0])
        return {MISMATCH: Metric.sum(gaps), NUM_COMPARED: Metric.sum(is_same.float())}
