"""Samples are found by numbers and texts, page by page, as a plain search finds them."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sample_rows import sample

from areal_sc.errors import RunFolderError
from areal_sc.page import sample_rows
from areal_sc.page.row_query import SHOWN_CHARS
from areal_sc.page.sample_rows import SampleRows, sample_query
from areal_sc.records.samples import Place, Sample, read_samples
from areal_sc.system.json_lines import JsonLines

NUM_ROWS = 300


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("rows") / "samples.jsonl"
    lines = JsonLines(path)
    for number in range(NUM_ROWS):
        version = rng.randrange(20)
        metrics = {"accuracy": float(rng.randrange(2))}
        if number % 3 == 0:
            metrics["rare"] = rng.random()
        lines.append(
            sample(
                number // 4 + 1,
                group=number // 2,
                place=rng.choice(list(Place)),
                reward=rng.choice([0.0, 0.25, 1.0]),
                num_tokens=rng.randrange(5, 50),
                first_version=version,
                last_version=version + rng.randrange(3),
                metrics=metrics,
                prompt=f"Prompt {number}",
                answer=rng.choice(["Straße", "NO", "yes", "a\nb"]) * 3,
            )
        )
    lines.close()
    return path


def write(path: Path, *samples: Sample) -> None:
    with closing(JsonLines(path)) as lines:
        lines.append(*samples)


def followed(path: Path) -> SampleRows:
    rows = SampleRows(path)
    rows.follow()
    return rows


def all_rows(rows: SampleRows, words: dict[str, str], limit: int = 7) -> list[dict[str, Any]]:
    """Page by page."""
    found, at = [], 0
    while at is not None:
        page = rows.found(sample_query(words), at, limit)
        assert len(page["rows"]) <= limit
        found += page["rows"]
        at = page["next"]
    return found


QUERIES = [
    ({}, lambda it: True),
    ({"reward": "0.25"}, lambda it: it.reward == 0.25),
    ({"reward": "0.1..0.5", "place": "best"}, lambda it: it.reward == 0.25 and it.place == "best"),
    ({"num_tokens": "..20"}, lambda it: it.num_tokens <= 20),
    ({"version": "5..6"}, lambda it: it.first_version <= 6 and it.last_version >= 5),
    ({"metrics.rare": "0.5.."}, lambda it: it.metrics.get("rare", 0.0) >= 0.5),
    ({"text": "STRASSE"}, lambda it: "Straße" in it.answer),
    ({"text": "prompt 29", "step": "70..80"}, lambda it: "29" in it.prompt and it.step >= 70),
    ({"group": "17"}, lambda it: it.group == 17),
]


@pytest.mark.parametrize(("words", "fits"), QUERIES)
def test_what_is_asked_for_is_found(path: Path, words: dict[str, str], fits: Any) -> None:
    expected = [it for it in read_samples(path) if fits(it)]
    assert expected
    found = all_rows(followed(path), {"sort": "step", **words})
    assert [row["prompt"] for row in found] == [it.prompt for it in expected]
    for row, it in zip(found, expected, strict=True):
        assert (row["reward"], row["num_tokens"], row["metrics"]) == (
            it.reward,
            it.num_tokens,
            it.metrics,
        )


@pytest.mark.parametrize("sort", ["-reward", "reward", "-num_tokens", "staleness", "-metrics.rare"])
def test_rows_are_sorted_and_those_without_the_number_are_last(path: Path, sort: str) -> None:
    found = all_rows(followed(path), {"sort": sort})
    name = sort.lstrip("-")
    values = [row["metrics"].get("rare") if "rare" in name else row[name] for row in found]
    known = [value for value in values if value is not None]
    assert known == sorted(known, reverse=sort.startswith("-"))
    assert values[len(known) :] == [None] * (NUM_ROWS - len(known))


def test_a_search_that_takes_long_goes_on_where_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_rows, "SEARCH_S", 0.0)
    rows = followed(path)
    assert rows.found(sample_query({"text": "Prompt 299", "sort": "step"}))["next"] == 1
    assert [row["prompt"] for row in all_rows(rows, {"text": "Prompt 299"})] == ["Prompt 299"]


def test_a_row_has_all_of_its_texts_and_its_group(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    long = "word " * 400_000
    worst = sample(1, group=1, answer=long, place=Place.worst)
    write(path, sample(1, group=1), worst, sample(2, group=2))
    rows = followed(path)
    listed = rows.found(sample_query({"sort": "step"}))["rows"]
    assert listed[1]["answer"] == long[:SHOWN_CHARS]
    assert listed[1]["answer_chars"] == len(long)
    told = rows.row(listed[1]["offset"])
    assert told is not None
    assert told["row"]["answer"] == long
    assert [row["offset"] for row in told["group"]] == [listed[0]["offset"], listed[1]["offset"]]
    assert (told["before"], told["after"]) == (listed[0]["offset"], listed[2]["offset"])
    assert rows.row(listed[1]["offset"] + 1) is None
    assert [row["offset"] for row in rows.of_group(2)] == [listed[2]["offset"]]


def test_it_follows_a_run_that_goes_on_and_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    rows = SampleRows(path)
    rows.follow()
    assert rows.found(sample_query({}))["rows"] == []
    steps: list[Sample] = [
        sample(1),
        sample(2),
        sample(3),
        sample(2, time=2e3),
        sample(3, time=3e3),
    ]
    for number, one in enumerate(steps, start=1):
        write(path, one)
        rows.follow()
        found = all_rows(rows, {"sort": "step"})
        assert [(row["step"], row["time"]) for row in found] == [
            (it.step, it.time) for it in read_samples(path)
        ]
        assert rows.found(sample_query({}))["num_rows"] == len(found) <= number


def test_a_text_that_is_no_utf8_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    write(path, sample(1, answer="BAD"))
    path.write_bytes(path.read_bytes().replace(b"BAD", b"\xff\xfe<script>"))
    rows = followed(path)
    page = rows.found(sample_query({"text": "<SCRIPT>"}))
    assert page["rows"][0]["answer"] == "\ufffd\ufffd<script>"
    assert "no valid UTF-8" in page["damage"][0]


def test_a_file_that_changes_meanwhile_is_told(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    write(path, sample(1))
    rows = followed(path)
    path.write_text("x" * 1000)
    with pytest.raises(RunFolderError, match="has changed meanwhile"):
        rows.found(sample_query({}))
    path.unlink()
    with pytest.raises(RunFolderError, match="cannot be read: No such file"):
        rows.found(sample_query({}))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"reward": "high"}, "reward: expected a number, or a range such as 0..0.5, got 'high'"),
        ({"reward": "nan"}, "reward: expected a number"),
        ({"sort": "prompt"}, "sort: expected step, group"),
        ({"rewards": "1"}, "expected step, group, .* or metrics.NAME, got 'rewards'"),
    ],
)
def test_wrong_words_are_told(words: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        sample_query(words)
