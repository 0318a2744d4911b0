"""What a loss sees: the trained tokens of a micro-batch, the rows that they stand in, and counts.

A row is never cut: all its trained tokens are in one micro-batch, and a loss sees them on one rank,
also where `actor.parallel.sequence` lays the row over several. So a loss is a plain function of
tensors, which meets no other rank; the parts that micro-batches and ranks give add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

MEANS = ("token", "sequence", "episode", "prompt")
"""What `LossTokens.mean` may count as equal."""


@dataclass(frozen=True, slots=True)
class LossRows:
    """R rows; one without trained tokens adds nothing to a mean.

    Attributes:
        of_token: [N] int64, number of each token's row, 0 to R - 1, ascending.
        position: [N] int64, place of each token in its row; the first token of a row has 0.
        num_tokens: [R] int64, tokens of the row, prompt included.
        reward: [R] float32.
        group, episode: [R] int64; rows of one prompt have one group, rows of one answer or agent
            one episode, whose number no other group has.
        num_loss_tokens, num_episode_tokens, num_group_tokens: [R] int64, trained tokens of the row,
            of its episode and of its group, as far as they are in this minibatch, on all ranks.
        fields: looked up by name: of a field with a value a row, [R, *shape]; of one that a group
            shares, or whose values have lengths of their own, a list of R tensors.
    """

    of_token: torch.Tensor
    position: torch.Tensor
    num_tokens: torch.Tensor
    reward: torch.Tensor
    group: torch.Tensor
    episode: torch.Tensor
    num_loss_tokens: torch.Tensor
    num_episode_tokens: torch.Tensor
    num_group_tokens: torch.Tensor
    fields: Mapping[str, Any] = field(default_factory=dict)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """[R, ...] sums over each row's tokens, of [N, ...]; differentiable."""
        zeros = values.new_zeros(len(self.num_tokens), *values.shape[1:])
        return zeros.index_add(0, self.of_token, values)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """[R, ...] means over each row's trained tokens, of [N, ...]; differentiable."""
        counts = self.num_loss_tokens.to(values.dtype).clamp(min=1)
        return self.sum(values) / counts.view(-1, *[1] * (values.dim() - 1))

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """[N, ...] the value of each token's row, of [R, ...]; differentiable."""
        return values[self.of_token]

    def spread_field(self, name: str) -> torch.Tensor:
        """[N, *shape] the value of a field of rows at each token.

        Raises: KeyError: there is no such field of rows. ValueError: its values are not spread.
        """
        values = self.fields[name]
        if isinstance(values, list):
            raise ValueError(
                f"field {name!r} has a tensor a row, which does not stand at tokens: read "
                f"tokens.rows.fields[{name!r}]"
            )
        return self.spread(values)


@dataclass(frozen=True, slots=True)
class RowTokens:
    """N trained tokens of whole rows, without a model: what a token function sees.

    Attributes:
        fields: looked up by name: [N, ...] values of the rows' field at these tokens; `advantages`
            are those of the token, or else of its row, where they are known. See `LossRows.fields`.
        rows: where the tokens stand.
        returns: [N] float32, of the token's answer, or else the reward of its row.
    """

    fields: Mapping[str, torch.Tensor]
    rows: LossRows
    returns: torch.Tensor


@dataclass(frozen=True, slots=True)
class LossCounts:
    """What a minibatch holds, over all ranks and micro-batches.

    Attributes:
        tokens: trained tokens, > 0.
        sequences, episodes, prompts: rows, episodes and groups with at least one trained token.
    """

    tokens: int
    sequences: int
    episodes: int
    prompts: int


