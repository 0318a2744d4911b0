"""`python -m areal_sc`, in this process: its words, what it says, and its exit code."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import closing
from pathlib import Path

import pytest
from ledger_history import History, a_run
from sample_rows import sample

from areal_sc import __main__ as program
from areal_sc.commands.new import project_files
from areal_sc.disk import Disk
from areal_sc.json_lines import JsonLines
from areal_sc.samples import Place
from areal_sc.trainer.failure import run_script

REPOSITORY = Path(__file__).parents[3]

Told = pytest.CaptureFixture[str]


def call(*words: object) -> int | str | None:
    """The exit code."""
    try:
        return run_script(program.main, [str(word) for word in words])
    except SystemExit as end:
        return end.code


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two steps; in the last one, two groups, of which one has equal rewards."""
    with closing(JsonLines(tmp_path / "samples.jsonl")) as lines:
        lines.append(sample(1, answer="one"))
        lines.append(
            sample(2, answer="good"),
            sample(2, answer="bad", place=Place.worst, reward=0.0),
            sample(2, answer="same", place=Place.equal, group=4),
        )
    return tmp_path


def answers(text: str) -> list[str]:
    return re.findall(r"^  (?:best|worst|equal) +(\w+)$", text, re.MULTILINE)


def test_without_words_it_shows_what_there_is(capsys: Told) -> None:
    assert call() == 0
    told = capsys.readouterr()
    assert "new " in told.out
    assert "samples " in told.out
    assert told.err == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sample"], "invalid choice: 'sample'"),
        (["samples"], "RUN_DIR"),
        (["samples", "x", "--last", "0"], "expected a number above 0, got 0"),
        (["samples", "x", "--best", "--worst"], "not allowed with"),
        (["new"], "FOLDER"),
    ],
)
def test_wrong_words_show_help_and_what_is_wrong(
    words: list[str], message: str, capsys: Told
) -> None:
    assert call(*words) == 2
    told = capsys.readouterr().err
    assert told.startswith("usage: python -m areal_sc")
    assert "-h, --help" in told
    assert message in told.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["good", "bad", "same"]),
        (["--step", "1"], ["one"]),
        (["--worst"], ["bad", "same"]),
        (["--best"], ["good", "same"]),
        (["--last", "2"], ["bad", "same"]),
        (["--last", "2", "--best"], ["good", "same"]),
        (["--last", "99"], ["one", "good", "bad", "same"]),
        (["--step", "2", "--last", "1"], ["same"]),
    ],
)
def test_samples_are_chosen(
    words: list[str], expected: list[str], run_dir: Path, capsys: Told
) -> None:
    assert call("samples", run_dir, *words) == 0
    assert answers(capsys.readouterr().out) == expected


def test_a_line_that_is_being_written_is_left_out(run_dir: Path, capsys: Told) -> None:
    with (run_dir / "samples.jsonl").open("a") as file:
        file.write('{"step": 3, "answer": "hal')
    assert call("samples", run_dir) == 0
    assert answers(capsys.readouterr().out) == ["good", "bad", "same"]


def test_samples_that_are_not_there_are_an_error(run_dir: Path, capsys: Told) -> None:
    assert call("samples", run_dir, "--step", 7) == 2
    assert "no samples of step 7, only of 2 steps from 1 to 2" in capsys.readouterr().err
    assert call("samples", run_dir / "nowhere") == 2
    assert "nowhere; expected that of a run" in capsys.readouterr().err
    (run_dir / "samples.jsonl").write_text('{"torn')
    assert call("samples", run_dir) == 2
    assert "samples.groups_per_step=0" in capsys.readouterr().err


@pytest.fixture
def ledger_dir(tmp_path: Path) -> Path:
    """A run whose journal ends within a record."""

    async def write() -> None:
        history = History(Disk(), tmp_path / "ledger")
        a_run(history)
        await history.journal.close()

    asyncio.run(write())
    path = tmp_path / "ledger" / "000001.journal"
    path.write_bytes(path.read_bytes()[:-1])
    return tmp_path


