"""Log-probabilities and entropies from hidden states, without the logits of all tokens at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from areal_sc.algorithms.vocabulary_sums import (
    VocabularySums,
    fused,
    gradient_of_logits,
    is_fused,
    rounded_exponentials,
    sums_over,
)

_LEAST_BIAS: Final = -1e30
"""Least bias that is added: finite in float32, also over a small temperature."""

_OF_TENSOR_CORES: Final = (torch.bfloat16, torch.float16)
"""Types that are multiplied there and summed in float32."""


@dataclass(frozen=True)
class VocabularyPart:
    """The tokens whose logits this rank computes; the other ranks of its group compute the rest.

    Attributes:
        start: the first of them.
        group: all ranks of it must make the same calls, with the same hidden states.
    """

    start: int
    group: dist.ProcessGroup | None

    def locate(self, targets: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, K] targets as counted here, 0 where another rank has them, and whether it does."""
        local = targets - self.start
        is_foreign = (local < 0) | (local >= size)
        return local.masked_fill(is_foreign, 0), is_foreign

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Over the ranks, in place."""
        dist.all_reduce(values, group=self.group)
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """The maximum over the ranks, in place."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def join(self, values: torch.Tensor) -> torch.Tensor:
        """[N, K] of each of M ranks, as [N, M * K]."""
        assert self.group is not None
        everyone = values.new_zeros(self.group.size(), *values.shape)
        everyone[self.group.rank()] = values
        return self.sum(everyone).transpose(0, 1).flatten(1)


class OutputRows(Protocol):
    """Which rows of an output layer a rank has, and how all of them are used, piece by piece."""

    @property
    def num_rows(self) -> int:
        """V, of all ranks that have some of them."""

    def pieces(self, width: int) -> Iterable[range]:
        """What is used at a time.

        Args:
            width: H.
        """

    def rows_in(self, piece: range, device: torch.device) -> torch.Tensor | slice:
        """The rows of a piece, in its order, as an index."""

    def places_in(self, piece: range, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, K] whether each of these rows is in a piece, and its place in it, else 0."""

    def gather(self, own: torch.Tensor, piece: range) -> torch.Tensor:
        """[M, H] the values of a piece, in the dtype of the hidden states."""

    def new_gradient(self, own: torch.Tensor, num_rows: int) -> torch.Tensor:
        """What the gradient of a piece of so many rows is added to."""

    def take_gradient(
        self, own: torch.Tensor, gradient: torch.Tensor, piece: range
    ) -> torch.Tensor | None:
        """Takes what `new_gradient` gave; returns what autograd gets."""


@dataclass(frozen=True)
class _AllRows:
    """The output layer of a rank that has all rows, in one piece."""

    num_rows: int
    dtype: torch.dtype
    adds_gradient: bool

    def pieces(self, width: int) -> Iterable[range]:
        return [range(self.num_rows)]

    def rows_in(self, piece: range, device: torch.device) -> slice:
        return slice(None)

    def places_in(self, piece: range, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones_like(rows, dtype=torch.bool), rows

    def gather(self, own: torch.Tensor, piece: range) -> torch.Tensor:
        return own.to(self.dtype)

    def new_gradient(self, own: torch.Tensor, num_rows: int) -> torch.Tensor:
        if self.adds_gradient:
            return gradient_of(own)
        return torch.zeros_like(own, dtype=_sum_dtype(self.dtype))

    def take_gradient(
        self, own: torch.Tensor, gradient: torch.Tensor, piece: range
    ) -> torch.Tensor | None:
        return None if self.adds_gradient else gradient.to(own.dtype)


def chunked_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperatures: torch.Tensor | None = None,
    chunk_tokens: int = 1024,
    kept_tokens: int = 0,
    vocabulary: VocabularyPart | None = None,
    adds_gradient: bool = False,
    rows: OutputRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax((hidden @ weight.T + bias) / temperatures) at the targets, and the entropy.

    At most `chunk_tokens` rows of logits exist at one time; the backward pass computes them
    again, chunk by chunk. Logits and sums are float32, also for 16-bit inputs (float64 stays).

    Args:
        hidden: [N, H] final hidden states.
        weight: [V, H] of the output layer, or this rank's rows of it; it is rounded to the dtype of
            `hidden`, its gradient is not.
        targets: [N] int64, the token whose probability is asked at each position; or [N, K], of
            several tokens at each.
        bias: [V] of the output layer, if it has one.
        temperatures: [N] > 0, what the logits of each position are divided by; None: 1.
        chunk_tokens: >= 1.
        kept_tokens: up to so many tokens, what a GPU needs of their logits for the backward pass is
            kept in bfloat16, if `hidden` is of it: a fourth product less.
        vocabulary: of which the V rows are a part; None: all of it.
        adds_gradient: the gradient of `weight`, a float32 leaf, is added to `weight.grad` and given
            to nobody else, so that no second one of its size exists.
        rows: how the V rows are spread over ranks, all of which make the call and go backward
            through it; None: this one has all.
    Returns: logprobs, shaped as `targets`, and entropy [N] in nats, differentiable in `hidden`,
        `weight` and `bias`.
    """
    assert targets.shape[:1] == hidden.shape[:1], "targets for each hidden state"
    assert temperatures is None or temperatures.shape == targets.shape[:1], "one for each"
    if rows is None:
        rows = _AllRows(len(weight), hidden.dtype, adds_gradient)
    is_few = len(targets) <= chunk_tokens
    # float16 has no room for small exponentials
    is_rounded = is_fused(hidden) and hidden.dtype is torch.bfloat16 and not is_few
    keeps = torch.is_grad_enabled() and (is_few or (is_rounded and len(targets) <= kept_tokens))
    columns = targets if targets.dim() == 2 else targets[:, None]
    logprobs, entropy = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, columns, temperatures, rows, chunk_tokens, vocabulary, keeps
    )
    # a copy: FSDP does not take a view as the output of a model
    return (logprobs if targets.dim() == 2 else logprobs[:, 0].clone()), entropy


