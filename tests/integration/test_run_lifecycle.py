"""How a run ends, and how it goes on: kills, signals, exceptions, second runs, dead workers."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from integration.run_process import (
    NO_ORPHANS,
    PATIENT,
    REPOSITORY,
    SCRIPTS,
    open_gate,
    tiny_run,
)

from areal_sc import GRPOConfig, PPOTrainer
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.verdict import State, verdict
from areal_sc.system.process import STOP_SIGNALS

ROWS_A_STEP = 4 * 2
ENDLESS = "total_steps=100000"
EXAMPLES = REPOSITORY / "examples"
SEEN_BY_OTHERS = ("cmdline", "environ")
"""What other users, or children, may see of a process."""


def test_the_same_command_goes_on_from_a_snapshot_when_all_processes_were_killed(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    """With the settings as they come: snapshots are on."""
    total = 16
    arguments = (f"total_steps={total}", "task.num_free_episodes=112")
    with tiny_run(tmp_path / "run", tiny_model_folder, *arguments) as killed:
        snapshot = killed.run_dir / "checkpoints" / "step-000010"
        killed.wait_until(snapshot.is_dir, "the snapshot of step 10")
        killed.kill_all()  # test_killed_scripts.py: of the script alone
        open_gate(killed.run_dir)
        with tiny_run(tmp_path / "run", tiny_model_folder, *arguments) as resumed:
            resumed.finish()
            resumed.wait_until_gone()
            (event,) = resumed.events("resumed")
            assert event["step"] == 10
            assert "resumed after step 10" in resumed.output
            records = resumed.records("step") + resumed.events("resumed")
            after = [r["step"] for r in sorted(records, key=lambda r: r["time"]) if "reward" in r]
            assert after[-6:] == list(range(11, total + 1))
            summary = resumed.summary()
    assert summary["num_steps"] == total
    assert summary["num_rows_trained"] == total * ROWS_A_STEP
    assert summary["num_rows_trained_twice"] == 0


def test_a_start_from_nothing_says_so(
    tiny_config: Callable[..., GRPOConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tiny_config(f"run_dir={tmp_path / 'run'}")
    with PPOTrainer(config) as first:
        assert "from nothing" not in capsys.readouterr().out
    tiny_config("generation.top_k=5")  # its warning is none of that run
    assert "top_k" not in (first.folder.logs / "controller.log").read_text()
    with PPOTrainer(config):  # the first one might have been killed
        (line,) = (x for x in capsys.readouterr().out.splitlines() if "from nothing" in x)
        assert "WARNING" in line
        assert "an earlier start in" in line


def test_orphans_of_a_killed_script_end_by_themselves(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    """Also while they are computing; bounded by the orphan timeout of 6 s."""
    memory = tmp_path / "memory"
    shared = f"transport.shared_memory={memory}"
    with tiny_run(tmp_path / "run", tiny_model_folder, ENDLESS, shared) as run:
        run.wait_for_step(2)
        before = run.processes()
        assert len(before) >= 5  # script, agent, fork servers, workers
        run.send(signal.SIGKILL)
        run.wait()
        run.wait_until_gone(60.0)
    assert_no_trace(run.run_dir, memory)


def test_what_a_run_shares_on_its_node_goes_with_it_or_with_the_next_run(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    memory = tmp_path / "memory"
    shared = f"transport.shared_memory={memory}"
    with tiny_run(tmp_path / "killed", tiny_model_folder, ENDLESS, shared) as killed:
        killed.wait_for_step(2)
        assert killed.records("step")[-1]["counters"]["mapped_bytes"] > 0
        keys = killed.run_dir / "keys.json"
        assert keys.stat().st_mode & 0o777 == 0o600
        secrets = [value for value in json.loads(keys.read_text()).values() if len(value) == 40]
        assert len(secrets) == 3
        num_seen = 0
        for pid in killed.processes():
            with suppress(OSError):  # it has ended since
                seen = b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in SEEN_BY_OTHERS)
                assert not any(secret.encode() in seen for secret in secrets)
                num_seen += bool(seen)
        assert num_seen >= 5  # script, agent, fork servers, workers
        killed.kill_all()
    (user_folder,) = memory.iterdir()
    (left_over,) = user_folder.iterdir()
    assert sum(1 for _ in left_over.glob("*/block-*")) >= 2
    with tiny_run(tmp_path / "next", tiny_model_folder, shared) as run:
        run.wait_for_step(1)
        assert not left_over.exists()
        run.finish()
        run.wait_until_gone()
        assert not (run.run_dir / "keys.json").exists()
    assert list(memory.iterdir()) == []


def test_signals_end_runs_that_stand_side_by_side(tmp_path: Path, tiny_model_folder: Path) -> None:
    """All at a step that never ends: Ctrl-C twice; one in a terminal; SIGTERM, once."""
    limits = {"alone": 100, "foreground": 0, "terminated": 1}
    with ExitStack() as stack:
        alone, foreground, terminated = (
            stack.enter_context(
                tiny_run(
                    tmp_path / name,
                    tiny_model_folder,
                    *(ENDLESS, "task.num_free_episodes=16", f"checkpoint.stop_within_s={limit_s}"),
                    NO_ORPHANS,
                )
            )
            for name, limit_s in limits.items()
        )
        for run in (alone, foreground, terminated):
            run.wait_for_step(2)

        alone.send(signal.SIGINT)
        alone.wait_until(lambda: "Ctrl-C again stops now" in alone.output, "the answer")
        alone.send(signal.SIGINT)
        foreground.send_to_foreground(signal.SIGINT)
        terminated.send(signal.SIGTERM)
        for run, code, word in (
            (alone, 130, "stopped by Ctrl-C"),
            (foreground, 130, "stopped by Ctrl-C"),
            (terminated, 143, "stopped by SIGTERM"),
        ):
            assert run.wait() == code, run.story()
            assert f"{word}\nthere is no snapshot yet" in run.output, run.output
            assert "Traceback" not in run.output
            run.wait_until_gone()
        assert "SIGTERM: finishing step" in terminated.output
        assert "finishing" not in foreground.output


def workers_told(run_dir: Path) -> list[str]:
    """The workers of which the file says that `status` reads; it may be some seconds old."""
    status = verdict(RunFolder(run_dir)).status
    return sorted(w.name for r in status.roles.values() for w in r.workers) if status else []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_ends_the_step_and_leaves_a_snapshot_of_it(
    tmp_path: Path, tiny_model_folder: Path, signum: int
) -> None:
    """In PPOTrainer's loop and in one of the user's own; `status` tells each state rightly.

    Signals for one worker do nothing. The last one is for all processes, as that of systemd is.
    """
    script = SCRIPTS / "tiny_run.py" if signum == signal.SIGINT else EXAMPLES / "own_loop.py"
    settings = ENDLESS, NO_ORPHANS
    with tiny_run(tmp_path / "run", tiny_model_folder, *settings, script=script) as run:
        run.wait_for_step(2)
        folder = RunFolder(run.run_dir)
        run.wait_until(lambda: verdict(folder).state is State.healthy, "a run that is healthy")
        status = verdict(folder).status
        assert status
        assert status.pid == run.pid
        run.wait_until(lambda: workers_told(run.run_dir) == ["rollout/0", "train/0"], "workers")
        for number in (*STOP_SIGNALS, signal.SIGUSR1):
            os.kill(run.worker_pid("rollout/0"), number)
        run.wait_for_step(run.steps()[-1] + 2)
        for pid in run.processes():
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(pid, signum)
        assert run.wait() == 128 + signum, run.story()
        worker = (run.run_dir / "logs" / "rollout-0.log").read_text()
        assert worker.count(" serving address=") == 1
        newest = run.run_dir / "checkpoints" / f"step-{run.steps()[-1]:06d}"
        assert "again stops now" in run.output
        assert f"newest snapshot: {newest};" in run.output
        run.wait_until_gone()
        ended = verdict(RunFolder(run.run_dir))
        assert ended.state is State.interrupted
        assert "would go on from the last snapshot" in ended.text


def test_a_script_that_is_stopped_for_a_while_goes_on(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    """Far longer than a worker may be silent, but not so long that it counts itself as orphaned."""
    with tiny_run(
        tmp_path / "run",
        tiny_model_folder,
        *("total_steps=20", "scheduler.heartbeat_interval_s=0.3", "scheduler.orphan_timeout_s=600"),
    ) as run:
        run.wait_for_step(2)
        run.send_to_foreground(signal.SIGSTOP)
        time.sleep(3 * 5 * 0.3)
        run.send_to_foreground(signal.SIGCONT)
        run.finish()
        assert run.summary()["num_rows_trained"] == 20 * ROWS_A_STEP
        assert run.summary()["num_rows_trained_twice"] == 0


def test_any_number_of_ctrl_c_leaves_nothing(tmp_path: Path, tiny_model_folder: Path) -> None:
    """Of a loop of the user's own, and of PPOTrainer's; meanwhile no second loop gets in."""
    own, trainer = SCRIPTS / "own_loop.py", SCRIPTS / "tiny_run.py"
    with ExitStack() as stack:
        for script in (own, trainer):
            memory = tmp_path / f"{script.stem}_memory"
            settings = (ENDLESS, NO_ORPHANS, f"transport.shared_memory={memory}")
            run_dir = tmp_path / script.stem
            run = stack.enter_context(
                tiny_run(run_dir, tiny_model_folder, *settings, script=script)
            )
            run.wait_until(lambda run=run: "step=1" in run.output or run.steps(), "a step")
            keys = (run_dir / "keys.json").read_text()
            second = stack.enter_context(
                tiny_run(run_dir, tiny_model_folder, *settings, script=own)
            )
            assert second.wait() == 3, second.story()
            assert f"process {run.pid} is running in it" in second.output
            assert (run_dir / "keys.json").read_text() == keys
            while run.is_running:
                run.send_to_foreground(signal.SIGINT)
                time.sleep(0.02)
            assert run.wait() in (130, -signal.SIGINT), run.story()
            run.wait_until_gone()
            assert_no_trace(run_dir, memory)
        looking = stack.enter_context(
            tiny_run(tmp_path / own.stem, tiny_model_folder, "--dry-run", script=own)
        )
        looking.finish()


def assert_no_trace(run_dir: Path, memory: Path) -> None:
    assert not (run_dir / "keys.json").exists()
    assert list(memory.iterdir()) == []


def test_ctrl_c_while_the_workers_are_being_started(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    with tiny_run(tmp_path / "run", tiny_model_folder, ENDLESS, NO_ORPHANS) as run:
        run.wait_until(lambda: "phase=start-up" in run.output, "the start of the workers")
        run.send_to_foreground(signal.SIGINT)
        assert run.wait() == 130, run.story()
        assert "Traceback" not in run.output
        run.wait_until_gone()


def test_an_exception_in_the_users_loop_leaves_no_orphan(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    set_in_vain = ("evaluation.num_prompts=7", "checkpoint.keep=3")
    settings = ("+task.raise_after=1", NO_ORPHANS, *set_in_vain)
    script = SCRIPTS / "own_loop.py"
    with tiny_run(tmp_path / "run", tiny_model_folder, *settings, script=script) as run:
        assert run.wait() == 1, run.story()
        assert "LookupError: nothing is known about version 1" in run.output
        said = " ".join(run.output.split())
        assert said.count(f"this loop has none: {', '.join(set_in_vain)};") == 1
        failed = verdict(RunFolder(run.run_dir))
        assert failed.state is State.failed
        assert "LookupError: nothing is known about version 1" in failed.text
        run.wait_until_gone()


def test_a_lost_worker_ends_the_run_and_is_named(tmp_path: Path, tiny_model_folder: Path) -> None:
    """The script waits for rows meanwhile, and calls no training rank."""
    with tiny_run(
        tmp_path / "run",
        tiny_model_folder,
        *(*PATIENT, ENDLESS, "actor.parallel.data=2", "scheduler.max_deaths=0"),
        f"task.num_free_episodes={3 * ROWS_A_STEP}",
    ) as run:
        run.wait_for_step(3)
        os.kill(run.worker_pid("train/1"), signal.SIGKILL)
        assert run.wait(60.0) == 5, run.story()
        assert "train/1 ended with signal 9 (SIGKILL)" in run.output
        assert str(run.run_dir / "logs" / "train-1.log") in run.output
        assert len(run.output.partition("ERROR ")[2].splitlines()) < 40
        run.wait_until_gone()
        # its rows are no answer: `partial` never gives less than 0.5
        assert all(record["reward"] >= 0.5 for record in run.records("step"))
        assert all(record["num_rows"] == ROWS_A_STEP for record in run.records("step"))
