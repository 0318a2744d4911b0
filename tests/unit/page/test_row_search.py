"""Recorded rows are found by numbers and texts as a plain search through all of them finds them."""

from __future__ import annotations

import random
import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from recorded_groups import recorder_of
from tokenizers import Tokenizer, decoders, models

from areal_sc.errors import RunFolderError
from areal_sc.page import row_index, row_search
from areal_sc.page.row_index import Fate, RowIndex
from areal_sc.page.row_search import RowSearch, recorded_query
from areal_sc.records.reading import Row, rows
from areal_sc.records.recorded_rows import RecordedGroup, RecordedRejection
from areal_sc.records.recorder import PlayedGroup
from areal_sc.workflows.trajectory import Trajectory

WORDS = ["▁sort", "▁Straße", "▁<script>", "▁YES", "▁no", "▁привет", "▁\u202e", "▁x"]
NUM_GROUPS = 60


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}))
    made.decoder = decoders.Metaspace()
    return made


def text_of(ids: list[int]) -> str:
    return "".join(WORDS[it] for it in ids).replace("▁", " ").removeprefix(" ")


def group_of(number: int, began: float, **changes: Any) -> RecordedGroup:
    group = RecordedGroup(
        worker=f"rollout/{number % 2}",
        group=number,
        attempt=0,
        dataset=0,
        index=number % 7,
        prompt=f"row {number % 7} of the data",
        admitted_version=2,
        began=began,
        took_s=0.25,
    )
    return structs.replace(group, **changes)


def a_row(rng: random.Random, **metrics: float) -> Trajectory:
    length = rng.randrange(6, 30)
    ids = [rng.randrange(len(WORDS)) for _ in range(length)]
    first = rng.randrange(3, 9)
    versions = [-1, -1, *sorted(rng.choice([first, first + 1]) for _ in range(length - 2))]
    mask = [False, False, *[True] * (length - 2)]
    reward = rng.choice([0.0, 0.25, 1.0])
    return Trajectory(ids, mask, [0.0, 0.0, *[-0.5] * (length - 2)], versions, [1.0] * length,
                      reward, metrics)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("run")
    recorder = recorder_of(path)
    for number in range(NUM_GROUPS):
        rare = {"rare": rng.random()} if number % 3 == 0 else {}
        episodes = {it: [a_row(rng, accuracy=float(it), **rare)] for it in range(4)}
        rejected = (RecordedRejection("timeout", "took TOO long", 2),) if number == 5 else ()
        group = group_of(number, 1000.0 + number, rejected=rejected)
        recorder.add_group(PlayedGroup(group, episodes))
    recorder.close()
    return path


def index_of(
    run: Path, database: Path, made: Callable[[], Tokenizer | None] = tokenizer
) -> RowIndex:
    return RowIndex(run / "records", database, made)


@pytest.fixture(scope="module")
def search(run: Path, tmp_path_factory: pytest.TempPathFactory) -> RowSearch:
    index = index_of(run, tmp_path_factory.mktemp("cache") / "rows.sqlite")
    index.note_fates({(7, 0): Fate("trained", 12, ""), (8, 0): Fate("rejected", None, "stale")})
    index.follow(60.0)
    return RowSearch(index)


def all_rows(search: RowSearch, words: dict[str, str], limit: int = 7) -> list[dict[str, Any]]:
    """Page by page."""
    found, at = [], 0
    while at is not None:
        page = search.found(recorded_query(words), at, limit)
        assert len(page["rows"]) <= limit
        found += page["rows"]
        at = page["next"]
    return found


def sampled(row: Row) -> list[int]:
    return row.versions[row.loss_mask].tolist()


def texts(row: Row) -> tuple[str, str]:
    ids = row.input_ids.tolist()
    return text_of(ids[:2]), text_of(ids[2:])


