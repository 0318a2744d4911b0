"""States, locking and durability of run folders, with real processes and kills."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from builders import OPENS_RUN, running_python

from areal_sc.errors import NoRunFolder, RunFolderError
from areal_sc.run.agent_files import AgentFile
from areal_sc.run.run_folder import FORMAT_VERSION, Opening, RunFolder
from areal_sc.system.durable import commit_folder, partial_of
from areal_sc.system.process import END_SIGNAL

CONFIG = "seed: 0\ntotal_steps: 5\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "one"


def run_once(path: Path, *, snapshot: bool = False, finish: bool = False) -> None:
    """Leaves the folder as a run would that ended there."""
    folder = RunFolder(path)
    folder.open(config_text=CONFIG)
    folder.metrics_path.write_text('{"step": 1}\n')
    if snapshot:
        folder.snapshot_path(3).mkdir()
    if finish:
        folder.write_atomic(folder.summary_path, b"{}")
    folder.close()


def lock_holder(path: Path) -> AbstractContextManager[subprocess.Popen[str]]:
    """Another process that has the folder open."""
    return running_python(OPENS_RUN, path, says="open")


def test_new_folder(path: Path) -> None:
    folder = RunFolder(path)
    assert folder.decide() is Opening.start
    assert not path.exists()  # deciding changes nothing
    assert folder.open(config_text=CONFIG) is Opening.start
    assert folder.config_path.read_text() == CONFIG
    assert path.stat().st_mode & 0o777 == 0o700
    for subfolder in ("logs", "checkpoints", "sources"):
        assert (path / subfolder).stat().st_mode & 0o777 == 0o700
    assert folder.log_path("rollout/3") == path / "logs" / "rollout-3.log"
    folder.close()
    folder.close()


def test_relative_path_is_fixed_at_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder("runs/x")
    monkeypatch.chdir("/")
    assert folder.path == tmp_path / "runs" / "x"


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_empty_folder_is_new(path: Path, resume: str) -> None:
    path.mkdir(parents=True)
    with RunFolder(path) as folder:
        assert folder.open(config_text=CONFIG, resume=resume) is Opening.start


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_unfinished_run_with_snapshot_goes_on(path: Path, resume: str) -> None:
    run_once(path, snapshot=True)
    with RunFolder(path) as folder:
        assert folder.open(config_text=CONFIG, resume=resume) is Opening.resume
        assert folder.snapshots() == [folder.snapshot_path(3)]
        assert folder.metrics_path.read_text() == '{"step": 1}\n'


def test_unfinished_run_without_snapshot_starts_again(path: Path) -> None:
    run_once(path)
    run_once(path)
    with RunFolder(path) as folder:
        assert folder.open(config_text=CONFIG) is Opening.restart
        assert not folder.metrics_path.exists()
    kept = sorted(p.relative_to(path).as_posix() for p in path.glob("previous/*/metrics.jsonl"))
    assert kept == ["previous/1/metrics.jsonl", "previous/2/metrics.jsonl"]
    shutil.rmtree(path / "previous" / "1")
    run_once(path)
    assert sorted(entry.name for entry in (path / "previous").iterdir()) == ["2", "3"]


@pytest.mark.parametrize(
    ("state", "resume", "message"),
    [
        ({"snapshot": True}, "never", "holds an unfinished run, and resume=never"),
        ({}, "must", "has no snapshot to resume from"),
        ({"finish": True, "snapshot": True}, "auto", "its run is finished; .* --overwrite"),
        ({"finish": True}, "never", "its run is finished"),
        ({"finish": True}, "must", "its run is finished"),
    ],
)
def test_refused_states(path: Path, state: dict[str, bool], resume: str, message: str) -> None:
    run_once(path, **state)
    before = sorted(path.rglob("*"))
    with pytest.raises(RunFolderError, match=message):
        RunFolder(path).open(config_text="seed: 1\n", resume=resume)
    assert sorted(path.rglob("*")) == before
    assert (path / "config.yaml").read_text() == CONFIG
    run_again = RunFolder(path)  # the refusal gave the lock back
    run_again.open(config_text=CONFIG, overwrite=True)
    run_again.close()


def test_a_finished_run_goes_on_with_more_steps(path: Path) -> None:
    """The snapshot is of step 3; an older run may have been finished later than its newest."""
    run_once(path, snapshot=True, finish=True)
    (path / "summary.json").write_text('{"num_steps": 5}')
    for resume in ("auto", "must"):
        assert RunFolder(path).decide(resume=resume, total_steps=6) is Opening.resume
    with pytest.raises(RunFolderError, match=r"finished; raise total_steps above 5, "):
        RunFolder(path).open(config_text=CONFIG, total_steps=5)
    with RunFolder(path) as folder:
        assert folder.open(config_text=CONFIG, total_steps=6) is Opening.resume
        assert not folder.summary_path.exists(), "it is not finished any more"


def test_a_finished_run_without_a_snapshot_does_not_go_on(path: Path) -> None:
    run_once(path, finish=True)
    with pytest.raises(RunFolderError, match=r"finished; choose another run_dir"):
        RunFolder(path).open(config_text=CONFIG, total_steps=1000)


def test_fewer_steps_than_are_trained_are_refused(path: Path) -> None:
    run_once(path, snapshot=True)
    with pytest.raises(RunFolderError, match=r"expected total_steps of at least 3, .* got 2"):
        RunFolder(path).open(config_text=CONFIG, total_steps=2)
    assert RunFolder(path).decide(total_steps=3) is Opening.resume  # its end is left to be done


@pytest.mark.parametrize("found", [1, 2, 99, None])
def test_a_run_of_another_format_is_left_alone(path: Path, found: int | None) -> None:
    run_once(path, snapshot=True)
    marker = {"kind": "areal_sc run", "format_version": found}
    (path / "run.json").write_text(json.dumps(marker))
    another = "another version .* go on with that one, .*overwrite"
    message = rf"expected format {FORMAT_VERSION}, got {found}: {another}"
    for resume in ("auto", "must", "never"):
        with pytest.raises(RunFolderError, match=message):
            RunFolder(path).open(config_text=CONFIG, resume=resume)
    assert json.loads((path / "run.json").read_text()) == marker
    with RunFolder(path) as folder:
        assert folder.open(config_text=CONFIG, overwrite=True) is Opening.overwrite
    with RunFolder(path) as folder:
        assert folder.open(config_text=CONFIG) is Opening.restart


def test_the_number_of_a_lineage_never_comes_again(path: Path) -> None:
    folder = RunFolder(path)
    numbers = [folder.begin_lineage()]  # before it is a run's, as in a loop of one's own
    for overwrite in (False, False, True):  # start, restart, overwrite
        with RunFolder(path) as folder:
            folder.open(config_text=CONFIG, overwrite=overwrite)
            numbers += [folder.begin_lineage(), RunFolder(path).begin_lineage()]
    assert numbers == [1, 2, 3, 4, 5, 6, 7]
    (path / ".lineage").write_text("")
    with pytest.raises(RunFolderError, match=r"\.lineage is damaged \(invalid literal.*9999 say"):
        folder.begin_lineage()


def test_must_resume_creates_nothing(path: Path) -> None:
    with pytest.raises(RunFolderError, match="there is no run to resume"):
        RunFolder(path).open(config_text=CONFIG, resume="must")
    assert not path.exists()


@pytest.mark.parametrize("state", [{"finish": True}, {"snapshot": True}, {}])
def test_overwrite_empties_a_run_folder(path: Path, state: dict[str, bool]) -> None:
    run_once(path, **state)
    outside = path.parent / "precious"
    outside.mkdir()
    (outside / "file").touch()
    (path / "link").symlink_to(outside)
    with RunFolder(path) as folder:
        assert folder.open(config_text=CONFIG, overwrite=True) is Opening.overwrite
        names = sorted(entry.name for entry in path.iterdir())
    assert names == [
        ".lock", ".run.json", ".term", "begun.json", "checkpoints", "config.yaml", "logs",
        "run.json", "sources",
    ]  # fmt: skip
    assert (outside / "file").exists()


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("name", ["thesis.tex", "config.yaml", "run.json"])
def test_foreign_folder_is_left_alone(path: Path, name: str, overwrite: bool) -> None:
    path.mkdir(parents=True)
    (path / name).write_text('{"kind": "something else"}')
    with pytest.raises(RunFolderError, match=rf"other files in it \({re.escape(name)}\)"):
        RunFolder(path).open(config_text=CONFIG, overwrite=overwrite)
    assert [entry.name for entry in path.iterdir()] == [name]
    assert (path / name).read_text() == '{"kind": "something else"}'


def test_a_folder_that_cannot_be_made(path: Path) -> None:
    for unmakeable in (path / ("x" * 300), Path("/proc/run"), Path("/dev/null/run")):
        for opens in (RunFolder(unmakeable).preview, RunFolder(unmakeable).open):
            with pytest.raises(NoRunFolder, match=f"run folder {unmakeable}: ") as refusal:
                opens(config_text=CONFIG)
            assert refusal.value.exit_code == 2


@pytest.mark.parametrize("is_parent", [False, True])
def test_a_file_in_its_place_is_named(path: Path, is_parent: bool) -> None:
    file = path.parent if is_parent else path
    file.parent.mkdir(exist_ok=True)
    file.touch()
    with pytest.raises(RunFolderError, match=f"{file} is a file, not a folder"):
        RunFolder(path).open(config_text=CONFIG)


def test_a_preview_leaves_nothing(path: Path) -> None:
    assert RunFolder(path).preview(config_text=CONFIG) is Opening.start
    assert not path.parent.exists()


def test_resume_with_changed_settings(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_once(path, snapshot=True)
    with pytest.raises(RunFolderError, match="seed: 0 -> 1"):
        RunFolder(path).open(config_text="seed: 1\ntotal_steps: 5\n")
    assert (path / "config.yaml").read_text() == CONFIG
    with RunFolder(path) as folder:
        changed = "seed: 0\ntotal_steps: 9\nactor: {lr: 2}\n"
        assert folder.open(config_text=changed) is Opening.resume
    assert [record.getMessage() for record in caplog.records] == [
        "setting changed since the run began: actor.lr: (not set) -> 2"
    ]
    assert (path / "config.yaml").read_text() == changed
    caplog.clear()
    with RunFolder(path) as folder:  # compared with the begin, not with the start before
        folder.open(config_text=changed)
    assert len(caplog.records) == 1
    caplog.clear()
    with RunFolder(path) as folder:  # only the settings of the begin are those of the begin
        folder.open(config_text=CONFIG)
    assert caplog.records == []


def test_a_run_of_an_older_version_was_begun_with_its_last_settings(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_once(path, snapshot=True)
    (path / "begun.json").unlink()
    changed = CONFIG + "actor: {lr: 2}\n"
    for text, num_warnings in ((changed, 1), (changed, 1), (CONFIG, 0)):
        caplog.clear()
        with RunFolder(path) as folder:
            folder.open(config_text=text)
        assert len(caplog.records) == num_warnings
    (path / "begun.json").write_text("{")  # damaged: the last settings are the best that is known
    with RunFolder(path) as folder:
        folder.open(config_text=CONFIG)
    assert "begun.json cannot be read" in caplog.text


def test_a_preview_refuses_what_opening_would(path: Path) -> None:
    run_once(path, snapshot=True)
    before = sorted(path.rglob("*"))
    assert RunFolder(path).preview(config_text=CONFIG) is Opening.resume
    with pytest.raises(RunFolderError, match="seed: 0 -> 1"):
        RunFolder(path).preview(config_text=CONFIG.replace("seed: 0", "seed: 1"))
    assert sorted(path.rglob("*")) == before
    with lock_holder(path), pytest.raises(RunFolderError, match="is running in it"):
        RunFolder(path).preview(config_text=CONFIG)


def test_killed_owner_frees_the_folder(path: Path) -> None:
    with lock_holder(path) as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with RunFolder(path) as folder:
            assert folder.open(config_text="seed: 0\n") is Opening.restart


def test_interrupted_overwrite_can_be_repeated(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_once(path, finish=True)

    def fail(folder: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("areal_sc.system.durable.shutil.rmtree", fail)
    with pytest.raises(RunFolderError, match="cannot be used: Input/output error"):
        RunFolder(path).open(config_text=CONFIG, overwrite=True)
    monkeypatch.undo()
    with RunFolder(path) as folder:
        assert folder.open(config_text=CONFIG, overwrite=True) is Opening.overwrite


def test_start_interrupted_before_its_marker_is_a_new_folder(path: Path) -> None:
    path.mkdir(parents=True)
    (path / ".lock").touch()
    (path / ".run.json.77.partial").write_text('{"ki')
    with RunFolder(path) as folder:
        assert folder.open(config_text=CONFIG) is Opening.start


def test_write_atomic_replaces_or_leaves(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunFolder(path) as folder:
        folder.open(config_text=CONFIG)
        folder.write_atomic("a.bin", b"one")
        folder.write_atomic(folder.path / "a.bin", b"two")
        assert (path / "a.bin").read_bytes() == b"two"

        def full(fd: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("areal_sc.system.durable.os.fsync", full)
        with pytest.raises(RunFolderError, match=r"cannot write .*a\.bin: No space left on device"):
            folder.write_atomic("a.bin", b"three")
        assert (path / "a.bin").read_bytes() == b"two"
        assert list(path.glob(".*.partial")) == []
        with pytest.raises(RunFolderError, match=r"cannot write .*: No such file"):
            folder.write_atomic("missing/a.bin", b"")


def test_snapshots_are_whole_and_in_order(path: Path) -> None:
    with RunFolder(path) as folder:
        folder.open(config_text=CONFIG)
        assert folder.snapshots() == []
        for step in (1000000, 20, 3):
            final = folder.snapshot_path(step)
            partial = partial_of(final)
            (partial / "engine").mkdir(parents=True)
            (partial / "engine" / "weights").write_bytes(b"1")
            assert final not in folder.snapshots()
            commit_folder(partial, final)
            assert not partial.exists()
        (folder.checkpoints / ".step-000004.partial").mkdir()
        (folder.checkpoints / "step-000005").touch()
        assert folder.snapshots() == [folder.snapshot_path(step) for step in (3, 20, 1000000)]


def test_a_loop_of_ones_own_takes_the_folder_as_it_is(path: Path) -> None:
    for _ in range(2):  # the second time it finds what the first one left
        with RunFolder(path) as folder:
            folder.lock()
            (path / "logs" / "train-0.log").touch()
            with pytest.raises(RunFolderError, match=f"process {os.getpid()} is running in it"):
                RunFolder(path).lock()
    assert RunFolder(path).decide() is Opening.restart
    assert (path / "logs" / "train-0.log").exists()


AGENT = """
import pathlib, sys, time
from areal_sc.run.agent_files import AgentFile
lock = AgentFile.of_this_process("tcp://127.0.0.1:1", "life").write(pathlib.Path(sys.argv[1]))
print("listens", flush=True)
time.sleep(60)
"""


def agent_of(path: Path) -> AbstractContextManager[subprocess.Popen[str]]:
    """A process that says that it is an agent of the folder's run."""
    return running_python(AGENT, path, says="listens")


