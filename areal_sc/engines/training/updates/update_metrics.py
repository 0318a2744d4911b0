"""What an update reports: the metrics of all micro-batches and ranks, combined.

A user's loss chooses them. So ranks exchange them as objects, in one collective that is the same
whatever is in them, and which tells of a loss that has failed on some rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from traceback import format_exception_only
from typing import Final

import torch

from areal_sc.algorithms.losses import Metric, Metrics
from areal_sc.engines.training.process_group import ProcessGroup
from areal_sc.errors import ArealError, WorkflowError

MISMATCH: Final = "mismatch"
"""Sum of differences of log-probabilities, in nats, over the tokens that `NUM_COMPARED` counts."""
MISMATCH_NOISE: Final = "mismatch_noise"
"""Beside a mismatch: nats by which rounding in the trainer's type moves a log-probability."""
NUM_COMPARED: Final = "num_compared_tokens"
OTHER_EXPERTS: Final = "routing_mismatch"
"""Number of given experts that the trainer would not have chosen, of `NUM_GIVEN` ones."""
NUM_GIVEN: Final = "num_given_experts"
WORST: Final = (
    "mismatch_max",
    "mismatch_token",
    "mismatch_sampler_logprob",
    "mismatch_trainer_logprob",
)
"""The largest difference of a token, the token's id, and both log-probabilities of it."""