def test_the_ledger_tells_what_became_of_every_group(ledger_dir: Path, capsys: Told) -> None:
    assert call("ledger", ledger_dir) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines[:6]) == [
        "group 0: admitted at version 0, run by rollout/0, 2 rows of version 0, trained by step 0",
        "group 1: admitted at version 0, run by rollout/2 (attempt 1), 3 rows of versions 0 to 1, "
        "trained by step 1",
        "group 2: admitted at version 0, rejected: reward_error",
        "group 3: admitted at version 0, run by rollout/0, 2 rows of versions 0 to 2, finished",
        "group 4: admitted at version 0, queued",
        "group 5: admitted at version 0, queued",
    ]
    assert lines[7:10] == [
        "groups: 6 admitted, 2 consumed, 1 rejected (reward_error 1)",
        "in flight: 2 queued, 0 running, 1 finished",
        "rows: 5 consumed, 5 trained, 0 trained twice, 0 lost",
    ]
    assert "bytes are left out: a record is being written" in lines[-1]
    assert call("ledger", ledger_dir, "--totals") == 0
    assert capsys.readouterr().out.splitlines() == lines[6:]


def test_the_ledger_as_json(ledger_dir: Path, capsys: Told) -> None:
    assert call("ledger", ledger_dir, "--json") == 0
    *groups, run = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    outcomes = {group["group"]: group["outcome"] for group in groups}
    assert outcomes == dict(enumerate(["trained"] * 2 + ["rejected", "finished"] + ["queued"] * 2))
    assert (run["totals"]["rows_trained"], run["rows_lost"], run["lineages"]) == (5, 0, [[1, 0]])


def test_a_ledger_that_cannot_be_read_is_an_error(ledger_dir: Path, capsys: Told) -> None:
    path = ledger_dir / "ledger" / "000001.journal"
    path.write_bytes(path.read_bytes()[:60] + b"?" + path.read_bytes()[61:])
    assert call("ledger", ledger_dir) == 3
    assert "is damaged at byte" in " ".join(capsys.readouterr().err.split())
    assert call("ledger", ledger_dir / "nowhere") == 2
    assert "nowhere; expected that of a run" in capsys.readouterr().err


def test_new_writes_the_example_and_says_what_comes_next(tmp_path: Path, capsys: Told) -> None:
    folder = tmp_path / "deep" / "task"
    assert call("new", folder) == 0
    told = capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == [
        "test_train.py",
        "train.py",
        "train.yaml",
    ]
    for path in folder.iterdir():
        text = path.read_text()
        assert not re.search("minimal|examples/|configs/", text)
        if path.suffix == ".py":
            compile(text, path.name, "exec")
    script = (REPOSITORY / "examples" / "minimal.py").read_text()
    assert (folder / "train.py").read_text().splitlines()[5:] == [
        line.replace("minimal", "train") for line in script.splitlines()[5:]
    ]
    assert "python train.py --config train.yaml" in told
    for name, start in [("prompts", "PROMPTS ="), ("reward", "def reward("), ("model", "  path:")]:
        found = re.search(rf"{name} +(\S+):(\d+)", told)
        assert found is not None, told
        line = (folder / found[1]).read_text().splitlines()[int(found[2]) - 1]
        assert line.startswith(start)
    assert max(map(len, told.replace(str(folder), "task").splitlines())) <= 80


def test_new_writes_to_an_empty_folder_and_to_no_other(tmp_path: Path, capsys: Told) -> None:
    assert call("new", tmp_path) == 0
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    (tmp_path / "train.py").write_text("my own")
    assert call("new", tmp_path) == 2
    told = capsys.readouterr().err
    assert "is not empty (test_train.py, train.py, train.yaml), so nothing was written" in told
    after = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert after == before | {"train.py": "my own"}
    assert call("new", tmp_path / "train.py") == 2
    assert "cannot write a project to" in capsys.readouterr().err


def test_the_files_of_a_project_are_the_example() -> None:
    """One source: links, which a wheel has as files."""
    assert project_files().keys() == {"train.py", "train.yaml", "test_train.py"}
    for link in (REPOSITORY / "areal_sc" / "commands" / "project").iterdir():
        assert link.is_symlink()
        assert link.resolve().parent.parent == REPOSITORY
