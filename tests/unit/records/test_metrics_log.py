from __future__ import annotations

import itertools
import json
import math
from contextlib import closing
from pathlib import Path

import pytest
from builders import make_evaluation, make_step
from small_disk import small_disk

from areal_sc.errors import RunFolderError
from areal_sc.records.metrics_log import (
    History,
    MetricsLog,
    read_metrics,
)


def test_log_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    ticks = itertools.count(100.0, 0.5)
    steps = [make_step(1, train={"loss": 0.1, "lr": 4e-4}), make_step(2, accuracy=None)]
    evaluation = make_evaluation("after", step=2, version_min=1, version_max=2)
    with closing(MetricsLog(path, clock=lambda: next(ticks))) as log:
        log.event("started", seed=7)
        log.on_step(steps[0])
        assert len(read_metrics(path)) == 2  # each line is there at once
        log.on_step(steps[1])
        log.on_evaluation(evaluation)

    records = read_metrics(path)
    assert [(record["kind"], record["time"]) for record in records] == [
        ("event", 100.0),
        ("step", 100.5),
        ("step", 101.0),
        ("evaluation", 101.5),
    ]
    assert records[0]["name"] == "started"
    assert records[0]["seed"] == 7
    assert records[1]["bound"] == "training"
    assert records[1]["generated_tokens_per_s"] == 12_000
    assert History.read(path) == History(steps, [evaluation])


def test_truncated_last_line_is_left_out_and_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsLog(path)) as log:
        log.on_step(make_step(1))
        log.on_step(make_step(2))
    whole = path.read_bytes()
    for length in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:length])
        assert [record["step"] for record in read_metrics(path)] == [1]
    with closing(MetricsLog(path)) as log:
        log.on_step(make_step(3))
    assert [record["step"] for record in read_metrics(path)] == [1, 3]


def test_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step"}\n{"kind": \n{"kind": "step"}\n')
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl, line 2: expected a JSON object"):
        read_metrics(path)
    path.write_text("[1]\n")
    with pytest.raises(RunFolderError, match="line 1: expected a JSON object"):
        read_metrics(path)


def test_unusable_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot open"):
        MetricsLog(tmp_path / "missing" / "metrics.jsonl")
    with pytest.raises(RunFolderError, match="cannot read"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_full_disk_is_an_error_with_its_cause() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    log = MetricsLog(Path("/dev/full"))
    with pytest.raises(RunFolderError, match="cannot write /dev/full: No space left on device"):
        log.on_step(make_step())
    log.close()


def test_a_line_that_the_disk_took_in_part_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsLog(path)) as log:
        log.on_step(make_step(1))
        whole = path.read_bytes()
        with small_disk(len(whole) + 10), pytest.raises(RunFolderError, match="File too large"):
            log.on_step(make_step(2))
        assert path.read_bytes() == whole
        log.on_step(make_step(3))  # there is room again
    assert [record["step"] for record in read_metrics(path)] == [1, 3]


def test_a_cause_that_is_no_unicode_is_told_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsLog(path)) as log:
        log.event("went_back", step=3, cause="no rows-\udcff.txt", seconds=math.nan)
    (record,) = read_metrics(path)
    assert (record["cause"], record["seconds"]) == ("no rows-?.txt", None)


def test_values_that_are_not_finite_are_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsLog(path)) as log:
        log.on_step(make_step(reward=math.nan, train={"loss": math.inf, "steps": [1.0, -math.inf]}))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record["reward"] is None
    assert record["train"] == {"loss": None, "steps": [1.0, None]}
    (step,) = History.read(path).steps
    assert math.isnan(step.reward)
    assert step.accuracy == 0.2


@pytest.mark.parametrize("event", ["resumed", "went_back"])
def test_what_a_run_went_back_behind_is_left_out(tmp_path: Path, event: str) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsLog(path)) as log:
        log.on_evaluation(make_evaluation("before", step=0))
        for step, reward in [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]:
            log.on_step(make_step(step, reward=reward))
            log.on_evaluation(make_evaluation("periodic", step=step))
        log.event(event, step=2)
        log.on_step(make_step(3, reward=0.5))
        log.on_evaluation(make_evaluation("periodic", step=3, accuracy=0.7))
    history = History.read(path)
    assert [(s.step, s.reward) for s in history.steps] == [(1, 0.1), (2, 0.2), (3, 0.5)]
    assert [e.step for e in history.evaluations] == [0, 1, 2, 3]
    assert history.evaluations[-1].accuracy == 0.7
