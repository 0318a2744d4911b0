"""`python -m areal_sc`, in this process: its words, what it says, and its exit code."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from builders import make_evaluation, make_step
from ledger_history import History, a_run
from page_runs import row, tokenizer
from recorded_groups import played, recorder_of

from areal_sc import __main__ as program
from areal_sc.commands import evaluate
from areal_sc.commands.new import project_files
from areal_sc.config.loading.loader import config_text
from areal_sc.config.schema import GRPOConfig
from areal_sc.engines import snapshot_model
from areal_sc.records.metrics import EvaluationResult, StepMetrics
from areal_sc.records.metrics_log import MetricsLog
from areal_sc.run.run_begin import RunBegin, content_of
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_marker import MARKER
from areal_sc.run.run_owner import LOCK
from areal_sc.system.disk import Disk
from areal_sc.system.file_lock import take_lock
from areal_sc.trainer.evaluation.kept_answers import ANSWERS, SETTINGS, note_settings
from areal_sc.trainer.failure import run_script

REPOSITORY = Path(__file__).parents[3]

Told = pytest.CaptureFixture[str]


def call(*words: object) -> int | str | None:
    """The exit code."""
    try:
        return run_script(program.main, [str(word) for word in words])
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize("text", ["nan", "-1", "inf", "x"])
def test_stop_waits_for_a_number_of_seconds(text: str, tmp_path: Path, capsys: Told) -> None:
    assert call("stop", tmp_path, f"--timeout={text}") == 2
    assert f"expected a number of seconds, got '{text}'" in capsys.readouterr().err


def test_stop_says_why_there_is_nothing_to_stop(tmp_path: Path, capsys: Told) -> None:
    assert call("stop", tmp_path / "none") == 2
    assert f"there is no folder {tmp_path / 'none'}" in capsys.readouterr().err
    assert call("stop", tmp_path) == 2
    assert "is not the folder of a run: it has no sound run.json" in capsys.readouterr().err
    with RunFolder(tmp_path / "run") as folder:
        folder.lock()
        assert call("stop", folder.path, "--timeout", "0.1") == 9
        said = capsys.readouterr()
        assert f"process {os.getpid()} on {socket.gethostname()} has no workers" in said.out
        assert f"within 0.1 s: process {os.getpid()} is running in it" in " ".join(said.err.split())
    assert call("stop", folder.path) == 0
    assert "has ended before it was finished" in capsys.readouterr().out
    folder.summary_path.touch()
    assert call("stop", folder.path) == 0
    assert "is finished" in capsys.readouterr().out


def test_a_full_disk_behind_its_output_does_not_keep_stop_from_its_work(
    tmp_path: Path,
) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.open(config_text="seed: 0\n")
    for word, code in (("stop", 0), ("status", 2)):
        command = [sys.executable, "-m", "areal_sc", word, folder.path]
        with open("/dev/full", "w") as full:
            ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        assert ended.returncode == code, ended.stderr
        assert "No space left on device" in ended.stderr
        assert "Traceback" not in ended.stderr


def test_curve_draws_and_sums_up_what_a_stopped_run_has_measured(
    tmp_path: Path, capsys: Told
) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.lock()
        assert call("curve", folder.path) == 2
        assert "the run has not begun to train" in capsys.readouterr().err
        with closing(MetricsLog(folder.metrics_path)) as log:
            log.on_step(planned_step(1))
            for name, reward in (("math/before", 0.25), ("math/after", 0.5), ("before", 0.125)):
                log.on_evaluation(evaluation(name, reward))
    assert call("curve", folder.path) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"1 steps: {folder.learning_curve_path}\nnum_steps ")
    assert re.search(r"^reward_before +0\.125 *$", said, re.MULTILINE)
    assert re.search(r"^wait_share +50% *$", said, re.MULTILINE)
    assert "math/after (accuracy 0.500, reward 0.500)" in " ".join(said.split())
    assert "wall_time_s" not in said
    assert folder.learning_curve_path.read_bytes().startswith(b"\x89PNG")
    assert not folder.summary_path.exists()


def evaluation(name: str, reward: float) -> EvaluationResult:
    return make_evaluation(name, reward=reward, accuracy=reward)


Exported = list[tuple[Path, Path, Path]]


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Exported:
    """(model, snapshot, target) of each export; nothing is written."""
    found: Exported = []
    monkeypatch.setattr(
        snapshot_model,
        "export_snapshot",
        lambda actor, *paths, adapter_alone: found.append((Path(actor.path), *paths)),
    )
    return found


@pytest.fixture
def stopped(planned_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """It was begun with the relative path `model`, and has two snapshots."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    folder = RunFolder(planned_dir)
    RunBegin(folder.begun_path).note_begin({"model model": content_of(tmp_path / "model")})
    for step in (20, 30):
        folder.snapshot_path(step).mkdir()
    return folder


