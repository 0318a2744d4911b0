from __future__ import annotations

import io
import math
import statistics
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from areal_sc.config.schema import RolloutConfig
from areal_sc.controller.background import Standstill
from areal_sc.controller.rollout.rejections import Rejections
from areal_sc.metadata import BatchMetadata, RowMetadata
from areal_sc.records.metrics import StepMetrics
from areal_sc.rejection import Rejection, RejectionKind
from areal_sc.trainer.display import make_display
from areal_sc.trainer.steps import Step, count
from areal_sc.workers.calls import RejectedEpisodes


def failed(kind: RejectionKind, num_episodes: int) -> RejectedEpisodes:
    return RejectedEpisodes(num_episodes, Rejection(kind, "boom", "KeyError", "task.py:12"))


def sides(stats: list[dict[str, float]]) -> tuple[Any, Any]:
    """What a step asks of both controllers.

    Args:
        stats: of living workers; as they are when they are asked for.
    """
    ranks: Future[list[dict[str, float]]] = Future()
    ranks.set_result([])
    actor = SimpleNamespace(
        version=0,
        engine=SimpleNamespace(num_workers=1),
        num_bytes=0,
        num_restarts=0,
        publication_stats={},
        begin_worker_stats=lambda: ranks,
    )
    rollout = SimpleNamespace(
        rejections=Rejections(RolloutConfig(rejection_window=9, max_rejection_rate=1.0)),
        groups=SimpleNamespace(admission=SimpleNamespace(lead=1.0, slack=None), episodes_again={}),
        num_workers=2,
        config=SimpleNamespace(staleness_bound=4),
        num_bytes=0,
        num_restarts=0,
        batch_metrics={},
        standstill=Standstill(),
        account=lambda: {"rejected": {}},
        worker_stats=lambda: stats,
    )
    return actor, rollout


BATCH = BatchMetadata("b", 0, (), (RowMetadata(0, 0, 4, 1.0, 0, ((0, 2),), 0),))


def test_a_step_counts_the_episodes_that_were_rejected_since_the_one_before() -> None:
    actor, rollout = sides([{"generated_tokens": 0.0, "cancelled_tokens": 0.0}])
    told: list[StepMetrics] = []
    rollout.rejections.add_group([failed(RejectionKind.reward_error, 5)], 8)
    step = Step(actor, rollout, count(actor, rollout), told.append)
    step.record(BATCH, {})
    rollout.rejections.add_group([failed(RejectionKind.reward_error, 2)], 8)
    rollout.rejections.add_group([failed(RejectionKind.timeout, 1)], 8)
    Step(actor, rollout, step.counters, told.append).record(BATCH, {})
    assert [dict(metrics.rejected_episodes) for metrics in told] == [
        {},
        {"reward_error: KeyError at task.py:12": 2, "timeout: KeyError at task.py:12": 1},
    ]


def test_groups_whose_answers_all_have_one_reward_teach_nothing() -> None:
    actor, rollout = sides([])
    rewards = ((0, 1.0), (0, 0.5), (1, 0.0), (1, 0.0), (2, 1.0), (2, 1.0), (3, 0.0), (3, 1.0))
    rows = [
        RowMetadata(group, 0, 4, reward, 0, ((0, 2),), episode)
        for episode, (group, reward) in enumerate(rewards)
    ]
    rows += [replace(rows[0], group_id=4, returns=((0.0, 1), (1.0, 1)))]  # an episode alone
    told: list[StepMetrics] = []
    step = Step(actor, rollout, count(actor, rollout), told.append)
    step.record(BatchMetadata("b", 0, (), tuple(rows)), {})
    assert told[0].signal_share == 0.4
    assert told[0].num_groups == 5
    rewards_of_episodes = [reward for _, reward in rewards] + [1.0]
    assert told[0].reward_std == pytest.approx(statistics.pstdev(rewards_of_episodes))
    assert told[0].reward_std_in_groups == pytest.approx(math.sqrt((0.125 + 0.5) / 4))
    assert told[0].answer_tokens == 2.0


def test_no_worker_was_up_when_the_step_began() -> None:
    stats: list[dict[str, float]] = []
    actor, rollout = sides(stats)
    told: list[StepMetrics] = []
    step = Step(actor, rollout, count(actor, rollout), told.append)
    stats.append({"generated_tokens": 7.0, "cancelled_tokens": 0.0})
    step.record(BATCH, {})
    assert told[0].num_generated_tokens == 7


def test_a_mean_over_nothing_is_not_told_and_a_loss_that_is_broken_is() -> None:
    actor, rollout = sides([])
    out = io.StringIO()
    display = make_display(Console(file=out, force_terminal=False))
    told: list[StepMetrics] = []
    for reported in (
        {"loss": 0.0, "grad_norm": 0.0, "entropy": math.nan, "own": math.nan},
        {"loss": math.nan, "grad_norm": math.nan, "entropy": math.nan},
    ):
        Step(actor, rollout, count(actor, rollout), told.append).record(BATCH, reported)
        display.on_step(told[-1])
    assert told[0].train == {"loss": 0.0, "grad_norm": 0.0}
    without_signal, broken = out.getvalue().splitlines()
    assert "loss=0 " in without_signal
    assert "nan" not in without_signal
    assert "entropy=nan loss=nan grad_norm=nan" in broken