@pytest.mark.parametrize("snapshot", [True, False])
def test_a_run_whose_agent_lives_is_attached_and_nothing_is_moved(
    path: Path, snapshot: bool
) -> None:
    run_once(path, snapshot=snapshot)
    with agent_of(path) as agent:
        with RunFolder(path) as folder:
            assert folder.preview(config_text=CONFIG) is Opening.attach
            with pytest.raises(RunFolderError, match="seed: 0 -> 1"):
                folder.open(config_text="seed: 1\n")
            with pytest.raises(RunFolderError, match="resume=never"):
                folder.open(config_text=CONFIG, resume="never")
            assert folder.open(config_text=CONFIG) is Opening.attach
            assert folder.metrics_path.exists()
        agent.kill()
        agent.wait()
        with RunFolder(path) as folder:
            folder.joined_path.touch()  # of agents that do not see the folder, and may live
            assert folder.open(config_text=CONFIG) is Opening.attach
            assert folder.metrics_path.exists()
            folder.remove_keys()
        with RunFolder(path) as folder:
            opening = Opening.resume if snapshot else Opening.restart
            assert folder.open(config_text=CONFIG) is opening


def test_overwriting_a_run_that_lives_ends_its_agent_first(path: Path) -> None:
    run_once(path)
    with agent_of(path) as agent, RunFolder(path) as folder:
        folder.open(config_text=CONFIG, overwrite=True)
        assert agent.wait() == -END_SIGNAL
        assert not (path / "agents").exists()