QUERIES: list[tuple[dict[str, str], Callable[[Row], bool]]] = [
    ({}, lambda it: True),
    ({"reward": "0.25"}, lambda it: it.reward == 0.25),
    ({"num_tokens": "..12"}, lambda it: len(it.input_ids) <= 12),
    ({"version": "5"}, lambda it: min(sampled(it)) <= 5 <= max(sampled(it))),
    ({"first_version": "4..5"}, lambda it: 4 <= sampled(it)[0] <= 5),
    ({"num_interruptions": "1"}, lambda it: len(set(sampled(it))) == 2),
    ({"metrics.rare": "0.5.."}, lambda it: it.metrics.get("rare", 0.0) >= 0.5),
    ({"metrics.none": "0.."}, lambda it: False),
    ({"worker": "rollout/1", "index": "3"}, lambda it: it.group % 2 == 1 and it.index == 3),
    ({"step": "12"}, lambda it: it.group == 7),
    ({"staleness": "5..7"}, lambda it: it.group == 7 and 4 <= sampled(it)[0] <= 6),
    ({"cause": "stale", "outcome": "rejected"}, lambda it: it.group == 8),
    ({"text": "STRASSE"}, lambda it: False),  # as its letters are: ASCII is found in ASCII
    ({"text": "straße"}, lambda it: any("Straße" in text for text in texts(it))),
    ({"text": "yes"}, lambda it: any("YES" in text for text in texts(it))),
    ({"text": "ПРИВЕТ"}, lambda it: any("привет" in text for text in texts(it))),
    (
        {"text": "NO x", "reward": "1"},
        lambda it: it.reward == 1 and "no x" in " | ".join(texts(it)),
    ),
]


@pytest.mark.parametrize(("words", "fits"), QUERIES)
def test_what_is_asked_for_is_found(
    run: Path, search: RowSearch, words: dict[str, str], fits: Callable[[Row], bool]
) -> None:
    expected = [(it.group, it.episode) for it in rows(run) if fits(it)]
    found = [it for it in all_rows(search, {"sort": "time", **words}) if it["episode"] >= 0]
    assert sorted((it["group"], it["episode"]) for it in found) == sorted(expected)
    of = {(it.group, it.episode): it for it in rows(run)}
    for row in found:
        was = of[row["group"], row["episode"]]
        prompt, answer = texts(was)
        assert (row["prompt"], row["answer"]) == (prompt, answer)
        assert (row["reward"], row["num_tokens"]) == (was.reward, len(was.input_ids))
        assert (row["metrics"], row["worker"]) == (was.metrics, f"rollout/{was.group % 2}")
        assert row["time"] == was.began + was.took_s


@pytest.mark.parametrize("sort", ["-reward", "num_tokens", "-metrics.rare", "staleness", "-time"])
def test_rows_are_sorted_and_those_without_the_number_are_last(
    search: RowSearch, sort: str
) -> None:
    found = all_rows(search, {"sort": sort})
    name = sort.lstrip("-")
    values = [row["metrics"].get("rare") if "rare" in name else row[name] for row in found]
    known = [value for value in values if value is not None]
    assert known == sorted(known, reverse=sort.startswith("-"))
    assert values[len(known) :] == [None] * (4 * NUM_GROUPS + 1 - len(known))


def test_the_reward_of_a_group_is_the_mean_of_its_rows(run: Path, search: RowSearch) -> None:
    rewards = [it.reward for it in rows(run) if it.group == 3]
    found = all_rows(search, {"group": "3", "sort": "time"})
    assert {row["group_reward"] for row in found} == {sum(rewards) / 4}


def test_episodes_without_rows_are_found_by_their_cause(search: RowSearch) -> None:
    (found,) = all_rows(search, {"cause": "timeout"})
    assert (found["group"], found["answer"], found["outcome"]) == (5, "took TOO long", "rejected")
    assert found["prompt"] == "row 5 of the data"
    assert [it["group"] for it in all_rows(search, {"text": "too LONG"})] == [5]


def test_how_many_have_which_word_is_told(search: RowSearch) -> None:
    told = search.found(recorded_query({}))
    assert told["worker"] == {"rollout/0": 2 * NUM_GROUPS, "rollout/1": 2 * NUM_GROUPS + 1}
    assert told["outcome"] == {"trained": 4, "rejected": 5}
    assert told["metrics"] == ["accuracy", "rare"]
    assert told["has_texts"]
    assert told["is_whole"]


