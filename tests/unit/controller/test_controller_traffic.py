"""What travels on the controllers' sockets, in the real wire form, for simulated workers."""

from __future__ import annotations

import pytest
from simulation.behavior import Behavior
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import run_virtual

MAX_BYTES_A_ROW = 1024
MAX_DIFFERENCE_BYTES = 40
"""msgpack writes 100 in one byte and 10,000 in three; a row's length is named some ten times."""


def bytes_a_row(tokens: int, group_size: int, num_ranks: int, num_rollout_workers: int) -> float:
    """Both controllers' traffic, start-up and heartbeats included, over the rows trained.

    A step of 32 groups takes about two seconds.
    """
    settings = Settings(
        num_steps=10,
        batch_groups=32,
        group_size=group_size,
        max_context_tokens=20_000,
        num_ranks=num_ranks,
        num_rollout_workers=num_rollout_workers,
        num_minibatches=4,
        behavior=Behavior(completion_tokens=tokens, generation_s=lambda rng: 3.0 * rng.random()),
    )
    run = TrainingRun(settings)

    async def count() -> int:
        async with run.started():
            for _ in range(settings.num_steps):
                await run.step()
            return run.runtime.transport.num_bytes

    num_bytes = run_virtual(count())
    lengths = [row.num_loss_tokens for batch in run.batches for row in batch.rows]
    assert set(lengths) == {tokens}
    return num_bytes / len(lengths)


@pytest.mark.parametrize(
    ("group_size", "num_ranks", "num_rollout_workers"), [(1, 1, 1), (8, 1, 4), (1, 2, 4)]
)
def test_a_trajectory_costs_the_controllers_less_than_a_kilobyte_whatever_its_length(
    group_size: int, num_ranks: int, num_rollout_workers: int
) -> None:
    short, long = (
        bytes_a_row(tokens, group_size, num_ranks, num_rollout_workers) for tokens in (100, 10_000)
    )
    assert max(short, long) < MAX_BYTES_A_ROW, (short, long)
    assert abs(long - short) <= MAX_DIFFERENCE_BYTES, (short, long)
