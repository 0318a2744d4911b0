"""Data sets by name and files: downloaded once, found offline, refused with what to do."""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from builders import picture
from hub_server import TOKEN, HubServer, serve_hub

from areal_sc.errors import WorkflowError
from areal_sc.sources import load_prompts as module
from areal_sc.sources.load_prompts import SourceWords, load_prompts, load_rows
from areal_sc.sources.pictures import with_pictures
from areal_sc.sources.prompts import JsonlPrompts

LOAD = """
import itertools, json, os, sys
from areal_sc import load_prompts
from areal_sc.errors import WorkflowError

for call in json.loads(sys.argv[1]):
    assert "torch" not in sys.modules  # streams alone, of `datasets`, load it
    try:
        print(json.dumps(list(itertools.islice(load_prompts(**call), 5))))
    except WorkflowError as error:
        print(json.dumps(str(error)))
sys.stdout.flush()
os._exit(0)  # threads in which a stream still reads abort a process that ends in the usual way
"""

ROWS = [
    {"question": f"{a} + {a}?", "answer": f"twice {a} #### {2 * a}", "level": a} for a in range(7)
]

SCHOOL = {"path": "acme/school", "name": "main", "prompt_key": "question"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("hub")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    for name in ("gated", "private"):
        data_set = folder / "datasets" / "acme" / name
        data_set.mkdir(parents=True)
        (data_set / "train.jsonl").write_text(lines)
    for subset in ("main", "other"):
        data_set = folder / "datasets" / "acme" / "school" / subset
        data_set.mkdir(parents=True)
        datasets.Dataset.from_list(ROWS).to_parquet(data_set / "train.parquet")
        datasets.Dataset.from_list(ROWS).select([]).to_parquet(data_set / "test.parquet")
    (folder / "datasets" / "acme" / "school" / "README.md").write_text(
        "---\nconfigs:\n"
        + "".join(
            f"- config_name: {subset}\n  data_files:\n"
            + "".join(
                f"  - split: {split}\n    path: {subset}/{split}.parquet\n"
                for split in ("train", "test")
            )
            for subset in ("main", "other")
        )
        + "---\n"
    )
    with serve_hub(folder) as server:
        yield server


def loaded(hub: HubServer, home: Path, *calls: dict[str, Any], **environment: str) -> list[Any]:
    """What a process of its own gets, a list of rows or a refusal for each of these calls."""
    hub.asked.clear()
    process = subprocess.run(
        [sys.executable, "-c", LOAD, json.dumps(calls)],
        env={**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def test_the_first_start_downloads_and_the_second_does_not(hub: HubServer, tmp_path: Path) -> None:
    template = {**SCHOOL, "template": "Q: {question}\nA:"}
    stream = {**template, "streaming": True}
    plain, asked, streamed = loaded(hub, tmp_path, SCHOOL, template, stream)
    assert hub.num_downloads
    assert plain == [{**row, "prompt": row["question"]} for row in ROWS[:5]]
    assert asked == [{**row, "prompt": f"Q: {row['question']}\nA:"} for row in ROWS[:5]]
    assert streamed == asked
    closed = [{"path": f"acme/{name}", "prompt_key": "question"} for name in ("gated", "private")]
    again = loaded(hub, tmp_path, SCHOOL, template, *closed, HF_TOKEN=TOKEN)
    assert again[:2] == [plain, asked]
    assert not any(".parquet" in line and "GET" in line for line in hub.asked)
    assert [rows[0]["prompt"] for rows in again[2:]] == ["0 + 0?"] * 2, "what is not public"
    offline = loaded(hub, tmp_path, SCHOOL, {"path": "acme/never"}, HF_HUB_OFFLINE="1")
    assert offline[0] == plain
    assert "HF_HUB_OFFLINE is set" in offline[1]
    assert not hub.asked


def test_what_cannot_be_had_says_what_to_do(hub: HubServer, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"path": "acme/shcool"}, "no such folder, and no such dataset"),
        ({**SCHOOL, "revision": "v9"}, "no such revision"),
        ({"path": "acme/gated"}, "grants access on request"),
        ({"path": "acme/private"}, "hf auth login"),
        ({"path": "acme/school"}, "['main', 'other']"),
        ({**SCHOOL, "name": "mian"}, "['main', 'other']"),
        ({**SCHOOL, "split": "dev"}, "train"),
        (
            {**SCHOOL, "split": "test"},
            'split test: ValueError: Instruction "test" corresponds to no data',
        ),
        (
            {**SCHOOL, "prompt_key": "qestion"},
            "no column 'qestion'; it has answer, level, question",
        ),
        ({**SCHOOL, "template": "{qestion}"}, "no column 'qestion'"),
        ({**SCHOOL, "answer_key": "solution", "streaming": True}, "no column 'solution'"),
    ]
    shown = loaded(hub, tmp_path, *(call for call, _ in cases))
    for (call, told), message in zip(cases, shown, strict=True):
        assert isinstance(message, str), call
        assert message.startswith(f"dataset {call['path']}"), message
        assert told in message, message


def test_without_a_network_it_has_to_be_there(hub: HubServer, tmp_path: Path) -> None:
    (message,) = loaded(hub, tmp_path, SCHOOL, HF_ENDPOINT="http://127.0.0.1:9")
    assert "Connection refused" in message


def test_files_of_all_kinds_give_the_same_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    with (tmp_path / "rows.csv").open("w") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    for ending in ("json", "jsonl", "parquet", "csv"):
        rows = list(load_prompts(tmp_path / f"rows.{ending}", template="{question} "))
        expected = [{**row, "prompt": f"{row['question']} "} for row in ROWS]
        if ending == "csv":
            expected = [{key: str(value) for key, value in row.items()} for row in expected]
        assert rows == expected, ending


WRITTEN = [
    {"prompt": "a", "answer": 2**70 + 1, "day": "2024-01-05", "code": "007", "n": 9007199254740993},
    {"prompt": "b\u2028\n,", "answer": "00", "day": "2024-01-05T00:00:00Z", "n": [1, {"a": None}]},
]


def write_rows(path: Path, rows: list[Any]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        with path.open("w", encoding="utf-8-sig") as file:  # as spreadsheets write it
            csv.writer(file).writerows(
                [list(rows[0]), *([row[k] for k in rows[0]] for row in rows)]
            )


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_json_stays_what_is_written(tmp_path: Path, ending: str, is_streamed: bool) -> None:
    write_rows(tmp_path / f"rows.{ending}", WRITTEN)
    assert list(load_prompts(tmp_path / f"rows.{ending}", streaming=is_streamed)) == WRITTEN


def test_cells_of_a_csv_stay_the_texts_that_they_are(tmp_path: Path) -> None:
    row = {
        "prompt": 'a\n"b",\r\nc',
        "answer": "007",
        "n": str(2**70),
        "day": "2024-01-05",
        "x": "1e3",
    }
    write_rows(tmp_path / "rows.csv", [row, {**row, "answer": "x" * 200_000, "n": "", "x": "NA"}])
    first, second = load_prompts(tmp_path / "rows.csv")
    assert first == row
    assert (second["n"], second["x"], len(second["answer"])) == (None, "NA", 200_000)


def test_a_folder_of_text_files_is_read_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    folder.mkdir()
    write_rows(folder / "train.jsonl", WRITTEN)
    write_rows(folder / "test.json", WRITTEN[:1])
    assert load_prompts(folder) == WRITTEN
    assert load_prompts(folder, split="test+train[1:]") == WRITTEN
    assert list(load_prompts(folder, split="test", streaming=True)) == WRITTEN[:1]
    with pytest.raises(WorkflowError, match=r"no split 'dev': expected train or test, or a part"):
        load_prompts(folder, split="dev")
    with pytest.raises(WorkflowError, match=r"expected a whole split \(train, test\)"):
        load_prompts(folder, split="train[:1]", streaming=True)


def test_types_that_the_library_guesses_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    with gzip.open(tmp_path / "data" / "train.csv.gz", "wt") as file:
        file.write("prompt,answer\na,007\n")
    assert next(iter(load_prompts(tmp_path / "data")))["answer"] == 7
    assert "`datasets` has guessed the types {'answer': 'int64'} from text" in caplog.text


@pytest.mark.parametrize(
    ("split", "numbers"),
    [
        ("train", range(10)),
        ("train[:3]", range(3)),
        ("train[-2:]", range(8, 10)),
        ("train[10%:35%]", range(1, 4)),
        ("train[8:] + train[:1]", [8, 9, 0]),
    ],
)
@pytest.mark.parametrize("ending", ["json", "jsonl", "csv"])
def test_a_part_of_a_file(tmp_path: Path, ending: str, split: str, numbers: list[int]) -> None:
    rows = [{"prompt": "a", "answer": str(n)} for n in range(10)]
    write_rows(tmp_path / f"rows.{ending}", rows)
    assert load_prompts(tmp_path / f"rows.{ending}", split=split) == [rows[n] for n in numbers]


@pytest.mark.parametrize("ending", ["json", "jsonl", "csv", "parquet"])
@pytest.mark.parametrize("column", ["prompt", "answer", "hint"])
def test_a_row_without_what_is_needed_is_refused_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, column: str
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    row = {"prompt": "a", "answer": "b", "hint": "c", "note": ""}
    rows = [row, {**row, column: None}, row]
    path = tmp_path / f"rows.{ending}"
    if ending == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        write_rows(path, rows)
    settings: dict[str, Any] = {"template": "{prompt} Hint: {hint}"} if column == "hint" else {}
    told = f"row 1 has nothing in its column '{column}'; leave the row out"
    with pytest.raises(WorkflowError, match=told):
        load_prompts(path, **settings)
    if ending != "parquet":
        with pytest.raises(WorkflowError, match=told):
            list(load_prompts(path, streaming=True, **settings))
    others = {"prompt_key": "note" if ending != "csv" else "hint", "answer_key": ""}
    if column != "hint":
        assert len(list(load_prompts(path, **others))) == 3


@pytest.mark.parametrize(
    ("path", "settings", "told"),
    [
        ("rows.csv", {}, "rows.csv does not exist"),
        ("rows.parquet", {}, "no such file or folder"),
        ("rows.jsonl", {"split": "test"}, "no split 'test': expected train, or a part such as"),
        ("rows.jsonl", {"split": "train[1]"}, r"no split 'train\[1\]'"),
        ("rows.jsonl", {"split": "train[5:]"}, "it has no row"),
        ("rows.jsonl", {"name": "main"}, "name='main' is of folders and of the hub alone"),
        ("rows.jsonl", {"revision": "v1"}, "revision='v1' is of data sets of the hub alone"),
        ("rows.parquet", {"revision": "v1"}, "revision='v1' is of data sets of the hub alone"),
        ("wide.csv", {}, "wide.csv:3: expected 2 cells .prompt, answer., got 3"),
        ("short.csv", {}, "short.csv:2: expected 2 cells"),
        ("twice.csv", {}, "two columns have one name"),
        ("list.json", {}, "list.json: row 1: expected a JSON object"),
        ("broken.json", {}, "broken.json: no JSON"),
        ("rows.jsonl", {"template": "{question} {answer[a]}"}, "row 0: template"),
        ("none.json", {"template": "{question[hint]}"}, r"nothing in 'question\[hint\]'"),
        ("rows.jsonl", {"prompt_key": "text"}, "row 0 has no column 'text'; it has answer, que"),
        ("rows.jsonl", {"template": "{question"}, "expected '}'"),
        ("nan.jsonl", {}, "row 0 has nothing in its column 'answer'"),
        ("deep.json", {}, "cannot be read: maximum recursion depth"),
        ("rows.tsv", {}, "the file is of no kind that is read; expected one"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    tmp_path: Path, path: str, settings: dict[str, str], told: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    (tmp_path / "wide.csv").write_text("prompt,answer\n1,2\n1,2,3\n")
    (tmp_path / "short.csv").write_text("prompt,answer\n1\n")
    (tmp_path / "twice.csv").write_text("prompt,prompt\n1,2\n")
    (tmp_path / "list.json").write_text('[{"prompt": "a", "answer": "b"}, 3]')
    (tmp_path / "broken.json").write_text('[{"prompt": "a"},]')
    (tmp_path / "none.json").write_text('[{"question": {"hint": null}, "answer": "b"}]')
    (tmp_path / "nan.jsonl").write_text('{"prompt": "a", "answer": NaN}\n')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "rows.tsv").touch()
    with pytest.raises(WorkflowError, match=told):
        load_prompts(tmp_path / path, **settings)  # type: ignore[arg-type]


def test_rows_and_prompts_take_the_same_words(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows: list[dict[str, Any]] = [{"q": str(n), "a": 2 * n} for n in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words: SourceWords = {"prompt_key": "q", "answer_key": "a", "split": "train[:2]"}
    shaped = [{**row, "prompt": row["q"], "answer": row["a"]} for row in rows[:2]]
    assert load_prompts(path, **words) == shaped
    for load in (load_prompts, load_rows):
        assert load(path, num_held_out=1, **words) == (shaped[:1], shaped[1:])
        with pytest.raises(WorkflowError, match="expected 0 to 1 rows to hold out of 2, got 2"):
            load(path, num_held_out=2, **words)
        with pytest.raises(WorkflowError, match="num_held_out: of rows that are not streamed"):
            load(path, num_held_out=1, streaming=True)
    assert load_rows(path, num_held_out=1) == (rows[:2], rows[2:])
    assert load_rows(path, template="{q}?")[0][0] == {**rows[0], "prompt": "0?"}


def test_the_home_of_nobody_is_no_folder() -> None:
    for load in (load_prompts, JsonlPrompts):
        with pytest.raises(WorkflowError, match="~nobody_of_this_name/a"):
            load("~nobody_of_this_name/a.jsonl")


def test_the_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(WorkflowError, match=r"pip install areal-sc\[datasets\]"):
        load_prompts("acme/school")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "answer": "y"}\n')
    assert load_prompts(tmp_path / "rows.jsonl") == [{"prompt": "x", "answer": "y"}]


def test_pictures_of_a_data_set_stay_as_they_were_stored(tmp_path: Path) -> None:
    jpeg, png = picture(0, kind="JPEG"), picture(1)
    columns = {"prompt": ["a"], "answer": ["b"], "images": [[jpeg, png]], "image": [jpeg]}
    one = datasets.Image()
    text = datasets.Value("string")
    features = {"prompt": text, "answer": text, "images": datasets.List(one), "image": one}
    stored = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    stored.to_parquet(tmp_path / "rows.parquet")
    (row,) = load_prompts(tmp_path / "rows.parquet")
    assert with_pictures(row)["images"] == [jpeg, png]
    (held, *_), _ = load_rows(tmp_path / "rows.parquet")
    assert with_pictures({"images": held["image"]})["images"] == [jpeg]
