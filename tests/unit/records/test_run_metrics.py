from __future__ import annotations

import json

import pytest
from builders import make_evaluation, make_step

from areal_sc.records.metrics import StepMetrics, summarize


@pytest.mark.parametrize(
    ("wait_s", "train_s", "sync_s", "bound"),
    [
        (0.0, 1.0, 0.1, "training"),
        (0.1, 1.0, 0.1, "training"),
        (0.4, 0.5, 0.1, "rollout"),  # it waits, so faster training would not help
        (2.0, 0.5, 0.1, "rollout"),
        (0.1, 0.4, 0.6, "synchronisation"),
        (0.0, 0.0, 0.0, "training"),
    ],
)
def test_bound(wait_s: float, train_s: float, sync_s: float, bound: str) -> None:
    assert make_step(wait_s=wait_s, train_s=train_s, sync_s=sync_s).bound == bound


def test_rates_and_shares() -> None:
    step = make_step(num_masked_tokens=1000, num_wasted_tokens=5000)
    assert step.generated_tokens_per_s == 12_000
    assert step.trained_tokens_per_s == 8_000
    assert step.masked_share == 0.2  # of 4,000 trained and 1,000 masked
    assert step.wasted_share == 0.5
    nothing = make_step(num_trained_tokens=0, step_time_s=0.0)
    assert (nothing.masked_share, nothing.wasted_share, nothing.trained_tokens_per_s) == (0, 0, 0)


REQUIRED_IN_SUMMARY = {
    "accuracy_before",
    "accuracy_after",
    "greedy_accuracy_after",
    "num_steps",
    "wall_time_s",
    "max_token_staleness_trained",
    "max_group_staleness",
    "num_rows_trained",
    "num_rows_trained_twice",
    "num_episodes_rejected",
    "controller_bytes",
    "generated_tokens_per_s",
    "trained_tokens_per_s",
    "first_step_s",
}


def test_summary_of_a_run() -> None:
    steps = [
        make_step(1, controller_bytes=1000, num_rows=10, token_staleness_max=3),
        make_step(
            3,  # the record of the second is lost
            controller_bytes=2000,
            num_rows=20,
            group_staleness_max=12,
            step_time_s=1.5,
            wait_s=1.0,
            num_masked_tokens=50,
            num_wasted_tokens=7,
        ),
    ]
    evaluations = [
        make_evaluation("before", accuracy=0.2),
        make_evaluation("after", accuracy=0.9, reward=0.8),
        make_evaluation("greedy", accuracy=0.95, temperature=0.0),
    ]
    summary = summarize(
        steps,
        evaluations,
        wall_time_s=60.0,
        first_step_s=8.5,
        num_rows_trained=30,
        num_rows_trained_twice=0,
        num_episodes_rejected=4,
    )
    values = json.loads(summary.to_json())
    assert values.keys() >= REQUIRED_IN_SUMMARY
    expected = {
        "num_steps": 3,
        "wall_time_s": 60.0,
        "first_step_s": 8.5,
        "accuracy_before": 0.2,
        "accuracy_after": 0.9,
        "greedy_accuracy_after": 0.95,
        "reward_after": 0.8,
        "max_token_staleness_trained": 4,
        "max_group_staleness": 12,
        "num_rows_trained": 30,
        "num_rows_trained_twice": 0,
        "num_episodes_rejected": 4,
        "num_masked_tokens": 50,
        "num_wasted_tokens": 7,
        "controller_bytes": 3000,
        "generated_tokens_per_s": 12_000 / 2.0,
        "trained_tokens_per_s": 8_000 / 2.0,
        "wait_share": pytest.approx(1.05 / 2),
        "train_share": pytest.approx(0.8 / 2),
        "sync_share": pytest.approx(0.04 / 2),
    }
    assert {name: values[name] for name in expected} == expected


def test_evaluations_of_further_prompts_are_in_the_summary() -> None:
    """And the newest one on the way, which is the last one of a run that was stopped."""
    summary = summarize(
        [],
        [
            make_evaluation("before", accuracy=0.1),
            make_evaluation("math/before", accuracy=0.2),
            make_evaluation("code/before", accuracy=None, reward=0.4),
            make_evaluation("periodic", accuracy=0.3),
            make_evaluation("periodic", accuracy=0.5),
            make_evaluation("math/after", accuracy=0.9, reward=0.8),
        ],
    )
    assert (summary.accuracy_before, summary.accuracy_after) == (0.1, None)
    assert json.loads(summary.to_json())["other_evaluations"] == {
        "math/before": {"accuracy": 0.2, "reward": 0.2},
        "code/before": {"accuracy": None, "reward": 0.4},
        "periodic": {"accuracy": 0.5, "reward": 0.2},
        "math/after": {"accuracy": 0.9, "reward": 0.8},
    }


def test_summary_of_a_run_without_steps_or_evaluations() -> None:
    values = json.loads(summarize([], [], wall_time_s=1.0).to_json())
    assert values.keys() >= REQUIRED_IN_SUMMARY
    assert {
        value for name, value in values.items() if name not in ("num_steps", "wall_time_s")
    } == {None}


def test_a_record_has_every_field_property_and_metric() -> None:
    step = make_step(workflow={"accuracy": 0.3, "turns": 1.5}, train={"new": 2.0})
    record = json.loads(json.dumps(step.to_record()))
    assert record["workflow"] == {"accuracy": 0.3, "turns": 1.5}
    assert (record["accuracy"], record["bound"], record["train"]["new"]) == (0.3, "training", 2.0)
    assert StepMetrics.from_record(record) == step
    assert (step.value("turns"), step.value("new"), step.value("bound")) == (1.5, 2.0, "training")
    assert step.value("unknown") is None


def test_a_record_of_an_earlier_version_keeps_its_accuracy() -> None:
    record = make_step(accuracy=0.4).to_record()
    del record["workflow"]
    assert StepMetrics.from_record(record).accuracy == 0.4