def test_an_agent_of_another_machine_is_named_and_nothing_is_emptied(path: Path) -> None:
    run_once(path)
    file = replace(AgentFile.of_this_process("tcp://127.0.0.1:1", "life"), host="elsewhere")
    lock = file.write(path)
    with RunFolder(path) as folder:
        with pytest.raises(RunFolderError, match=f"live on elsewhere .*areal_sc stop {path}"):
            folder.open(config_text=CONFIG, overwrite=True)
        assert folder.metrics_path.exists()
        file.path(path).write_text("{}")
        with pytest.raises(RunFolderError, match=r"life\.json is damaged, and its agent lives"):
            folder.open(config_text=CONFIG)
    lock.close()


def test_a_second_process_is_told_of_the_first_also_when_that_is_stopped(path: Path) -> None:
    with lock_holder(path) as holder:
        who = rf"process {holder.pid} is running in it, on {socket.gethostname()}, for \d+ s"
        for overwrite in (False, True):
            with pytest.raises(RunFolderError, match=rf"{who}; .*areal_sc stop {path}"):
                RunFolder(path).open(config_text=CONFIG, overwrite=overwrite)
        assert (path / "config.yaml").read_text() == "seed: 0\n"
        holder.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
        with pytest.raises(RunFolderError, match=rf"{who}, and is stopped .*-CONT {holder.pid}"):
            RunFolder(path).open(config_text=CONFIG)