def test_export_writes_where_the_run_would_have(
    stopped: RunFolder, exported: Exported, tmp_path: Path, capsys: Told
) -> None:
    assert call("export", stopped.path) == 0
    assert call("export", stopped.path, "--step", 20) == 0
    assert call("export", stopped.path, "out") == 0
    snapshots = [stopped.snapshot_path(step) / "engine" for step in (30, 20, 30)]
    targets = [stopped.path / "model", stopped.path / "model", tmp_path / "out"]
    assert exported == [(Path("model"), *pair) for pair in zip(snapshots, targets, strict=True)]
    assert f"model of step 30: {stopped.path / 'model'}\n" in capsys.readouterr().out


def test_a_living_run_is_exported_to_elsewhere(
    stopped: RunFolder, exported: Exported, tmp_path: Path, capsys: Told
) -> None:
    with RunFolder(stopped.path) as living:
        living.hold(None)
        assert call("export", stopped.path) == 2
        told = " ".join(capsys.readouterr().err.split())
        assert "cannot be written now: name a FOLDER that is not the run's" in told
        assert exported == []
        assert call("export", stopped.path, "out") == 0
    assert [target for *_, target in exported] == [tmp_path / "out"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--step", "25"], 2, "there is no snapshot of step 25, only of [20, 30]"),
        (["model"], 2, "goes on from the model in model: name another FOLDER"),
        (["out", "--adapter"], 2, "has trained no adapter"),
        (["run"], 8, "it has other files in it and is not a model's folder"),
    ],
)
def test_export_refuses_what_it_cannot_do(
    words: list[str], code: int, message: str, stopped: RunFolder, exported: Exported, capsys: Told
) -> None:
    assert call("export", stopped.path, *words) == code
    assert message in " ".join(capsys.readouterr().err.split())
    assert exported == []