@dataclass
class UpdateMetrics:
    """Collects over the updates of one call.

    Attributes:
        metrics: this rank's, by name, on the device.
        gradient_norms: global norm of each update, before clipping; one with a norm that is not
            finite was skipped, and there was none where the norm is 0. Of adapters beside each
            other: those that were not skipped.
        place_norms: those of each of them, by place.
        num_micro_batches: of the rank that has most.
        worst: [4] float32 of each micro-batch that compares tokens, as `WORST` names them.
        failure: what the loss has raised on this rank; nothing is added then.
    """

    metrics: Metrics = field(default_factory=dict)
    gradient_norms: list[float] = field(default_factory=list)
    place_norms: dict[int, list[float]] = field(default_factory=dict)
    num_micro_batches: int = 0
    worst: list[torch.Tensor] = field(default_factory=list)
    failure: BaseException | None = None

    def add_norms(self, norms: Mapping[int, float]) -> None:
        """Adds those of an update, by place."""
        for place, norm in norms.items():
            self.place_norms.setdefault(place, []).append(norm)
        finite = [norm for norm in norms.values() if math.isfinite(norm)]
        self.gradient_norms.append(math.hypot(*finite) if finite else math.nan)

    def add(self, **metrics: Metric) -> None:
        """Adds those of one micro-batch.

        Raises: ValueError: one of them was combined otherwise in an earlier micro-batch.
        """
        for name, metric in metrics.items():
            value = metric.value.detach().reshape(()).float()
            metric = replace(metric, value=value, weight=float(metric.weight))
            known = self.metrics.get(name)
            _check_kinds(name, [metric.combine, *([known.combine] if known else [])])
            self.metrics[name] = known + metric if known else metric

    def summary(
        self,
        world: ProcessGroup,
        *,
        is_counted: bool,
        own_tokens: Mapping[str, int],
        num_loss_tokens: int,
        lr: float,
        tells_places: bool = False,
    ) -> dict[str, float]:
        """The same numbers on every rank.

        Args:
            world: all ranks.
            is_counted: this rank's metrics count, and not another's of the same tokens.
            own_tokens: numbers of tokens of this rank's rows, by name.
            num_loss_tokens: trained tokens of all ranks.
            lr: learning rate of the step.
            tells_places: also `grad_norm_<place>`, means over the updates that a place has made.
        Returns: every metric that the loss gave, and `entropy`; `loss` and `grad_norm`, means over
            the updates; `lr`; sums of `own_tokens`; `num_loss_tokens`, `num_effective_tokens`,
            `num_updates`, `num_skipped_updates`, `num_micro_batches` (of the rank that has most);
            and, where there are tokens of the weights that the step begins from, the `mismatch` of
            trainer and sampler there, the mean difference of log-probabilities in nats, and the
            `WORST` token. Effective tokens are trained ones that go through the model: not those of
            rows of advantage 0. Means over nothing are NaN, as `grad_norm` if all updates were
            skipped.
        Raises: WorkflowError: on all ranks: the loss has failed on one, or ranks combine a metric
            in different ways.
        """
        combined, worst = self._combined(world, own_tokens, is_counted=is_counted)
        finite = [norm for norm in self.gradient_norms if math.isfinite(norm)]
        made = _made(self.gradient_norms)
        num_skipped = len(self.gradient_norms) - len(finite)
        loss = combined.pop("loss", 0.0) / max(1, len(self.gradient_norms))
        mismatch, num_compared = (combined.pop(name, 0.0) for name in (MISMATCH, NUM_COMPARED))
        if num_compared:
            combined |= {MISMATCH: mismatch / num_compared, **worst}
        others, num_given = (combined.pop(name, 0.0) for name in (OTHER_EXPERTS, NUM_GIVEN))
        if num_given:
            combined[OTHER_EXPERTS] = others / num_given
        return {
            "loss": loss,
            "grad_norm": sum(made) / len(made) if made else math.nan if num_skipped else 0.0,
            "lr": lr,
            "num_loss_tokens": float(num_loss_tokens),
            "num_effective_tokens": 0.0,  # unless there are any
            "num_updates": float(len(made)),
            "num_skipped_updates": float(num_skipped),
            "num_micro_batches": float(self.num_micro_batches),
            **(self._of_places() if tells_places else {}),
            **combined,
        }

    def _of_places(self) -> dict[str, float]:
        made = {place: _made(norms) for place, norms in self.place_norms.items()}
        return {f"grad_norm_{place}": sum(it) / len(it) for place, it in made.items() if it}

    def _combined(
        self, world: ProcessGroup, own_tokens: Mapping[str, int], *, is_counted: bool
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Each metric of all ranks, of the ranks that have it; and the worst token, if any."""
        own, worst = self._own(world.device, own_tokens) if is_counted else ({}, [])
        everyone = world.gather((self._failed(), own, worst))
        for rank, (message, *_) in enumerate(everyone):
            if message:
                raise WorkflowError(f"train rank {rank}: {message}") from self.failure
        given = dict[str, list[_Numbers]]()
        for _, metrics, _ in everyone:
            for name, numbers in metrics.items():
                given.setdefault(name, []).append(numbers)
        try:
            for name, of_ranks in given.items():
                _check_kinds(name, [kind for kind, _, _ in of_ranks])
        except ValueError as error:
            raise WorkflowError(f"the loss: {error}") from error
        combined = {name: _combine(of_ranks) for name, of_ranks in given.items()}
        worst = max((of_rank for *_, of_rank in everyone), default=[])
        return combined, dict(zip(WORST, worst, strict=bool(worst)))

    def _own(
        self, device: torch.device, own_tokens: Mapping[str, int]
    ) -> tuple[dict[str, _Numbers], list[float]]:
        """This rank's, which come from the device together: the host waits once."""
        metrics = {name: ("sum", float(count), 0.0) for name, count in own_tokens.items()}
        if not self.metrics:
            return metrics, []
        given = [metric.value.to(device)[None] for metric in self.metrics.values()]
        numbers = torch.cat([*given, *self.worst]).cpu().tolist()
        values, worst = numbers[: len(given)], numbers[len(given) :]
        metrics |= {
            name: (metric.combine, value, metric.weight)
            for (name, metric), value in zip(self.metrics.items(), values, strict=True)
        }
        size = len(WORST)
        tokens = [worst[place : place + size] for place in range(0, len(worst), size)]
        return metrics, max(tokens, default=[])

    def _failed(self) -> str:
        if self.failure is None:
            return ""
        if isinstance(self.failure, ArealError):
            return str(self.failure) or type(self.failure).__name__
        # also of an exception whose text cannot be made
        return f"the loss raised {''.join(format_exception_only(self.failure)).strip()}"


def _made(norms: Sequence[float]) -> list[float]:
    """The norms of updates that were made."""
    return [norm for norm in norms if math.isfinite(norm) and norm != 0]


_Numbers = tuple[str, float, float]
"""How a metric is combined; its value; its weight."""


def _check_kinds(name: str, kinds: Sequence[str]) -> None:
    """Raises: ValueError: they differ, so there is no number of all micro-batches and ranks."""
    if len(set(kinds)) > 1:
        raise ValueError(
            f"metric {name!r}: expected the same kind in every micro-batch and on every rank, got "
            f"{' and '.join(sorted(set(kinds)))}"
        )


def _combine(of_ranks: Sequence[_Numbers]) -> float:
    kind = of_ranks[0][0]
    if kind == "max":
        return max((value for _, value, _ in of_ranks), key=lambda it: (math.isnan(it), it))
    total = sum(value for _, value, _ in of_ranks)
    if kind == "sum":
        return total
    weight = sum(weight for _, _, weight in of_ranks)
    return total / weight if weight else math.nan