@dataclass(frozen=True, slots=True)
class LossTokens:
    """N trained tokens of one micro-batch; all of the rows that they stand in.

    Attributes:
        logprobs: [N] float32, nats, of the current weights; requires grad.
        entropy: [N] float32, nats, of the current distribution; requires grad.
        fields: looked up by name: [N, ...] values of the rows' field at these tokens, of
            `behavior_logprobs`, say; `advantages` are float32, each of the token or of its row,
            `proximal_logprobs` those of the weights before the first minibatch. What rows have
            once is in `rows.fields`; one number or tensor a row is found here, too.
        rows: where the tokens stand.
        counts: denominators.
        values: [N] float32, of a model with a value head, before each token, or behind it where the
            loss reads scores; requires grad. None: it has none.
        top_logprobs: [N, k] float32, nats, of the tokens in the rows' `teacher_top_tokens`, of the
            current weights; requires grad. Without the field k is 0.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    fields: Mapping[str, torch.Tensor]
    rows: LossRows
    counts: LossCounts
    values: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None

    @property
    def predicted_values(self) -> torch.Tensor:
        """[N] the values. Raises: ValueError: the model has no value head."""
        if self.values is None:
            raise ValueError("this loss reads values: expected a model with a value head")
        return self.values

    @property
    def num_loss_tokens(self) -> int:
        """Trained tokens of the minibatch over all ranks and micro-batches, > 0."""
        return self.counts.tokens

    def mean(self, values: torch.Tensor, over: str = "token") -> torch.Tensor:
        """This micro-batch's part of a mean over the minibatch; the parts add up to it.

        Args:
            values: [N], one a token.
            over: `token`: each trained token counts the same (DAPO, arXiv:2503.14476, eq. 8).
                `sequence`, `episode`, `prompt`: the mean over these of the mean over their tokens
                (GRPO, arXiv:2402.03300, eq. 3).
        Returns: scalar; differentiable.
        Raises: ValueError: `over` is none of these.
        """
        rows, counts = self.rows, self.counts
        if over == "token":
            return values.sum() / counts.tokens
        of_rows = {
            "sequence": (rows.num_loss_tokens, counts.sequences),
            "episode": (rows.num_episode_tokens, counts.episodes),
            "prompt": (rows.num_group_tokens, counts.prompts),
        }
        if over not in of_rows:
            raise ValueError(f"over={over!r}: expected one of {', '.join(MEANS)}")
        num_tokens, count = of_rows[over]
        return (rows.sum(values) / num_tokens.to(values.dtype).clamp(min=1)).sum() / count


def loss_tokens_of(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    fields: Mapping[str, torch.Tensor],
    num_loss_tokens: Sequence[int],
    *,
    groups: Sequence[int] | None = None,
    episodes: Sequence[int] | None = None,
    rewards: Sequence[float] | None = None,
) -> LossTokens:
    """The tokens of a minibatch that is one micro-batch of one rank: what a loss is tried on.

    Args:
        logprobs, entropy, fields: see `LossTokens`; row after row.
        num_loss_tokens: [R] trained tokens of each row; one token of context stands before them.
        groups: [R] of the rows; None: each row is a group.
        episodes: [R] of the rows, in their groups; None: each row is an episode.
        rewards: [R]; None: 0.
    Raises: ValueError: the numbers do not fit each other.
    """
    counts, device = list(num_loss_tokens), logprobs.device
    rows = range(len(counts))
    in_group = list(rows if groups is None else groups)
    in_episode = list(zip(in_group, rows if episodes is None else episodes, strict=True))
    group_tokens, episode_tokens = Counter[int](), Counter[tuple[int, int]]()
    for group, episode, count in zip(in_group, in_episode, counts, strict=True):
        group_tokens[group] += count
        episode_tokens[episode] += count
    if sum(counts) != len(logprobs):
        raise ValueError(f"rows of {sum(counts)} tokens for {len(logprobs)} log-probabilities")

    def tensor(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    distinct = list(episode_tokens)
    return LossTokens(
        logprobs,
        entropy,
        fields,
        LossRows(
            of_token=torch.repeat_interleave(tensor(rows), tensor(counts)),
            position=tensor([place for count in counts for place in range(1, count + 1)]),
            num_tokens=tensor(counts) + 1,
            reward=torch.tensor(rewards or [0.0] * len(counts), device=device),
            group=tensor(in_group),
            episode=tensor([distinct.index(it) for it in in_episode]),
            num_loss_tokens=tensor(counts),
            num_episode_tokens=tensor([episode_tokens[it] for it in in_episode]),
            num_group_tokens=tensor([group_tokens[it] for it in in_group]),
        ),
        LossCounts(
            tokens=sum(counts),
            sequences=sum(count > 0 for count in counts),
            episodes=len(+episode_tokens),
            prompts=len(+group_tokens),
        ),
    )