def test_a_search_that_takes_long_goes_on_where_it_was(
    search: RowSearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [it["group"] for it in all_rows(search, {"text": "too LONG"})]
    monkeypatch.setattr(row_search, "SEARCH_S", 0.0)
    monkeypatch.setattr(row_search, "_AT_ONCE", 10)
    assert search.found(recorded_query({"text": "too LONG"}))["next"] == 10
    assert [it["group"] for it in all_rows(search, {"text": "too LONG"})] == expected


def test_of_a_long_text_what_was_found_is_shown(tmp_path: Path) -> None:
    ids = [0] * 400_000
    ids[250_000] = 3
    row = Trajectory(
        ids, [False, *[True] * 399_999], [0.0] * 400_000, [-1, *[1] * 399_999], [1.0] * 400_000,
        1.0, {},
    )  # fmt: skip
    recorder = recorder_of(tmp_path)
    recorder.add_group(PlayedGroup(group_of(1, 0.0), {0: [row]}))
    recorder.close()
    index = index_of(tmp_path, tmp_path / "rows.sqlite")
    index.follow(60.0)
    search = RowSearch(index)
    (found,) = search.found(recorded_query({"text": "yes"}))["rows"]
    assert "YES" in found["answer"]
    assert len(found["answer"]) == 400
    assert found["answer_at"] > 1_000_000
    ((whole,),) = search.every(recorded_query({}))
    assert len(whole["answer"]) == found["answer_chars"] > 1_900_000
    assert search.of_group(1)[0]["answer"] == whole["answer"]


def record(run: Path, *numbers: int, began: float = 1000.0, reward_of: int = 0) -> None:
    recorder = recorder_of(run)
    for number in numbers:
        row = a_row(random.Random(number + reward_of))
        recorder.add_group(PlayedGroup(group_of(number, began), {0: [row]}))
    recorder.close()


def groups(index: RowIndex) -> list[int]:
    index.follow(60.0)
    return [it["group"] for it in all_rows(RowSearch(index), {"sort": "group"})]


def test_it_goes_on_where_another_page_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = tmp_path / "rows.sqlite"
    index = index_of(tmp_path, database)
    assert groups(index) == []  # nothing is there yet
    record(tmp_path, 1, 2)
    assert groups(index) == [1, 2]
    record(tmp_path, 3)
    read = list[int]()
    unpack = row_index.rows_of
    monkeypatch.setattr(row_index, "rows_of", lambda *its: read.append(1) or unpack(*its))
    other = index_of(tmp_path, database)
    assert groups(other) == groups(index) == [1, 2, 3]
    assert len(read) == 1


def test_a_download_has_each_row_once_while_rows_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_search, "MAX_ROWS", 5)
    record(tmp_path, *range(23))
    index = index_of(tmp_path, tmp_path / "rows.sqlite")
    index.follow(60.0)
    expected = [row["group"] for row in all_rows(RowSearch(index), {}, 5)]
    given = list[int]()
    for rows_of_part in RowSearch(index).every(recorded_query({})):
        given += [row["group"] for row in rows_of_part]
        record(tmp_path, 100 + len(given), began=9000.0)  # newer ones, which come first
        index.follow(60.0)
    assert given == expected
    assert sorted(given) == [*range(23)]


def test_a_download_ends_with_the_database_that_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_search, "MAX_ROWS", 5)
    record(tmp_path, *range(23))
    index = index_of(tmp_path, tmp_path / "rows.sqlite")
    index.follow(60.0)
    parts = RowSearch(index).every(recorded_query({}))
    assert len(next(parts)) == 5
    (tmp_path / "rows.sqlite").unlink()
    with pytest.raises(RunFolderError, match="read anew"):
        next(parts)


