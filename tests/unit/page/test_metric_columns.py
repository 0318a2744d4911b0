"""Steps as columns: as in the file, also while it grows, goes back, or is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import make_evaluation, make_step

from areal_sc.page.metric_columns import MetricColumns
from areal_sc.records.metrics_log import History, MetricsLog


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def log(path: Path) -> Iterator[MetricsLog]:
    log = MetricsLog(path)
    yield log
    log.close()


def test_columns_are_what_the_file_says(path: Path, log: MetricsLog) -> None:
    log.on_evaluation(make_evaluation())
    log.on_step(make_step(1, reward=0.5, slack=None, counters={"generated_tokens": 5}))
    log.on_step(make_step(2, train={"loss": float("nan"), "own": 2}, rejected_episodes={"x": 3}))
    columns = MetricColumns(path)
    columns.follow()
    told = columns.since(0, 0)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    for name, values in told["columns"].items():
        section, _, inner = name.partition("/")
        for value, record in zip(values, steps, strict=True):
            expected = record[section].get(inner) if inner else record[name]
            assert value == expected or (expected is None and value != value), name
    plain = {n for n, value in steps[0].items() if not isinstance(value, dict)} - {"kind"}
    inner = {f"{s}/{n}" for it in steps for s in ("train", "workflow") for n in it[s]}
    assert told["columns"].keys() == plain | inner | {"rejected_episodes/x"}
    assert told["evaluations"] == [make_evaluation().to_record()]
    assert told["damage"] == []


def test_only_new_steps_are_told_of_the_same_epoch(path: Path, log: MetricsLog) -> None:
    columns = MetricColumns(path)
    columns.follow()
    for step in (1, 2, 3):
        log.on_step(make_step(step))
    columns.follow()
    told = columns.since(columns.epoch, 2)
    assert (told["first"], told["columns"]["step"]) == (2, [3])
    assert columns.since(columns.epoch - 1, 2)["columns"]["step"] == [1, 2, 3]
    assert columns.since(columns.epoch, 99)["columns"]["time"] == []


def test_a_run_that_went_back_is_as_its_history(path: Path, log: MetricsLog) -> None:
    columns = MetricColumns(path)
    for step in (1, 2, 3, 4):
        log.on_step(make_step(step))
    columns.follow()
    epoch = columns.epoch
    log.event("went_back", from_step=4, step=2, cause="rows are gone")
    log.on_step(make_step(3, reward=0.9))
    columns.follow()
    told = columns.since(epoch, 4)
    assert columns.epoch > epoch
    assert told["columns"]["step"] == [1, 2, 3]
    assert told["columns"]["reward"][-1] == 0.9
    assert len(told["columns"]["time"]) == 3
    (event,) = told["events"]
    assert (event["num_abandoned"], event["after_step"]) == (2, 2)
    assert columns.history == History.read(path)


def test_a_file_that_began_again_is_another_epoch(path: Path, log: MetricsLog) -> None:
    columns = MetricColumns(path)
    log.on_step(make_step(7))
    columns.follow()
    epoch = columns.epoch
    path.unlink()
    columns.follow()
    assert columns.num_steps == 0
    assert columns.epoch > epoch


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.pop("reward"),
        lambda record: record.update(num_trained_tokens="many"),
        lambda record: record.update(rejected_episodes=[1]),
        lambda record: record.pop("kind"),
    ],
)
def test_a_record_that_is_none_is_told_and_left_out(
    path: Path, log: MetricsLog, change: Callable[[dict[str, Any]], Any]
) -> None:
    for step in (1, 2, 3):
        log.on_step(make_step(step))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    change(records[1])
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    columns = MetricColumns(path)
    columns.follow()
    told = columns.since(0, 0)
    assert told["columns"]["step"] == [1, 3]
    assert told["damage"][0].startswith("metrics.jsonl, line 2 is left out")
