"""What `python -m areal_sc status` says of runs that live, wait, hang, are dead, or have ended."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from builders import OPENS_RUN, running_python

from areal_sc import __main__ as program
from areal_sc.errors import CommandError
from areal_sc.run.agent_files import AgentFile
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_status import (
    AgentStatus,
    Phase,
    Restart,
    RoleStatus,
    RunEnd,
    RunStatus,
    Wait,
    WorkerStatus,
)
from areal_sc.run.verdict import State, Verdict, verdict
from areal_sc.system.file_lock import take_lock
from areal_sc.system.process import machine_id
from areal_sc.trainer.failure import run_script

NOW = time.time()


def status_of(pid: int, *, age_s: float = 1.0, quiet_s: float = 2.0) -> RunStatus:
    """Of a healthy run at step 16 of 100, whose steps took up to 5 s."""
    worker = WorkerStatus("rollout/0", "ready", 4714, "host-a", "b2c3", NOW - age_s, 2)
    rollout = RoleStatus(
        NOW - age_s,
        16,
        total_steps=100,
        num_open=12,
        num_finished=80,
        waits=[Wait("the script", "3 more groups for the batch of version 16", NOW - 70)],
        agents=[AgentStatus("host-a", "a1b2", NOW - age_s)],
        workers=[worker],
        restart=Restart("rollout/0", "worker rollout/0 ended with signal 9", NOW - 60, NOW - 59),
    )
    return RunStatus(
        host="host-a",
        machine=machine_id(),
        pid=pid,
        began=NOW - 7200,
        orphan_timeout_s=300.0,
        written=NOW - age_s,
        progressed=NOW - quiet_s,
        longest_quiet_s=5.0,
        phases=[Phase("training", NOW - 7000, 16, 100, "steps")],
        roles={"train": RoleStatus(NOW - age_s, 16, lineage=2), "rollout": rollout},
    )


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the folder `run`."""
    with running_python(OPENS_RUN, tmp_path / "run", says="open") as process:
        yield process


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Of a run that nobody has."""
    folder = RunFolder(tmp_path / "run")
    if not folder.path.exists():
        with folder:
            folder.open(config_text="")
    return folder


def judge(folder: RunFolder, status: RunStatus) -> Verdict:
    folder.status_path.write_bytes(msgspec.json.encode(status))
    return verdict(folder, NOW)


def test_of_a_process_that_lives(owner: subprocess.Popen[str], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert verdict(folder).state is State.unknown, "it has not said anything"
    assert judge(folder, status_of(owner.pid)).state is State.healthy
    waiting = judge(folder, status_of(owner.pid, quiet_s=70))
    assert (waiting.state, waiting.text) == (State.waiting, "Nothing was finished for 70.0s.")
    quiet = judge(folder, status_of(owner.pid, quiet_s=700))
    assert quiet.state is State.hung
    assert "before, that took 5.00s at most" in quiet.text
    outside = status_of(owner.pid, quiet_s=700)
    outside.roles["rollout"].waits_outside = True
    patient = judge(folder, outside)
    assert patient.state is State.waiting
    assert "wait for agents outside" in patient.text
    slow = status_of(owner.pid, quiet_s=700)
    slow.longest_quiet_s = 600.0
    assert judge(folder, slow).state is State.healthy, "as slow as ever"
    silent = judge(folder, status_of(owner.pid, age_s=40))
    assert silent.state is State.hung
    assert f"Process {owner.pid} lives, but has not written for 40.0s" in silent.text
    still = status_of(owner.pid)
    still.roles["rollout"].looked = NOW - 40
    assert "The event loop of its controllers stands still" in judge(folder, still).text
    down = status_of(owner.pid)
    down.roles["rollout"].restart = Restart("rollout/0", "it died", NOW - 3)
    assert judge(folder, down).state is State.waiting
    ended = status_of(owner.pid)
    ended.end = RunEnd(NOW, 5, "of a block that the script has borne")
    assert judge(folder, ended).state is State.healthy


def test_of_a_script_that_resumes_what_another_one_has_ended(
    owner: subprocess.Popen[str], tmp_path: Path
) -> None:
    """It has the folder, and what can be read is of the earlier one."""
    folder = RunFolder(tmp_path / "run")
    with subprocess.Popen(["true"]) as earlier:
        pass
    ended = status_of(earlier.pid)
    ended.end = RunEnd(NOW - 1, 0, "")
    found = judge(folder, ended)
    assert found.state is State.waiting
    assert f"by process {earlier.pid}, which has ended" in found.text
    assert judge(folder, status_of(earlier.pid, age_s=20)).state is State.waiting, "it was killed"
    assert judge(folder, status_of(earlier.pid)).state is State.healthy, "it writes, elsewhere"
    assert judge(folder, status_of(owner.pid)).state is State.healthy


def test_of_a_process_that_is_stopped_then_killed(
    owner: subprocess.Popen[str], tmp_path: Path
) -> None:
    folder, status = RunFolder(tmp_path / "run"), status_of(owner.pid)
    owner.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, owner.pid, os.WSTOPPED | os.WNOWAIT)
    stopped = judge(folder, status)
    assert stopped.state is State.hung
    assert f"`kill -CONT {owner.pid}` lets it go on" in stopped.text
    owner.kill()
    owner.wait()
    dead = judge(folder, status)
    assert dead.state is State.dead
    assert "as after kill -9. Its workers have ended, too." in dead.text
    assert "The same command would start again" in dead.text
    lock = AgentFile.of_this_process("tcp://127.0.0.1:1", "a1b2").write(folder.path)
    orphaned = judge(folder, status)
    assert "Its workers may live for 4m59s more (scheduler.orphan_timeout_s)" in orphaned.text
    assert orphaned.agents == {"a1b2": os.getpid()}
    lock.close()


@pytest.mark.parametrize(
    ("exit_code", "state", "text"),
    [
        (0, State.ended, "The script ended without an error, 10.0s ago."),
        (130, State.interrupted, "It was stopped by Ctrl-C, 10.0s ago."),
        (143, State.interrupted, "It was stopped by SIGTERM, 10.0s ago."),
        (131, State.interrupted, "It was stopped by SIGQUIT, 10.0s ago."),
        (5, State.failed, "It ended with exit code 5, 10.0s ago: WorkerLost: rollout/0 is lost."),
    ],
)
def test_of_a_script_that_has_said_how_it_ended(
    exit_code: int, state: State, text: str, folder: RunFolder
) -> None:
    status = status_of(1)
    status.end = RunEnd(NOW - 10, exit_code, "WorkerLost: rollout/0 is lost")
    folder.snapshot_path(10).mkdir()
    found = judge(folder, status)
    assert found.state is state
    assert found.text == f"{text} The same command would go on from the last snapshot."
    status.machine = "another one"
    assert judge(folder, status).state is state


def test_of_a_finished_run(folder: RunFolder) -> None:
    status = status_of(1)
    status.end = RunEnd(NOW, 0)
    folder.summary_path.write_text('{"num_steps": 100}')
    finished = judge(folder, status)
    assert finished.state is State.finished
    assert "All of its 100 steps are done" in finished.text
    folder.summary_path.write_text('{"num_st')
    damaged = judge(folder, status)
    assert damaged.state is State.finished
    assert "summary.json is there, but cannot be read" in damaged.text


def test_elsewhere_only_ages_tell(folder: RunFolder) -> None:
    status = status_of(1)
    status.machine = "another one"
    near = judge(folder, status)
    assert near.state is State.healthy
    assert "Only ages tell, as it runs on host-a" in near.text
    far = judge(folder, status_elsewhere(age_s=60))
    assert far.state is State.unknown
    assert "Nothing was heard for 60.0s: the script on host-a is dead, stopped" in far.text


def status_elsewhere(age_s: float) -> RunStatus:
    status = status_of(1, age_s=age_s)
    status.machine = "another one"
    return status


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"host": "a", "mach', "is damaged: "),
        (b"\xff\xfe", "is damaged: "),
        (b"", "is damaged: "),
        (msgspec.json.encode(status_of(1)).replace(b'"format":1', b'"format":9'), "got 9"),
    ],
)
def test_a_damaged_file_is_told_and_the_rest_is_shown(
    content: bytes, message: str, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.snapshot_path(10).mkdir()
    folder.status_path.write_bytes(content)
    assert run_script(program.main, ["status", str(folder.path)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "dead: No script has the folder. The same command would go on from the last" in told
    assert message in told
    assert "step-000010" in told


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="there is no folder"):
        verdict(RunFolder(tmp_path / "nothing"))
    with pytest.raises(CommandError, match=r"not the folder of a run: it has no sound run\.json"):
        verdict(RunFolder(tmp_path))
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(CommandError, match=r"no sound run\.json"):
        verdict(RunFolder(tmp_path))


def test_all_facts_are_shown_with_their_age_also_on_a_narrow_terminal(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    # the command goes by the clock, and other tests may have taken long since the import
    monkeypatch.setattr(sys.modules[__name__], "NOW", time.time())
    lock = take_lock(folder.path / ".lock", fcntl.LOCK_EX)
    assert lock
    folder.status_path.write_bytes(msgspec.json.encode(status_of(os.getpid())))
    try:
        assert run_script(program.main, ["status", str(folder.path)]) == 0
        told = capsys.readouterr().out
        assert run_script(program.main, ["status", str(folder.path), "--json"]) == 0
    finally:
        lock.close()
    assert max(map(len, told.splitlines())) <= 60
    words = " ".join(told.split())
    for fact in (
        "step 16 of 100, policy version 16, lineage 2, as of",
        "phase training: 16 of 100 steps, begun",
        "waits the script: 3 more groups for the batch of version 16, since",
        "groups 12 open, 80 finished",
        "restart rollout/0,",
        "back after 1.00s: worker rollout/0 ended with signal 9",
        f"script process {os.getpid()} on host-a, term 0, started 2h00m ago, wrote",
        "agent process not known on host-a, heard",
        "rollout/0 ready 4714 2",
    ):
        assert fact in words, words
    as_json = json.loads(capsys.readouterr().out)
    # without the script and its agents, no worker is left
    assert run_script(program.main, ["status", str(folder.path)]) == 0
    assert "rollout/0 ended 4714 2" in " ".join(capsys.readouterr().out.split())
    assert as_json["status"]["roles"]["rollout"]["workers"][0]["incarnation"] == "b2c3"
    assert as_json["state"] in ("healthy", "waiting")


def test_it_is_quick_since_it_imports_neither_torch_nor_sockets(folder: RunFolder) -> None:
    look = (
        "import sys; from areal_sc.__main__ import main; main(['status', sys.argv[1]]);"
        "print([name for name in ('torch', 'zmq', 'transformers') if name in sys.modules])"
    )
    finished = subprocess.run(
        [sys.executable, "-c", look, str(folder.path)], capture_output=True, text=True, timeout=60
    )
    assert finished.stdout.splitlines()[-1] == "[]", finished.stderr
