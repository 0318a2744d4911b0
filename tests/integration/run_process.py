"""A user's script as a process, and every process that comes of it.

All of them inherit a mark in their environment, so they are found wherever they are: workers lead
sessions of their own, and after `kill -9` of the script init is their parent.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from integration.agent_forks import TINY_YAML, environment_of_scripts, start_script
from waiting import is_running

SCRIPTS = Path(__file__).with_name("scripts")
TINY_RUN = SCRIPTS / "tiny_run.py"
REPOSITORY = Path(__file__).resolve().parents[2]

LETTER_SORT = REPOSITORY / "examples" / "letter_sort.py"
SMALL_JOB = (
    *("--config", str(REPOSITORY / "configs" / "letter_sort.yaml")),
    *("actor.device=cpu", "rollout.device=cpu", "total_steps=20", "actor.optimizer.lr=1e-3"),
    *("task.max_letters=3", "task.median_letters=2", "rollout.train_batch_groups=16"),
    "task.warm_start={steps: 150, batch_size: 128, lr: 8e-3, hidden_size: 48, ffn_size: 96, "
    "num_layers: 2}",
    "evaluation.num_prompts=64",
)
"""The main job with short words: in three runs the accuracy rose by 0.58 to 0.63. With a rate of
2e-3 it is left to chance whether it learns: the first step moves the policy by a KL of 0.4."""

NO_ORPHANS = "scheduler.orphan_timeout_s=600"
"""No worker ends by itself: all are ended, however slow that is."""

PATIENT = (NO_ORPHANS, "scheduler.heartbeat_interval_s=10")
"""Nor is one lost that is slow: where a test counts deaths."""

LIMIT_S = 400.0
"""Far above what anything here takes, for a machine that is busy with other work."""

_POLL_S = 0.05
_MARK = "AREAL_SC_TEST_RUN"


class RunProcess:
    """One started script.

    Attributes:
        run_dir: its run folder.
    """

    def __init__(self, run_dir: Path, script: Path, *arguments: str) -> None:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self._mark = f"{_MARK}={uuid.uuid4()}"
        self._output_path = run_dir.with_name(f"{run_dir.name}-{self._mark[-6:]}.txt")
        with self._output_path.open("wb") as output:
            self._process = start_script(
                [sys.executable, str(script), *arguments, f"run_dir={run_dir}"],
                REPOSITORY,
                environment_of_scripts() | dict([self._mark.split("=")]),
                output,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def output(self) -> str:
        return self._output_path.read_text(errors="replace")

    def send(self, signum: int) -> None:
        self._process.send_signal(signum)

    def send_to_foreground(self, signum: int) -> None:
        """As a terminal does on Ctrl-C: to the script's whole process group."""
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(self.pid, signum)

    def wait(self, timeout_s: float = LIMIT_S) -> int:
        """The script's exit code."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout_s:g} s\n{self.story()}") from None

    def finish(self) -> None:
        """Waits for the end of a run that succeeds."""
        code = self.wait()
        assert code == 0, f"exit code {code}\n{self.story()}"

    def wait_until(self, is_so: Callable[[], Any], what: str) -> None:
        """Waits for something that the living script brings about."""
        give_up = time.monotonic() + LIMIT_S
        is_running = self.is_running
        while not is_so():
            assert is_running, f"ended before {what}\n{self.story()}"
            assert time.monotonic() < give_up, f"waited {LIMIT_S:g} s for {what}\n{self.story()}"
            time.sleep(_POLL_S)
            is_running = self.is_running  # before the look: it may end with what is waited for

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: step in self.steps(), f"training step {step}")

    def processes(self) -> dict[int, str]:
        """pid -> command line of every living process that came of the script, itself included."""
        mark = self._mark.encode()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                # that of a zombie is empty
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(folder.name)] = command.decode(errors="replace")
            except OSError:
                continue  # it has ended, or is somebody else's
        return found

    def wait_until_gone(self, timeout_s: float = LIMIT_S) -> None:
        """No process is left of the run; who was found ends before all are looked at again."""
        give_up = time.monotonic() + timeout_s
        while left := self.processes():
            assert time.monotonic() < give_up, f"left after {timeout_s:g} s: {left}\n{self.story()}"
            time.sleep(_POLL_S)
            while any(map(is_running, left)) and time.monotonic() < give_up:
                time.sleep(_POLL_S)

    def worker_pid(self, name: str) -> int:
        """Of a running worker such as `rollout/0`."""
        log = (self.run_dir / "logs" / "controller.log").read_text()
        pids = re.findall(rf"worker={name} pid=(\d+) ", log)
        assert pids, f"no worker {name} serves\n{self.story()}"
        return int(pids[-1])

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Whole lines of `metrics.jsonl` of that kind, in order."""
        path = self.run_dir / "metrics.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().split("\n")[:-1]
        return [record for line in lines if (record := json.loads(line))["kind"] == kind]

    def steps(self) -> list[int]:
        return [record["step"] for record in self.records("step")]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [record for record in self.records("event") if record["name"] == name]

    def summary(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return content

    def story(self) -> str:
        """What the run has said, for a failed assertion."""
        parts = [f"--- output\n{self.output[-6000:]}"]
        for log in sorted((self.run_dir / "logs").glob("*.log")):
            parts.append(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        return "\n".join(parts)

    def kill_all(self) -> None:
        while left := self.processes():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.poll()
            time.sleep(_POLL_S)
        self._process.wait(LIMIT_S)


@contextmanager
def tiny_run(
    run_dir: Path, model: Path, *overrides: str, script: Path = TINY_RUN
) -> Iterator[RunProcess]:
    """A run of `tiny_run.yaml`; whatever a test does, nothing is left of it."""
    with started(
        run_dir,
        script,
        *("--config", str(TINY_YAML), f"actor.path={model}"),
        f"task.gate={gate_of(run_dir)}",
        *overrides,
    ) as run:
        yield run


@contextmanager
def started(run_dir: Path, script: Path, *arguments: str) -> Iterator[RunProcess]:
    run = RunProcess(run_dir, script, *arguments)
    try:
        yield run
    finally:
        run.kill_all()


def run_example(name: str, folder: Path, *overrides: str) -> str:
    """Runs an example to its end, as a user does in that folder, and returns what it says."""
    example, settings = (REPOSITORY / it for it in (f"examples/{name}.py", f"configs/{name}.yaml"))
    command = [sys.executable, str(example), "--config", str(settings), *overrides]
    said = folder / f"{name}.txt"
    with said.open("wb") as output:
        process = start_script(command, folder, environment_of_scripts(), output)
    try:
        code = process.wait(560)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert code == 0, said.read_text()
    return said.read_text()


def assert_nothing_was_started(run: RunProcess) -> None:
    """The script has ended, and its run folder is as it was before."""
    assert not (run.run_dir / "logs").exists(), run.story()
    assert "Traceback" not in run.output


def gate_of(run_dir: Path) -> Path:
    """The file whose size says how many more episodes of a tiny run may begin."""
    return run_dir.with_name(f"{run_dir.name}-gate")


def open_gate(run_dir: Path) -> None:
    """Lets each rollout worker begin `task.num_free_episodes` more."""
    with gate_of(run_dir).open("ab") as gate:
        gate.write(b".")
