"""Tokens and rows for losses, made by hand: uneven rows, several rows an episode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from areal_sc.algorithms.loss_tokens import LossCounts, LossRows, LossTokens

ROW = tuple[int, int, int]
"""Trained tokens of a row, its group, and its episode within the group."""

NUM_TOP = 16
"""Tokens of the teacher."""


def made_tokens(shape: Sequence[ROW], seed: int, scale: float = 0.5) -> LossTokens:
    """Float64 tokens of rows of this shape, which are the whole minibatch; all fields of losses."""
    generator = torch.Generator().manual_seed(seed)

    def normal(count: int, by: float) -> torch.Tensor:
        return by * torch.randn(count, generator=generator, dtype=torch.float64)

    row_tokens = torch.tensor([row[0] for row in shape])
    group = torch.tensor([row[1] for row in shape])
    names = {pair: number for number, pair in enumerate(dict.fromkeys(row[1:] for row in shape))}
    episode = torch.tensor([names[row[1:]] for row in shape])
    of_token = torch.repeat_interleave(torch.arange(len(shape)), row_tokens)
    count = int(row_tokens.sum())

    def tokens_of(ids: torch.Tensor) -> torch.Tensor:
        return torch.stack([row_tokens[ids == own].sum() for own in ids])

    starts = row_tokens.cumsum(0) - row_tokens
    rows = LossRows(
        of_token=of_token,
        position=3 + torch.arange(count) - starts[of_token],
        num_tokens=row_tokens + 3,
        reward=normal(len(shape), 1.0),
        group=group,
        episode=episode,
        num_loss_tokens=row_tokens,
        num_episode_tokens=tokens_of(episode),
        num_group_tokens=tokens_of(group),
    )
    behavior = -normal(count, 1.5).abs() - 0.05
    proximal = (behavior + normal(count, scale)).clamp(max=-1e-3)
    logprobs = (proximal + normal(count, scale)).clamp(max=-1e-3)
    fields = {
        "behavior_logprobs": behavior,
        "proximal_logprobs": proximal,
        "reference_logprobs": behavior + normal(count, 0.3),
        "teacher_logprobs": behavior + normal(count, 0.3),
        "advantages": normal(len(shape), 1.0)[of_token],
        "staleness": torch.randint(0, 5, (count,), generator=generator),
        "values": normal(count, 1.0),
        "returns": normal(count, 1.0),
    }
    counts = LossCounts(count, len(shape), len(episode.unique()), len(group.unique()))
    entropy, values = normal(count, 1.0).abs(), normal(count, 1.0)
    of_all = normal(count * NUM_TOP * 2, 2.0).view(count, -1).log_softmax(-1)
    fields["teacher_top_logprobs"], fields["teacher_top_tokens"] = of_all.topk(NUM_TOP)
    of_student = (of_all + normal(count * NUM_TOP * 2, scale).view(count, -1)).log_softmax(-1)
    return LossTokens(
        logprobs.requires_grad_(),
        entropy.requires_grad_(),
        fields,
        rows,
        counts,
        values.requires_grad_(),
        of_student.gather(1, fields["teacher_top_tokens"]).requires_grad_(),
    )


def one_row(num_tokens: int) -> LossTokens:
    """A row of so many tokens."""
    return made_tokens([(num_tokens, 0, 0)], seed=0)


def shapes(min_groups: int = 1) -> st.SearchStrategy[list[ROW]]:
    """Rows of 1 to 7 tokens, up to three an episode, three episodes a group, three groups."""
    episode = st.lists(st.integers(1, 7), min_size=1, max_size=3)
    group = st.lists(episode, min_size=1, max_size=3)
    groups = st.lists(group, min_size=min_groups, max_size=3)
    return groups.map(
        lambda found: [
            (length, group, episode)
            for group, episodes in enumerate(found)
            for episode, lengths in enumerate(episodes)
            for length in lengths
        ]
    )