def test_a_database_that_is_gone_is_made_anew(tmp_path: Path) -> None:
    record(tmp_path, 1)
    index = index_of(tmp_path, tmp_path / "cache" / "rows.sqlite")
    search = RowSearch(index)
    assert groups(index) == [row["group"] for row in all_rows(search, {})] == [1]
    shutil.rmtree(tmp_path / "cache")
    assert groups(index) == [1]
    shutil.rmtree(tmp_path / "cache")
    record(tmp_path, 2)
    index.follow(60.0)
    assert [row["group"] for row in all_rows(search, {"sort": "group"})] == [1, 2]


def test_what_became_of_a_group_goes_where_nothing_is_known_of_it_any_more(tmp_path: Path) -> None:
    def outcomes(index: RowIndex) -> list[str]:
        return [row["outcome"] for row in all_rows(RowSearch(index), {"sort": "group"})]

    record(tmp_path, 1, 2)
    index = index_of(tmp_path, tmp_path / "rows.sqlite")
    index.follow(60.0)
    index.note_fates({(1, 0): Fate("trained", 3, ""), (2, 0): Fate("finished", None, "")})
    assert outcomes(index) == ["trained", "finished"]
    index.note_fates({(1, 0): Fate("trained", 3, "")})  # the run has gone back, say
    assert outcomes(index) == ["trained", ""]
    later = index_of(tmp_path, tmp_path / "rows.sqlite")  # another page
    later.follow(60.0)
    later.note_fates({(2, 0): Fate("trained", 4, "")})
    assert outcomes(later) == ["", "trained"]


def test_pages_of_the_same_run_read_each_row_once(tmp_path: Path) -> None:
    record(tmp_path, *range(200))
    pages = [index_of(tmp_path, tmp_path / "rows.sqlite") for _ in range(3)]
    threads = [threading.Thread(target=it.follow, args=(60.0,)) for it in pages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [groups(it) for it in pages] == [list(range(200))] * 3


def test_what_is_gone_and_what_is_another_run_is_forgotten(tmp_path: Path) -> None:
    record(tmp_path, 1)
    record(tmp_path, 2)
    index = index_of(tmp_path, tmp_path / "rows.sqlite")
    assert groups(index) == [1, 2]
    first, second = sorted((tmp_path / "records").iterdir())
    first.unlink()
    assert groups(index) == [2]
    assert index.places(1) == {}
    record(tmp_path, 3)  # the run begins anew in its folder
    (third,) = {*(tmp_path / "records").iterdir()} - {second}
    third.rename(second)
    assert groups(index) == [3]


def test_of_a_group_that_was_played_again_the_later_one_counts(tmp_path: Path) -> None:
    record(tmp_path, 1, began=2000.0)
    record(tmp_path, 1, began=1000.0, reward_of=7)
    index = index_of(tmp_path, tmp_path / "rows.sqlite")
    assert groups(index) == [1]
    record(tmp_path, 1, began=3000.0)
    assert groups(index) == [1]
    assert all_rows(RowSearch(index), {})[0]["time"] == 3000.25


def test_what_an_attempt_that_has_no_end_was_given_is_known(tmp_path: Path) -> None:
    data_row = "{'prompt': 'q=', 'answer': '<script>'}"
    given = [group_of(n, 1000.0, prompt=data_row, index=90 + n) for n in range(3)]
    recorder = recorder_of(tmp_path)
    for it in given:
        recorder.add_group(PlayedGroup(it, {}))
    recorder.flush()  # of what kills its process now, this is there
    index = index_of(tmp_path, tmp_path / "db")
    index.follow(1.0)
    search = RowSearch(index)
    (row,) = search.found(recorded_query({"outcome": "unfinished", "group": "1"}))["rows"]
    assert (row["episode"], row["prompt"], row["right_answer"]) == (-1, data_row, "<script>")
    recorder.add_group(PlayedGroup(given[1], {0: [a_row(random.Random(0))]}))
    recorder.add_group(PlayedGroup(given[1], {}))  # as if its file was read later
    recorder.close()
    index.follow(1.0)
    assert search.found(recorded_query({}))["outcome"] == {"unfinished": 2}
    assert [it["episode"] for it in search.of_group(1)] == [0]
    assert search.data_rows([(90, 0), (91, 0), (99, 0), (90, 1)]) == {
        (90, 0): data_row,
        (91, 0): data_row,
    }
    assert search.data_rows([]) == {}


@pytest.mark.parametrize(
    ("data_row", "answer"),
    [
        ("{'answer': 7}", "7"),
        ("{'answer': None}", ""),
        ("{'prompt': 'cut [...]", ""),
        ("[1]", ""),
        ("(" * 1000, ""),
        ("__import__('os').getpid()", ""),
    ],
)
def test_the_right_answer_is_that_of_the_data(tmp_path: Path, data_row: str, answer: str) -> None:
    recorder = recorder_of(tmp_path)
    recorder.add_group(PlayedGroup(group_of(0, 1000.0, prompt=data_row), {}))
    recorder.close()
    index = index_of(tmp_path, tmp_path / "db")
    index.follow(1.0)
    (row,) = RowSearch(index).found(recorded_query({}))["rows"]
    assert row["right_answer"] == answer


def test_a_tokenizer_that_comes_later_gives_the_texts(tmp_path: Path) -> None:
    record(tmp_path, 1)
    index = index_of(tmp_path, tmp_path / "rows.sqlite", lambda: None)
    assert groups(index) == [1]
    page = RowSearch(index).found(recorded_query({"text": "row 1 of"}))
    assert not page["has_texts"]
    assert [(it["prompt"], it["answer"]) for it in page["rows"]] == [("row 1 of the data", "")]
    other = index_of(tmp_path, tmp_path / "rows.sqlite")
    assert groups(other) == [1]
    (row,) = rows(tmp_path)
    assert all_rows(RowSearch(other), {})[0]["answer"] == texts(row)[1]


def test_what_is_damaged_is_told_and_the_rest_is_there(tmp_path: Path) -> None:
    record(tmp_path, 1, 2, 3)
    (path,) = (tmp_path / "records").iterdir()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content[:-5])
    index = index_of(tmp_path, tmp_path / "rows.sqlite")
    found = groups(index)
    assert 1 in found
    assert 3 not in found
    assert any("damaged" in it or "checksum" in it for it in index.damage)
    assert any("cut short" in it for it in index.damage)
    again = index_of(tmp_path, tmp_path / "rows.sqlite")
    again.follow(60.0)
    assert again.damage == index.damage


