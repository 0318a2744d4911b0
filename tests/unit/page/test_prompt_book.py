"""Prompts summed up as a plain loop over all rows sums them up."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from recorded_groups import answered, played, recorder_of, trajectory

from areal_sc.page.prompt_book import CLEAR, NUM_PARTS, PromptBook, _changes, set_of
from areal_sc.page.recorded_groups import RecordedGroups
from areal_sc.page.row_index import EVALUATED, Fate, RowIndex
from areal_sc.page.row_search import RowSearch, recorded_query
from areal_sc.page.trained_numbers import TrainedNumbers
from areal_sc.records.recorded_rows import RecordedRejection
from areal_sc.records.recorder import PlayedGroup
from areal_sc.workflows.trajectory import Trajectory


def index_of(run: Path) -> RowIndex:
    index = RowIndex(run / "records", run / "rows.sqlite", lambda: None)
    index.follow(60.0)
    return index


def a_try(version: int, reward: float, *, is_cut: bool = False) -> Trajectory:
    row = trajectory(0, 24, reward)
    row.loss_mask, row.versions = [False] * 5 + [True] * 19, [-1] * 5 + [version] * 19
    row.metrics = {"stopped": float(not is_cut), "accuracy": reward}
    return row


def add_group(
    recorder: Any, number: int, index: int, rewards: list[float], version: int, **how: Any
) -> None:
    group = played(number, *([a_try(version, it, **how)] for it in rewards))
    changed = structs.replace(group.group, index=index, began=1000.0 + number)
    recorder.add_group(PlayedGroup(changed, group.episodes))


def test_numbers_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    tries = defaultdict[tuple[str, int], list[tuple[int, float]]](list)
    recorder = recorder_of(tmp_path)
    for number in range(60):
        index, version = int(random.integers(5)), number // 3
        rewards = random.integers(0, 2, 4).astype(float).tolist()
        add_group(recorder, number, index, rewards, version, is_cut=index == 2)
        tries["training", index] += [(version, it) for it in rewards]
    for version in (0, 10, 19):
        for index in range(3):
            reward = float(random.integers(0, 2))
            recorder.add_answer(answered(index, [a_try(version, reward)], step=version))
            tries["held out", index].append((version, reward))
    recorder.close()
    found = PromptBook(index_of(tmp_path)).found(limit=100)
    assert found["sets"] == {"training": 5, "held out": 3}
    assert found["versions"] == (0, 19)
    assert len(found["prompts"]) == len(tries)
    assert [it["mean"] for it in found["prompts"]] == sorted(it["mean"] for it in found["prompts"])
    for told in found["prompts"]:
        its = tries[told["set"], told["index"]]
        first, newest = min(its)[0], max(its)[0]
        assert told["tries"] == len(its)
        assert told["mean"] == pytest.approx(fmean(it for _, it in its))
        assert told["solved"] == sum(it for _, it in its)
        assert told["first"] == pytest.approx(fmean(it for at, it in its if at == first))
        assert told["newest"] == pytest.approx(fmean(it for at, it in its if at == newest))
        assert told["cut"] == float(told["index"] == 2 and told["set"] == "training")
        for part in range(NUM_PARTS):
            among = [it for at, it in its if at * NUM_PARTS // 20 == part]
            expected = pytest.approx(fmean(among)) if among else None
            assert told["parts"][part] == expected


def test_a_fall_is_found_where_it_begins_and_sorted_first(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)
    for number in range(90):
        index, version = number % 3, number // 3
        reward = {0: version < 18, 1: version >= 12, 2: version % 2}[index]
        add_group(recorder, number, index, [float(reward)] * 2, version)
    recorder.close()
    book = PromptBook(index_of(tmp_path))
    falling = book.found(sort="falling")["prompts"]
    assert [it["index"] for it in falling] == [0, 2, 1]
    assert (falling[0]["since"], round(falling[0]["change"], 9), falling[0]["is_clear"]) == (
        18,
        -1,
        True,
    )
    assert (falling[2]["since"], round(falling[2]["change"], 9), falling[2]["is_clear"]) == (
        12,
        1,
        True,
    )
    assert not falling[1]["is_clear"]
    assert book.found(sort="rising")["prompts"][0]["index"] == 1


def test_changes_are_those_of_every_split_and_chance_is_not_called_clear() -> None:
    random = np.random.default_rng(1)
    rewards = [random.normal(size=n) for n in (1, 2, 5, 9, 40)]
    versions = [np.sort(random.integers(0, 6, len(it))) for it in rewards]
    tries = np.array([len(it) for it in rewards])
    starts = np.cumsum(tries) - tries
    change, since, _ = _changes(np.concatenate(rewards), np.concatenate(versions), starts, tries)
    for place, (its, at) in enumerate(zip(rewards, versions, strict=True)):
        best, expected = -1.0, (0.0, at[0])
        for version in sorted(set(at))[1:]:
            before, after = its[at < version], its[at >= version]
            if min(len(before), len(after)) < max(len(its) / 8, 1):
                continue
            between = len(before) * len(after) / len(its) * (before.mean() - after.mean()) ** 2
            if between > best:
                best, expected = between, (after.mean() - before.mean(), version)
        assert (change[place], since[place]) == pytest.approx(expected)
    for share in (0.1, 0.5, 0.9):
        for num_tries, per_version in ((6, 1), (16, 1), (32, 1), (64, 8)):
            tossed = (random.random(2000 * num_tries) < share).astype(float)
            version = np.tile(np.arange(num_tries) // per_version, 2000)
            counts = np.full(2000, num_tries)
            _, _, errors = _changes(tossed, version, np.arange(2000) * num_tries, counts)
            assert (abs(errors) >= CLEAR).mean() < 0.01, (share, num_tries)


def test_never_solved_alone(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)
    for number, rewards in enumerate(([0.0, 0.5], [1.0, 0.0], [0.2, 0.1])):
        add_group(recorder, number, number, rewards, 0)
    recorder.close()
    book = PromptBook(index_of(tmp_path))
    assert [it["index"] for it in book.found(sort="unsolved")["prompts"]] == [2, 0]
    with pytest.raises(ValueError, match="sort: expected worst, falling"):
        book.found(sort="reward; DROP TABLE rows")
    assert book.found(of_set="'; --")["prompts"] == []
    assert book.tries("'; --", 0, 0) is None
    assert book.tries("training", 0, 17) is None


def test_of_a_run_without_rows_there_are_none(tmp_path: Path) -> None:
    found = PromptBook(index_of(tmp_path)).found()
    assert (found["prompts"], found["sets"], found["num_fitting"]) == ([], {}, 0)


def test_tries_are_of_one_set_and_lead_to_their_tokens(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)
    for step in (0, 8):
        for sample in range(2):
            row = a_try(step, float(step == 0))
            recorder.add_answer(answered(3, [row], step=step, sample=sample))
    recorder.add_answer(answered(3, [a_try(8, 0.5)], evaluation="greedy", step=8))
    recorder.add_answer(answered(4, [], rejected=RecordedRejection("timeout", "slow", 1)))
    recorder.close()
    index = index_of(tmp_path)
    told = PromptBook(index).tries("held out", 1, 3)
    assert told is not None
    assert [(it["version"], it["reward"], it["cut"]) for it in told["tries"]] == [
        *[(0, 1, 0)] * 2,
        *[(8, 0, 0)] * 2,
    ]
    assert told["prompt"]["answer"]["name"] == told["tries"][-1]["name"]
    groups = RecordedGroups(index, TrainedNumbers(tmp_path / "records"))
    for one in told["tries"]:
        group, attempt, episode, row = map(int, one["name"].split("."))
        tokens = groups.tokens(group, attempt, episode, row, None)
        assert tokens is not None
        assert tokens["versions"][-1] == one["version"]
        assert {it["attempt"] for it in groups.of_group(group)} == {0, 1}
    rejected = RowSearch(index).found(recorded_query({"cause": "timeout", "evaluation": "*"}))[
        "rows"
    ]
    assert [(it["evaluation"], it["outcome"], it["index"]) for it in rejected] == [
        ("periodic", EVALUATED, 4)
    ]


def test_what_becomes_of_groups_leaves_evaluated_answers_alone(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)
    add_group(recorder, 1, 0, [1.0], 0)
    recorder.add_answer(answered(3, [a_try(8, 1.0)], step=8, began=1000.0))
    recorder.add_answer(answered(3, [a_try(8, 0.0)], step=8, began=2000.0))  # evaluated again
    recorder.close()
    index = index_of(tmp_path)
    index.note_fates({(1, 0): Fate("trained", 3, "")})
    (trained,) = RowSearch(index).found(recorded_query({}))["rows"]
    assert trained["outcome"] == "trained", "those of evaluations have to be asked for"
    rows = RowSearch(index).found(recorded_query({"evaluation": "*"}))["rows"]
    assert sorted((it["outcome"], it["step"], it["reward"]) for it in rows) == [
        (EVALUATED, 8, 0.0),
        ("trained", 3, 1.0),
    ]
    assert RowSearch(index).rewards([1]) == {(1, 0): (1.0, 1.0, 1.0)}


def test_sets_are_told_apart() -> None:
    names = ["", "before", "periodic", "greedy", "math/after", "own/math/greedy"]
    assert [set_of(it) for it in names] == [
        *("training", "held out", "held out", "held out, greedy", "math", "own/math, greedy")
    ]


def test_rewards_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)
    add_group(recorder, 1, 0, [1.0, math.nan, math.inf], 0)
    recorder.close()
    (told,) = PromptBook(index_of(tmp_path)).found()["prompts"]
    assert (told["tries"], told["mean"]) == (1, 1.0)
