"""A person at a shell pauses runs of real processes, lets them go on, and scales them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from integration.run_process import SCRIPTS, RunProcess, gate_of, open_gate, tiny_run

from areal_sc.controller.ledger.ledger_account import read_account
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_status import RunStatus, read_status
from areal_sc.run.verdict import State, Verdict, verdict

LOOP = SCRIPTS / "own_loop.py"
PAUSE_S = 3.0
SETTINGS = (
    *("rollout.max_staleness=0", "task.num_free_episodes=16", "scheduler.orphan_timeout_s=600"),
)
"""Steps follow one after the other, so a run can be repeated; its episodes are held after two."""


def command(name: str, run: RunProcess, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "areal_sc", name, str(run.run_dir), *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def told(name: str, run: RunProcess, *words: str) -> str:
    done = command(name, run, *words)
    assert done.returncode == 0, f"{done.stderr}\n{run.story()}"
    return done.stdout


def status(run: RunProcess) -> RunStatus:
    found = read_status(run.run_dir / "status.json")
    assert found is not None
    return found


def wait_until_still(run: RunProcess) -> None:
    run.wait_until(lambda: "Nothing is computed" in verdict_of(run).text, "a standstill")


def verdict_of(run: RunProcess) -> Verdict:
    return verdict(RunFolder(run.run_dir))


def pause_in_third_step(run: RunProcess) -> None:
    """The run stands still, and the groups of the third step are played."""
    run.wait_until(lambda: num_open(run) == (2, 4), "the third step to be held")
    assert "It still ends what goes on: 4 " in told("pause", run)
    open_gate(run.run_dir)
    wait_until_still(run)


def num_open(run: RunProcess) -> tuple[int, int | None]:
    """Policy version, and groups that are open."""
    if not (run.run_dir / "status.json").exists():
        return -1, None
    rollout = status(run).roles.get("rollout")
    return (-1, None) if rollout is None else (rollout.version, rollout.num_open)


def num_bytes(run: RunProcess) -> int:
    """Of the ledger, which every change makes longer."""
    return sum(path.stat().st_size for path in (run.run_dir / "ledger").iterdir())


def test_a_paused_run_is_ended_by_ctrl_c_and_goes_on_where_it_was(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    settings = (*SETTINGS, "total_steps=5", "checkpoint.every_steps=50")
    with tiny_run(tmp_path / "run", tiny_model_folder, *settings) as first:
        pause_in_third_step(first)
        before = num_bytes(first)
        time.sleep(PAUSE_S)
        assert (num_bytes(first), first.steps()) == (before, [1, 2])
        assert verdict_of(first).state is State.paused
        assert "paused by" in first.output
        again = command("pause", first)
        assert (again.returncode, "paused by" in again.stderr) == (2, True)
        first.send(signal.SIGINT)  # the first one: it ends at once, as no step goes on
        assert first.wait(60.0) == 130, first.story()
        assert (first.run_dir / "checkpoints" / "step-000002").is_dir()
    assert "It is paused, and stays so" in told("status", first)
    gate_of(tmp_path / "run").write_bytes(b"." * 8)
    with tiny_run(tmp_path / "run", tiny_model_folder, *settings) as second:
        second.wait_until(lambda: "paused by" in second.output, "the start to say so")
        wait_until_still(second)
        assert second.steps() == [1, 2]
        assert "goes on" in told("resume", second)
        second.finish()
        names = [record["name"] for record in second.records("event")]
    assert (names.count("paused"), names.count("pause_ended")) == (2, 1)
    steps = [record["step_time_s"] for record in second.records("step")]
    assert max(steps) < PAUSE_S
    summary = second.summary()
    assert (summary["num_rows_trained"], summary["num_rows_trained_twice"]) == (40, 0)
    assert command("resume", second).returncode == 2
    ended = command("pause", second)
    assert (ended.returncode, "All of its 5 steps are done" in ended.stderr) == (2, True)


def test_a_loop_of_ones_own_stays_paused_when_it_is_killed(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    settings = (*SETTINGS, "total_steps=4")
    with tiny_run(tmp_path / "run", tiny_model_folder, *settings, script=LOOP) as first:
        pause_in_third_step(first)
        first.send(signal.SIGKILL)
        first.wait()
        assert "It is paused, and stays so" in verdict_of(first).text
        gate_of(tmp_path / "run").write_bytes(b"." * 8)
        with tiny_run(tmp_path / "run", tiny_model_folder, *settings, script=LOOP) as second:
            second.wait_until(lambda: num_open(second)[0] == 2, "its workers to be taken over")
            wait_until_still(second)
            time.sleep(PAUSE_S)
            assert "step=" not in second.output
            told("resume", second)
            second.finish()
    account = read_account(first.run_dir / "ledger", lambda group: None)
    assert (account.rows_lost, account.trained_again, account.version) == (0, [], 4)
    assert (account.totals["rows_trained"], account.totals["rows_trained_twice"]) == (32, 0)


def test_a_run_is_scaled_from_a_shell(tmp_path: Path, tiny_model_folder: Path) -> None:
    stores = "rollout.store_bytes=6000"  # two of them hold a batch
    settings = (*SETTINGS, "total_steps=5", "rollout.num_workers=2", stores)
    with tiny_run(tmp_path / "run", tiny_model_folder, *settings) as run:

        def states() -> list[str]:
            return [worker.state for worker in status(run).roles["rollout"].workers]

        run.wait_until(lambda: num_open(run)[1] == 4, "a step to be held")
        refused = command("scale", run, "rollout=1")
        assert refused.returncode == 2, refused.stdout + run.story()
        assert "room for a batch" in refused.stderr
        assert "refused: " in told("status", run)
        assert "are 3 from now on" in told("scale", run, "rollout=3")
        run.wait_until(lambda: states() == ["ready"] * 3, "a third worker")
        told("pause", run)
        assert "are 2 from now on" in told("scale", run, "rollout=2")  # also while it is paused
        run.wait_until(lambda: states() == ["ready"] * 2, "two workers")
        assert not (run.run_dir / ".scale").exists()
        told("resume", run)
        gate_of(run.run_dir).write_bytes(b"." * 8)
        run.finish()
    changes = [(event["before"], event["num_workers"]) for event in run.events("scaled")]
    assert changes == [(2, 3), (3, 2)]
    assert run.steps() == [1, 2, 3, 4, 5]
    assert run.summary()["num_rows_trained_twice"] == 0