@pytest.mark.parametrize("content", [b"no database" * 100, b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_damaged_database_is_made_anew(tmp_path: Path, content: bytes) -> None:
    record(tmp_path, 1)
    database = tmp_path / "rows.sqlite"
    database.write_bytes(content)
    index = index_of(tmp_path, database)
    with pytest.raises(RunFolderError, match="was damaged"):
        index.follow()
    assert groups(index) == [1]


def test_a_database_of_another_areal_sc_is_made_anew(tmp_path: Path) -> None:
    record(tmp_path, 1)
    database = tmp_path / "rows.sqlite"
    connection = sqlite3.connect(database)
    connection.execute("PRAGMA user_version = 77")
    connection.close()
    assert groups(index_of(tmp_path, database)) == [1]


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "rows.sqlite").mkdir()
    with pytest.raises(RunFolderError, match="XDG_CACHE_HOME names another"):
        index_of(tmp_path, tmp_path / "rows.sqlite").follow()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="XDG_CACHE_HOME names another"):
        index_of(tmp_path, tmp_path / "file" / "rows.sqlite").follow()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"reward": "high"}, "reward: expected a number, or a range such as 0..0.5, got 'high'"),
        ({"sort": "prompt"}, "sort: expected time, step"),
        ({"place": "best"}, "expected time, step, .* or metrics.NAME, got 'place'"),
    ],
)
def test_wrong_words_are_told(words: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        recorded_query(words)


def test_words_are_no_sql(search: RowSearch) -> None:
    evil = '"; DROP TABLE rows; --'
    assert all_rows(search, {"worker": evil, f"metrics.{evil}": "1", "text": evil}) == []
    assert all_rows(search, {"sort": f"metrics.{evil}"})