def test_a_damaged_term_is_named_and_a_lost_one_begins_anew(path: Path) -> None:
    run_once(path)
    run_once(path)
    term = path / ".term"
    assert json.loads(term.read_text())["term"] == 2
    for content in ("", "{}", "[1]", '{"term": "x"}'):
        term.write_text(content)
        with pytest.raises(RunFolderError, match=r"\.term is damaged.* delete this file"):
            RunFolder(path).open(config_text=CONFIG)
    term.unlink()
    run_once(path)
    assert json.loads(term.read_text())["term"] == 1


def test_a_loop_of_ones_own_may_overwrite_and_cannot_resume(path: Path) -> None:
    run_once(path, finish=True)
    with RunFolder(path) as folder:
        folder.lock(overwrite=True)
        assert not folder.summary_path.exists()
    with pytest.raises(RunFolderError, match=r"cannot resume; .*with Run\(config\) as run"):
        RunFolder(path).lock(resume="must")


def test_a_loop_of_ones_own_leaves_other_folders_alone(path: Path) -> None:
    run_once(path, finish=True)
    with pytest.raises(RunFolderError, match="its run is finished"):
        RunFolder(path).lock()
    (path.parent / "thesis.tex").touch()
    with pytest.raises(RunFolderError, match=r"other files in it \(one, thesis\.tex\)"):
        RunFolder(path.parent).lock()