@torch.no_grad()
def chunked_top_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    top_k: int,
    *,
    bias: torch.Tensor | None = None,
    temperatures: torch.Tensor | None = None,
    chunk_tokens: int = 1024,
    vocabulary: VocabularyPart | None = None,
    rows: OutputRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` most probable tokens, in chunks as `chunked_logprobs`, which has the arguments.

    Args: top_k: at most V, of all ranks.
    Returns: logprobs [N, top_k] in nats, falling, and [N, top_k] int64 the tokens.
    """
    rows = rows or _AllRows(len(weight), hidden.dtype, adds_gradient=False)
    sums, _ = _no_sums(hidden, 0)
    best = torch.full_like(sums.peak, -torch.inf)[:, None].repeat(1, top_k)
    tokens = torch.zeros_like(best, dtype=torch.int64)
    numbers = torch.arange(rows.num_rows, device=hidden.device)
    if vocabulary is not None:
        numbers += vocabulary.start
    for piece in rows.pieces(weight.shape[1]):
        in_piece = rows.rows_in(piece, hidden.device)
        values, own_bias = rows.gather(weight, piece), None if bias is None else bias[in_piece]
        of_piece = numbers[in_piece]
        for start in range(0, len(hidden), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits = scaled_logits(hidden[part], values, own_bias, _part_of(temperatures, part))
            found = logits.topk(min(top_k, len(of_piece)))
            best[part], tokens[part] = _highest(
                torch.cat([best[part], found.values], 1),
                torch.cat([tokens[part], of_piece[found.indices]], 1),
                top_k,
            )
            sums.part(part).add(sums_over(logits, None)[0])
    if vocabulary is not None:
        best, tokens = _highest(vocabulary.join(best), vocabulary.join(tokens), top_k)
        sums.move(vocabulary.max(sums.peak.clone()))
        sums.total = vocabulary.sum(sums.total.clone())
    return (best - sums.peak[:, None]) - sums.total.log()[:, None], tokens


def top_logprobs_of_logits(
    logits: torch.Tensor, top_k: int, *, temperatures: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from full logits [N, V], all at once."""
    found = _logprobs_of(logits, temperatures).topk(top_k)
    return found.values, found.indices


def _highest(
    values: torch.Tensor, tokens: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, top_k] of [N, M] values the highest, and their tokens."""
    found = values.topk(top_k)
    return found.values, tokens.gather(1, found.indices)


def logprobs_of_logits(
    logits: torch.Tensor, targets: torch.Tensor, *, temperatures: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities of `chunked_logprobs` from full logits [N, V], all at once."""
    logprobs = _logprobs_of(logits, temperatures)
    entropy: torch.Tensor = _Entropy.apply(logprobs)  # type: ignore[no-untyped-call]
    columns = targets if targets.dim() == 2 else targets[:, None]
    return logprobs.gather(-1, columns).view(targets.shape), entropy


def _logprobs_of(logits: torch.Tensor, temperatures: torch.Tensor | None) -> torch.Tensor:
    logits = _at_least_float32(logits)
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    return logits.log_softmax(-1)


class _Entropy(torch.autograd.Function):
    """[N] of log-probabilities [N, V]; keeps these alone, which their own gradient needs anyway."""

    @staticmethod
    def forward(ctx: Any, logprobs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logprobs)
        probabilities = logprobs.exp()  # of -inf: 0, whose summand is 0
        summands: torch.Tensor = torch.special.entr(probabilities, out=probabilities)
        return summands.sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        logprobs: torch.Tensor = ctx.saved_tensors[0]
        probabilities = logprobs.exp()
        weighed: torch.Tensor = torch.special.xlogy(probabilities, probabilities)
        return weighed.add_(probabilities).mul_(-grad[:, None])


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float32, but for values in float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _at_least_float32(values: torch.Tensor) -> torch.Tensor:
    return values.to(_sum_dtype(values.dtype))


def output_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """[N, V] of an output layer, at least float32, summed in float32 whatever the inputs are.

    Args: those of `chunked_logprobs`.
    """
    if _multiplies_rounded(hidden) and hidden.dtype == weight.dtype:
        # tensor cores, without rounding the result
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = _at_least_float32(hidden) @ _at_least_float32(weight).t()
    # -inf leaves a token out: probability 0 times a finite logit is 0, and times -inf it is NaN
    return logits if bias is None else logits.add_(_at_least_float32(bias).clamp(min=_LEAST_BIAS))


def float32_linear(head: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """The [..., V] `output_logits` of an output layer for [..., H]; differentiable."""
    logits: torch.Tensor = _Float32Linear.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, -2), head.weight, head.bias
    )
    return logits.view(*hidden.shape[:-1], -1)


class _Float32Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        return output_logits(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        return (
            gradient_product(grad, weight).to(hidden.dtype),
            gradient_product(grad.t(), hidden).to(weight.dtype),
            None if bias is None else grad.sum(0).to(bias.dtype),
        )


def scaled_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperatures: torch.Tensor | None,
) -> torch.Tensor:
    """The logits of `output_logits`, each token's divided by its temperature."""
    logits = output_logits(hidden, weight, bias)
    return logits if temperatures is None else logits.div_(temperatures[:, None])


class _ChunkedLogprobs(torch.autograd.Function):
    """Sums over the vocabulary grow piece by piece, relative to the highest logit so far.

    Keeps the inputs and the log-sum-exp [N]; with one chunk also its probabilities [N, V], or the
    logits where their gradient is fused; with several that are kept, exponentials in 16 bits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperatures: torch.Tensor | None,
        rows: OutputRows,
        chunk_tokens: int,
        vocabulary: VocabularyPart | None,
        keeps: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_foreign = None
        if vocabulary is not None:
            targets, is_foreign = vocabulary.locate(targets, rows.num_rows)
        sums, of_targets = _no_sums(hidden, targets.shape[1])
        kept, peaks = list[torch.Tensor](), list[torch.Tensor]()
        for piece in rows.pieces(weight.shape[1]):
            values = rows.gather(weight, piece)
            own_bias = None if bias is None else bias[rows.rows_in(piece, hidden.device)]
            is_in, places = rows.places_in(piece, targets)
            for start in range(0, len(targets), chunk_tokens):
                part = slice(start, start + chunk_tokens)
                logits = output_logits(hidden[part], values, own_bias)
                found = logits.gather(1, places[part])
                if temperatures is not None:
                    found = found / temperatures[part, None]
                of_targets[part].add_(found.masked_fill_(~is_in[part], 0))
                of_piece, for_backward = sums_over(logits, _part_of(temperatures, part))
                if keeps:
                    peaks.append(of_piece.peak.clone())
                    if len(targets) > chunk_tokens:
                        for_backward = fused(
                            rounded_exponentials,
                            logits,
                            _part_of(temperatures, part),
                            peaks[-1],
                            hidden.dtype,
                        )
                    kept.append(for_backward)
                sums.part(part).add(of_piece)
                del logits, for_backward  # before those of the next chunk come
        if vocabulary is not None and is_foreign is not None:
            sums.move(vocabulary.max(sums.peak.clone()))
            own = (
                sums.total[:, None],
                sums.weighed[:, None],
                of_targets.masked_fill(is_foreign, 0),
            )
            joined = vocabulary.sum(torch.cat(own, 1))
            sums.total, sums.weighed, of_targets = joined[:, 0], joined[:, 1], joined[:, 2:]
        for of_piece_kept, peak in zip(kept, peaks, strict=True):
            if not is_fused(of_piece_kept):
                of_piece_kept.div_((sums.total * (sums.peak - peak).exp())[:, None])
        normalizer, entropy = sums.normalizer, sums.entropy
        logprobs = (of_targets - sums.peak[:, None]) - sums.total.log()[:, None]
        are_rounded = bool(kept) and len(targets) > chunk_tokens
        ctx.save_for_backward(
            hidden,
            weight,
            bias,
            targets,
            is_foreign,
            temperatures,
            normalizer,
            entropy,
            *kept,
            *(peaks if are_rounded else ()),
        )
        ctx.num_kept = len(kept)
        ctx.rows, ctx.chunk_tokens, ctx.vocabulary = rows, chunk_tokens, vocabulary
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, is_foreign, temperatures, normalizer, entropy, *others = (
            ctx.saved_tensors
        )
        kept, peaks = iter(others[: ctx.num_kept]), iter(others[ctx.num_kept :])
        rows, (needs_hidden, needs_weight, needs_bias) = ctx.rows, ctx.needs_input_grad[:3]
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(targets, dtype=normalizer.dtype)
        of_all = grad_logprobs if temperatures is None else grad_logprobs / temperatures[:, None]
        of_targets = of_all if is_foreign is None else of_all.masked_fill(is_foreign, 0)
        scale = of_all.sum(1)
        dtype = normalizer.dtype
        grad_hidden = torch.zeros_like(hidden, dtype=dtype) if needs_hidden else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if needs_bias else None
        grad_weight = None
        for piece in rows.pieces(weight.shape[1]):
            values = rows.gather(weight, piece)
            in_piece = rows.rows_in(piece, hidden.device)
            own_bias = None if bias is None else bias[in_piece]
            is_in, places = rows.places_in(piece, targets)
            of_piece = of_targets.masked_fill(~is_in, 0)
            grad_values = rows.new_gradient(weight, len(values)) if needs_weight else None
            for start in range(0, len(targets), ctx.chunk_tokens):
                part = slice(start, start + ctx.chunk_tokens)
                grad_logits = _logits_gradient(
                    hidden[part],
                    values,
                    own_bias,
                    _part_of(temperatures, part),
                    places[part],
                    normalizer[part],
                    scale[part],
                    of_piece[part],
                    entropy[part],
                    _part_of(grad_entropy, part),
                    next(kept, None),
                    next(peaks, None),
                )
                if grad_hidden is not None:
                    _add_gradient_product(grad_hidden[part], grad_logits, values)
                if grad_values is not None:
                    _add_gradient_product(grad_values, grad_logits.t(), hidden[part])
                if grad_bias is not None:
                    grad_bias[in_piece] += grad_logits.sum(0, dtype=dtype)
                del grad_logits
            if grad_values is not None:
                grad_weight = rows.take_gradient(weight, grad_values, piece)
        if grad_hidden is not None and ctx.vocabulary is not None:
            ctx.vocabulary.sum(grad_hidden)
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, *(None,) * 6


def _no_sums(hidden: torch.Tensor, num_targets: int) -> tuple[VocabularySums, torch.Tensor]:
    """The sums over no logits, and [N, K] zeros for the logits of the targets."""
    dtype = _sum_dtype(hidden.dtype)
    zeros = hidden.new_zeros(3, len(hidden), dtype=dtype)
    # a peak that every logit is above, and differences to which are finite
    zeros[0] = torch.finfo(dtype).min / 4
    return VocabularySums(*zeros), zeros.new_zeros(len(hidden), num_targets)


def _logits_gradient(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperatures: torch.Tensor | None,
    targets: torch.Tensor,
    normalizer: torch.Tensor,
    scale: torch.Tensor,
    of_targets: torch.Tensor,
    entropy: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    kept: torch.Tensor | None,
    peak: torch.Tensor | None,
) -> torch.Tensor:
    """[N, V] gradient by the logits of `output_logits`, at least float32; rounded to 16 bits where
    it is fused and the products that it goes into are of these.

    Args:
        targets, of_targets: [N, K] of all targets.
        kept: [N, V] probabilities, or the logits where it is fused; None: computed again.
        peak: [N] of `rounded_exponentials`, which are kept in their place; None: they are not.
        all others: see `gradient_of_logits`.
    """
    if is_fused(hidden):
        logits = output_logits(hidden, weight, bias) if kept is None else kept
        gradient: torch.Tensor = fused(
            gradient_of_logits,
            logits,
            temperatures,
            normalizer,
            targets[:, 0],
            of_targets[:, 0],
            scale,
            entropy,
            grad_entropy,
            hidden.dtype if _multiplies_rounded(hidden) else normalizer.dtype,
            peak,
        )
        others = of_targets[:, 1:].to(gradient.dtype)
        return gradient.scatter_add_(-1, targets[:, 1:], others)
    probabilities = kept
    if probabilities is None:
        logits = scaled_logits(hidden, weight, bias, temperatures)
        probabilities = logits.sub_(normalizer[:, None]).exp_()
    of_entropy = None
    if grad_entropy is not None:
        of_entropy = entropy_gradient(probabilities, entropy, grad_entropy)
        if temperatures is not None:
            of_entropy.div_(temperatures[:, None])
    # d logprob_k / d logit_v = (1[v = target_k] - p_v) / temperature
    is_ours = kept is None
    gradient = probabilities.mul_(-scale[:, None]) if is_ours else probabilities * -scale[:, None]
    if of_entropy is not None:
        gradient += of_entropy
    return gradient.scatter_add_(-1, targets, of_targets.to(gradient.dtype))


def gradient_of(weight: torch.Tensor) -> torch.Tensor:
    """`weight.grad`, zeros where it had none: what may be added to.

    Args:
        weight: a parameter itself; what autograd keeps of it in its place would lose the gradient.
    """
    assert weight.is_leaf, "the gradient would be lost"
    assert weight.requires_grad, "the gradient would be lost"
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def entropy_gradient(
    probabilities: torch.Tensor, entropy: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """[N, V] d H / d logit_v = -p_v (log p_v + H), times `grad`. A p_v of 0 has none."""
    weighed: torch.Tensor = torch.special.xlogy(probabilities, probabilities)
    return weighed.addcmul_(probabilities, entropy[:, None]).mul_(-grad[:, None])


def _multiplies_rounded(other: torch.Tensor) -> bool:
    """Whether what is multiplied with it is rounded before, for the tensor cores."""
    return other.is_cuda and other.dtype in _OF_TENSOR_CORES


def _part_of(values: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    """Where there are values."""
    return None if values is None else values[part]


def _add_gradient_product(
    total: torch.Tensor, grad_logits: torch.Tensor, other: torch.Tensor
) -> None:
    """Adds `_gradient_product` to a sum in its dtype; it is never stored."""
    if _multiplies_rounded(other):
        factors = (grad_logits.to(other.dtype), other, torch.float32)
        torch.ops.aten.addmm.dtype_out(total, *factors, out=total)
    else:
        total.addmm_(grad_logits, other.to(total.dtype))


def gradient_product(grad_logits: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Gradient times weight or hidden; on CUDA 16 bits go through the tensor cores."""
    if _multiplies_rounded(other):
        return torch.mm(grad_logits.to(other.dtype), other, out_dtype=torch.float32)
    return grad_logits @ other.to(grad_logits.dtype)