def test_export_says_what_is_not_there_or_changed(
    stopped: RunFolder,
    exported: Exported,
    tmp_path: Path,
    capsys: Told,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "model" / "config.json").write_text('{"another": true}')
    assert call("export", stopped.path) == 0
    assert "model model changed since the run began: config.json" in caplog.text
    exported.clear()
    stopped.summary_path.touch()
    assert call("export", stopped.path) == 2
    assert "the run is finished, and its model is in" in " ".join(capsys.readouterr().err.split())
    os.chdir(stopped.path)
    assert call("export", stopped.path, "out") == 6
    assert "actor.path=model of the run, which has the tokenizer, is no" in capsys.readouterr().err
    for step in (20, 30):
        stopped.snapshot_path(step).rmdir()
    assert call("export", stopped.path) == 2
    assert "there is no snapshot in" in capsys.readouterr().err
    assert exported == []


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two steps; in the last one, three groups, of which the last two have equal rewards."""
    with RunFolder(tmp_path / "run") as folder:
        folder.open(config_text="seed: 1\n")
    tokenizer().save(str(folder.tokenizer_path))
    recorder = recorder_of(folder.path)
    texts = [[("one", 0.5)], [("mean", 0.5), ("bad", 0.0), ("good", 1.0)], [("left", 0.5)]]
    for number, answers in enumerate([*texts, [("same", 1.0)] * 2, [("late", 1.0)]]):
        of_group = [[row(("1+1=", -1), (text, 0), reward=reward)] for text, reward in answers]
        recorder.add_group(played(number, *of_group))
    recorder.close()

    async def write() -> None:
        history = History(Disk(), folder.ledger)
        for number in [history.admit() for _ in range(5)]:
            history.run(number)
        history.train(0)
        history.train(1, 2, 3)
        await history.journal.close()

    asyncio.run(write())
    return folder.path


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
        (["samples", "x", "--last", "0"], "expected a number above 0, got '0'"),
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
        ([], ["good", "bad", "left"]),
        (["--step", "1"], ["one"]),
        (["--worst"], ["bad", "left"]),
        (["--best"], ["good", "left"]),
        (["--last", "2"], ["bad", "left"]),
        (["--last", "2", "--best"], ["good", "left"]),
        (["--last", "99"], ["one", "good", "bad", "left"]),
        (["--step", "2", "--last", "1"], ["left"]),
        (["--groups", "9"], ["good", "bad", "left", "same"]),
        (["--groups", "1"], ["good", "bad"]),
    ],
)
def test_samples_are_chosen(
    words: list[str], expected: list[str], run_dir: Path, capsys: Told
) -> None:
    assert call("samples", run_dir, *words) == 0
    assert answers(capsys.readouterr().out) == expected


def test_a_record_that_is_being_written_is_left_out(run_dir: Path, capsys: Told) -> None:
    (records,) = (run_dir / "records").glob("*.rows.*")
    with records.open("ab") as file:
        file.write(records.read_bytes()[:50])
    assert call("samples", run_dir) == 0
    assert answers(capsys.readouterr().out) == ["good", "bad", "left"]


def test_samples_that_are_not_there_are_an_error(run_dir: Path, capsys: Told) -> None:
    assert call("samples", run_dir, "--step", 7) == 2
    assert "no samples of step 7, only of steps from 1 to 2" in capsys.readouterr().err
    assert call("samples", run_dir / "nowhere") == 2
    assert "nowhere; expected that of a run" in capsys.readouterr().err
    (run_dir / "tokenizer.json").unlink()
    assert call("samples", run_dir) == 2
    assert f"no tokenizer.json in {run_dir}, {run_dir}/model" in capsys.readouterr().err
    shutil.rmtree(run_dir / "records")
    assert call("samples", run_dir) == 2
    assert "has not begun its first training step" in capsys.readouterr().err


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


def test_the_ledger_as_json(ledger_dir: Path, capsys: Told) -> None:
    assert call("ledger", ledger_dir, "--json") == 0
    *groups, run = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    outcomes = {group["group"]: group["outcome"] for group in groups}
    assert outcomes == dict(enumerate(["trained"] * 2 + ["rejected", "finished"] + ["queued"] * 2))
    assert (run["totals"]["rows_trained"], run["rows_lost"]) == (5, 0)
    assert run["lineages"] == [{"lineage": 1, "begun_at": 0, "version": 2, "counts_to": 2}]


def test_one_that_reads_no_further_is_no_error(ledger_dir: Path) -> None:
    """As with `| head`."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody_reads:
        done = subprocess.run(
            [sys.executable, "-m", "areal_sc", "ledger", ledger_dir],
            stdout=nobody_reads,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr) == (0, "")


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
        assert not re.search("first_project|examples/|configs/", text)
        if path.suffix == ".py":
            compile(text, path.name, "exec")
    script = (REPOSITORY / "examples" / "first_project.py").read_text()
    assert (folder / "train.py").read_text().splitlines()[5:] == [
        line.replace("first_project", "train") for line in script.splitlines()[5:]
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


@pytest.fixture
def planned_dir(tmp_path: Path) -> Path:
    """A run of 40 steps of 2 s, in which the trainer waits for half of the time."""
    config = GRPOConfig(run_dir=str(tmp_path / "run"), total_steps=40)
    config.actor.path = config.rollout.path = "model"
    with RunFolder(config.run_dir) as folder:
        folder.open(config_text=config_text(config) + "own: {letters: 3}\n")
    with closing(MetricsLog(folder.metrics_path)) as log:
        for number in range(1, 41):
            log.on_step(planned_step(number))
    return folder.path


def planned_step(number: int) -> StepMetrics:
    """Its 256 answers take half a second each, of which 64 run at one time."""
    return make_step(
        number,
        num_generated_tokens=25_600,
        num_trained_tokens=25_600,
        step_time_s=2.0,
        wait_s=1.0,
        train_s=0.9,
        sync_s=0.1,
        num_train_workers=1,
        num_rollout_workers=1,
        max_staleness=4,
        group_time_s=1.0,
        counters={"answer_s": 128.0 * number, "busy_s": 2.0 * number},
    )


def test_a_plan_says_what_to_set_and_what_it_brings(planned_dir: Path, capsys: Told) -> None:
    assert call("plan", planned_dir) == 0
    told = capsys.readouterr().out
    assert "(steps 11 to 40)" in told
    assert re.search(r"^now +1 +1 +4 +2\.00s +1\.00s +2\.00s$", told, re.MULTILINE)
    assert "servers are busy 100% of the time, the trainer waits 50%, a group takes 1.00s" in told
    assert call("plan", planned_dir, "--devices", "5", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["num_devices"] == 5
    assert plan["advised"]["point"]["num_rollout_workers"] == 3
    assert plan["settings"].startswith("actor.parallel.data=2 rollout.num_workers=3")


def test_a_run_that_has_hardly_begun_has_no_plan(
    planned_dir: Path, tmp_path: Path, capsys: Told
) -> None:
    lines = (planned_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (planned_dir / "metrics.jsonl").write_text("".join(lines[:9]))
    assert call("plan", planned_dir) == 2
    assert "a plan needs about 16 steps" in " ".join(capsys.readouterr().err.split())
    assert call("plan", tmp_path) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    for wrong in ("1", "two", "1.5"):
        assert call("plan", planned_dir, "--devices", wrong) == 2
        assert "at least 2" in capsys.readouterr().err


def test_evaluate_says_what_it_needs(tmp_path: Path, tiny_model_folder: Path, capsys: Told) -> None:
    def said(*words: object) -> str:
        out = tmp_path / "out"
        small = ("generation.max_new_tokens=4", "--out", out)
        assert call("evaluate", tiny_model_folder, *words, *small) == 2
        return " ".join(capsys.readouterr().err.split())

    prompts = tmp_path / "rows.jsonl"
    prompts.write_text('{"prompt": "a=", "answer": "a"}\n')
    a_set = f"name=a,prompts={prompts}"
    reward = "reward=areal_sc.workflows.math_reward:exact_match"
    assert "expected --set, or evaluation.sets in the settings" in said()
    assert "--set aime: evaluation.sets has none" in said("--set", "aime")
    assert "set a: expected reward=package.module:name, or a workflow" in said("--set", a_set)
    assert "expected key=value between commas, got 'x'" in said("--set", f"{a_set},x")
    assert "--limit: expected a number above 0, got 0" in said("--limit", "0")
    assert "unrecognized arguments: x" in said("--set", a_set, "x")
    wrong = said("--set", f"{a_set},reward=no_such:reward")
    assert "evaluation.sets, a: reward: expected package.module:name, got 'no_such:reward'" in wrong
    rescored = said("--set", f"{a_set},{reward}", "--rescore")
    assert "there are no answers in" in rescored
    assert not (tmp_path / "out" / SETTINGS).exists(), "nothing comes from these rewards"
    both = said("--set", f"{a_set},{reward}", "--rescore", "--overwrite")
    assert "--overwrite deletes the answers that --rescore judges" in both
    note_settings(tmp_path / "out", {"rewards of a": {}})
    answers = tmp_path / "out" / ANSWERS
    answers.touch()
    other = said("--set", f"{a_set},reward=areal_sc.rewards.answers:ExactMatch")
    assert "come from other settings (rewards of a: " in other
    assert "--overwrite; where the rewards alone are others, --rescore" in other
    lock = take_lock(tmp_path / "out" / LOCK, fcntl.LOCK_EX)
    assert lock is not None
    with closing(lock):
        assert "another evaluation is writing to" in said(
            "--set", f"{a_set},{reward}", "--overwrite"
        )
    assert answers.exists()
    (tmp_path / "out" / MARKER).touch()
    assert "is the folder of a run: name another one" in said("--set", f"{a_set},{reward}")


def test_evaluate_takes_named_and_described_sets_together(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    settings = tmp_path / "x.yaml"
    settings.write_text(
        "evaluation:\n  sets:\n"
        "    - {name: a, prompts: a.jsonl, reward: 'x:y'}\n"
        "    - {name: b, prompts: b.jsonl, reward: 'x:y'}\n"
        "total_steps: 1\n"
    )
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)

    def chosen(*words: str) -> list[str]:
        line = [str(tiny_model_folder), "generation.max_new_tokens=4", *words]
        line += ["--out", str(tmp_path / "out"), "--config", str(settings)]
        arguments = parser.parse_args(line)
        return [it.name for it in evaluate._config(arguments, tmp_path / "out").evaluation.sets]

    described = "name=c,prompts=c.jsonl,reward=x:y"
    assert chosen() == ["a", "b"]
    assert chosen("--set", "b") == ["b"]
    assert chosen("--set", described) == ["c"]
    assert chosen("--set", described, "--set", "a") == ["a", "c"]