def test_keys_of_a_run_stay_while_another_process_has_the_folder(path: Path) -> None:
    run_once(path)
    keys = path / "keys.json"
    keys.touch()
    with lock_holder(path) as holder:
        keys.touch()  # the new owner has set the old ones aside
        RunFolder(path).remove_keys()
        assert keys.exists()
        holder.kill()
        holder.wait()
    folder = RunFolder(path)
    folder.joined_path.touch()  # agents that do not see the folder may live: they know these keys
    folder.remove_keys()
    assert keys.exists()
    folder.joined_path.unlink()
    folder.remove_keys()
    assert not keys.exists()
    with RunFolder(path) as folder:
        folder.lock()  # nobody has kept it


def test_a_folder_that_was_deleted_has_no_keys(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run").remove_keys()
    assert not (tmp_path / "run").exists()


WRITES_FOR_EVER = """
import sys
from pathlib import Path
from areal_sc.system.durable import replace_file
with replace_file(Path(sys.argv[1])) as file:
    print("begun", flush=True)
    sys.stdin.read()
"""


def killed_while_it_writes(target: Path) -> None:
    with running_python(WRITES_FOR_EVER, target, says="begun"):
        pass


def test_what_was_being_written_at_a_kill_goes(path: Path) -> None:
    run_once(path)
    folder = RunFolder(path)
    (folder.ledger).mkdir()
    for target in (path / "run.json", folder.sources / "a.json", folder.ledger / "1"):
        killed_while_it_writes(target)
    (path / ".own.partial").touch()
    assert len(list(path.rglob("*.partial"))) == 4
    folder.open(config_text=CONFIG, overwrite=False)
    assert [it.name for it in path.rglob("*.partial")] == [".own.partial"]

    killed_while_it_writes(folder.sources / "b.json")
    folder.remove_keys()
    folder.close()
    assert [it.name for it in path.rglob("*.partial")] == [".own.partial"]
