"""The time line: what is seen of a time, whole where there is room, else the longest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_groups import add_span, recorder_of

from areal_sc.page import time_line
from areal_sc.page.time_line import DENSITY_PIXELS, MIN_LANES, TimeLine
from areal_sc.records.spans import RecordedSpan


def test_all_of_it_as_recorded(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)
    add_span(recorder, "generation", 100.0, 4.0, lane=1, about="5.0.9", versions=(0, 2))
    add_span(recorder, "fetching weights", 100.5, 0.5, versions=(1, 1))
    add_span(recorder, "updating weights", 100.5, 0.75, versions=(1, 1))
    add_span(recorder, "updating weights", 103.0, 0.5, versions=(2, 2))
    recorder.close()
    line = TimeLine(tmp_path / "records")
    line.add_of_script([step(3, 99.0, 1.0)])
    line.follow()
    told = line.shown(None, None, 1000)
    assert (told["begin"], told["end"], told["num_left_out"]) == (99.0, 104.0, 0)
    script, rollout = told["processes"]
    assert (script["name"], rollout["name"]) == ("script", "rollout/0")
    assert rollout["num_lanes"] == 2
    assert rollout["updates"] == [(101.0, 1), (103.0, 2)]
    assert rollout["totals"] == {
        "generation": (1, 4.0),
        "fetching weights": (1, 0.5),
        "updating weights": (2, 1.25),
    }
    answer = {name: rollout[name][0] for name in ("lane", "began", "took", "last_version")}
    assert answer == {"lane": 1, "began": 1.0, "took": 4.0, "last_version": 2}
    assert told["kinds"][rollout["kind"][0]] == "generation"
    assert told["abouts"][rollout["about"][0]] == "5.0.9"
    assert told["abouts"][script["about"][0]] == "3"


def test_a_part_of_the_time(tmp_path: Path) -> None:
    line = TimeLine(tmp_path / "records")
    line.add_of_script([step(number, float(number), 0.75) for number in range(10)])
    told = line.shown(3.5, 5.25, 1000)
    (script,) = told["processes"]
    assert [told["abouts"][it] for it in script["about"]] == ["3", "4", "5"]
    assert script["began"] == [-0.5, 0.5, 1.5]
    assert script["totals"] == {"wait": (3, 0.25 + 0.75 + 0.25)}
    assert told["begin"] == 0.0
    assert told["end"] == 9.75


def test_of_a_pixel_the_longest_one_is_seen(tmp_path: Path) -> None:
    line = TimeLine(tmp_path / "records")
    # three in each of ten pixels, the second one longest; one that is wide
    narrow = [
        step(3 * n + m, n + 0.3 * m, 0.01 + 0.1 * (m == 1)) for n in range(10) for m in range(3)
    ]
    line.add_of_script([*narrow, step(99, 2.0, 3.0)])
    told = line.shown(0.0, 10.0, 10)
    (script,) = told["processes"]
    seen = [told["abouts"][it] for it in script["about"]]
    assert seen == [*(str(3 * n + 1) for n in range(10)), "99"]
    assert told["num_left_out"] == 20
    assert script["totals"]["wait"][0] == 31


def test_there_are_never_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_line, "MAX_SPANS", 100)
    line = TimeLine(tmp_path / "records")
    line.add_of_script([step(n, float(n), 0.5 + 0.4 * (n % 64 == 1)) for n in range(1000)])
    told = line.shown(0.0, 1000.0, 8000)  # each is some pixels wide
    (script,) = told["processes"]
    assert 10 <= len(script["kind"]) <= 100
    assert told["num_left_out"] == 1000 - len(script["kind"])
    longest = {str(n) for n in range(1, 1000, 64)}
    assert longest <= {told["abouts"][it] for it in script["about"]}
    assert line.shown(10.0, 12.0, 8000)["num_left_out"] == 0


def test_lanes_do_not_hide_each_other(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)
    for lane in (-1, 0, 1, 7):
        add_span(recorder, "episode", 1.0, 0.001, lane=lane)
    add_span(recorder, "episode", 11.0, 0.001)
    recorder.close()
    line = TimeLine(tmp_path / "records")
    line.follow()
    (process,) = line.shown(0.0, 12.0, 2)["processes"]
    assert sorted(process["lane"]) == [-1, -1, 0, 1, 7]
    assert process["num_lanes"] == 8


def test_it_follows_and_the_script_is_told_anew(tmp_path: Path) -> None:
    line = TimeLine(tmp_path / "records")
    assert line.shown(None, None, 10)["begin"] is None
    line.add_of_script([step(1, 1.0, 1.0)])
    for number in range(3):
        recorder = recorder_of(tmp_path)
        add_span(recorder, "episode", 5.0 + number, 1.0)
        recorder.close()
        line.follow()
        line.follow()
        told = line.shown(None, None, 1000)
        assert [len(it["kind"]) for it in told["processes"]] == [1, number + 1]
    line.forget_script()
    line.add_of_script([step(2, 2.0, 1.0)])
    assert line.shown(None, None, 1000)["begin"] == 2.0


def test_damage_is_told(tmp_path: Path) -> None:
    for begin in (1.0, 2.0):
        recorder = recorder_of(tmp_path)
        add_span(recorder, "episode", begin, 1.0)
        recorder.close()
    first, _ = sorted((tmp_path / "records").iterdir())
    content = bytearray(first.read_bytes())
    content[-3] ^= 8
    first.write_bytes(content)
    line = TimeLine(tmp_path / "records")
    line.follow()
    told = line.shown(None, None, 10)
    assert told["begin"] == 2.0
    assert len(told["damage"]) == 1
    assert "rollout-0.spans.000001" in told["damage"][0]


@pytest.mark.parametrize("window", [(5.0, 5.0), (9.0, 1.0), (-1e300, 1e300), (1e12, 2e12)])
def test_any_time_may_be_asked_for(tmp_path: Path, window: tuple[float, float]) -> None:
    line = TimeLine(tmp_path / "records")
    line.add_of_script([step(1, 1.0, 1.0)])
    told: Any = line.shown(*window, 0)
    assert told["begin"] == 1.0


def step(number: int, began: float, took_s: float) -> RecordedSpan:
    about = str(number)
    return RecordedSpan(process="script", kind="wait", began=began, took_s=took_s, about=about)


def test_of_another_run_in_the_folder_nothing_is_left(tmp_path: Path) -> None:
    line, records = TimeLine(tmp_path / "records"), tmp_path / "records"
    recorder = recorder_of(tmp_path)
    add_span(recorder, "episode", 1.0, 5.0)
    recorder.close()
    script = RecordedSpan(process="script", kind="train", began=2.0, took_s=1.0)
    line.add_of_script([script])
    line.follow()
    shutil.rmtree(records)
    recorder = recorder_of(tmp_path, process="rollout/0")
    add_span(recorder, "generation", 1.5, 2.5)
    recorder.close()
    line.follow()
    told = line.shown(None, None, 100)
    assert (told["begin"], told["end"], told["damage"]) == (1.5, 4.0, [])
    assert [(it["name"], len(it["kind"])) for it in told["processes"]] == [
        ("script", 1),
        ("rollout/0", 1),
    ]


def test_many_lanes_are_told_together(tmp_path: Path) -> None:
    """How many of them do what in each part of the time, as a plain sum over all spans says."""
    random = np.random.default_rng(0)
    spans = [
        (kind, float(began), float(took), int(lane))
        for kind in ("episode", "generation")
        for began, took, lane in zip(
            random.uniform(100, 160, 300),
            random.exponential(2.0, 300),
            random.integers(0, 40, 300),
            strict=True,
        )
    ]
    recorder, few = recorder_of(tmp_path), recorder_of(tmp_path, process="rollout/1")
    for kind, began, took, lane in [*spans, ("generation", 100.0, 60.0, 39)]:
        add_span(recorder, kind, began, took, lane=lane)
    add_span(recorder, "updating weights", 110.0, 30.0, versions=(1, 1))  # of no lane
    add_span(few, "generation", 100.0, 60.0, lane=MIN_LANES - 1)
    recorder.close()
    few.close()
    line = TimeLine(tmp_path / "records")
    line.follow()
    first, last, num_parts = 105.0, 150.0, 50
    many, other = line.shown(first, last, num_parts * DENSITY_PIXELS)["processes"]
    assert other["density"] == {}, "few lanes are drawn one by one"
    assert many["density"].keys() == {"episode", "generation"}
    spans.append(("generation", 100.0, 60.0, 39))
    length = (last - first) / num_parts
    for kind, told in many["density"].items():
        for part, value in enumerate(told):
            begin = first + part * length
            within = [
                max(0.0, min(began + took, begin + length) - max(began, begin))
                for name, began, took, _ in spans
                if name == kind
            ]
            assert value == pytest.approx(sum(within) / length, abs=0.006)
