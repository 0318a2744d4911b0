"""Nothing lost, nothing trained twice: the main job while its processes are killed at random.

    python benchmarks/chaos.py --steps 400 --json chaos.json

Workers, reward processes, fork servers and agents get SIGKILL, and some workers SIGSTOP, at random
moments; some kills strike while the run recovers from an earlier one. The script gets SIGKILL, too,
and the same command is given again at once: at any moment (`controller`), and once more while that
start takes over the workers (`attaching`) or begins a segment of the journal (`segment`). Some of
the time it is stopped for a moment (`paused`). Afterwards the account is made from the books that
ranks, rollout workers and rewards wrote by themselves (`chaos_run.py`): which rows were sealed with
which tokens and rewards, and which were trained at which version.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import report
from chaos_books import SCRIPT_KINDS, Books, Kill, account, recovery_times
from chaos_run import BOOKS, ROOT

KINDS: Final = {
    "rollout": "areal:rollout/",
    "train": "areal:train/",
    "reward": "areal:reward/",
    "forks": "areal:forks",
    "reward_forks": "areal:forks",
    "agent": "areal:agent",
    "stopped": "areal:rollout/",
    "server": "",
} | dict.fromkeys(SCRIPT_KINDS, "")
"""What is killed, and how its processes are called; what is stopped is a rollout worker, and a
server's process is known by its program."""

SERVER_PROGRAM: Final = b"servers/launcher.py"

DURING_RECOVERY_SHARE: Final = 0.35
"""Of the kills, those that follow at once on the one before."""

KILLS: Final = {
    "rollout": 25,
    "train": 25,
    "reward": 8,
    "forks": 6,
    "reward_forks": 4,
    "agent": 3,
    "stopped": 3,
    "server": 0,
    "controller": 15,
    "attaching": 5,
    "segment": 5,
    "paused": 3,
}

WORKER_FAILED: Final = 5
"""Exit code of a start one of whose new workers did not come up."""

MAX_FAILED: Final = 5

TAKES_OVER_S: Final = 2.0
"""Within this time from its term on a start is struck that takes workers over."""


class Script:
    """The user's script, and the same command again whenever it was killed.

    So it is, a few times, after a start that has failed since a worker was killed.

    Attributes:
        process: its newest start.
        num_failed: starts that have failed so.
    """

    def __init__(
        self, command: list[str], environment: Mapping[str, str], output: Path, run_dir: Path
    ) -> None:
        self._command, self._environment, self._output = command, environment, output
        self._run_dir = run_dir
        self.num_failed = 0
        self.process = self._started()

    @property
    def is_running(self) -> bool:
        code = self.process.poll()
        if code == WORKER_FAILED and self.num_failed < MAX_FAILED:
            self.num_failed += 1
            self.process = self._started()
        return self.process.poll() is None

    def wait(self, timeout_s: float) -> int:
        """Its exit code; that of a script which is killed in the end, if it takes too long."""
        give_up_s = time.monotonic() + timeout_s
        while self.is_running and time.monotonic() < give_up_s:
            time.sleep(0.1)
        self.process.kill()
        return self.process.wait()

    def kill(self) -> None:
        """SIGKILL, and the same command; a script that has ended by itself stays so."""
        self.process.kill()
        if self.process.wait() == -signal.SIGKILL:
            self.process = self._started()

    def pause(self, seconds: float) -> None:
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.process.send_signal(signal.SIGCONT)

    def term(self) -> str:
        """Changes when a start has taken the folder."""
        path = self._run_dir / ".term"
        return path.read_text() if path.exists() else ""

    def segments(self) -> list[str]:
        """Changes when the journal begins a segment."""
        folder = self._run_dir / "ledger"
        return sorted(os.listdir(folder)) if folder.exists() else []

    def _started(self) -> subprocess.Popen[bytes]:
        return started(self._command, self._environment, self._output)


def started(
    command: Sequence[str], environment: Mapping[str, str], output: Path
) -> subprocess.Popen[bytes]:
    """A process whose output is appended to a file."""
    with output.open("ab") as file:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=400, help="of training")
    parser.add_argument("--ranks", type=int, default=1, help="of the trained model")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="copy the run folder there")
    parser.add_argument("--config", default="configs/letter_sort.yaml", help="of the job")
    parser.add_argument("overrides", nargs="*", help="settings of the job, key=value")
    for kind, num in KILLS.items():
        parser.add_argument(
            f"--{kind.replace('_', '-')}", type=int, default=num, help=f"kills of kind {kind}"
        )
    quick = {"steps": 30, "rollout": 2, "train": 2, "reward": 1, "forks": 1}
    quick |= {"reward_forks": 0, "agent": 0, "stopped": 0}
    quick |= {"controller": 1, "attaching": 1, "segment": 1, "paused": 1}
    arguments = report.parse(parser, **quick)
    if arguments.quick:
        arguments.overrides += ["task.warm_start.steps=20", "evaluation.num_prompts=16"]
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as folder,
        tempfile.TemporaryDirectory(prefix="chaos-", dir="/dev/shm") as memory,
    ):
        metrics = play(Path(folder), Path(memory), arguments)
    report.write(metrics, arguments.json)


def play(folder: Path, memory: Path, arguments: Any) -> dict[str, float]:
    """The run with its kills, and the account."""
    books, run_dir = folder / "books", folder / "run"
    books.mkdir()
    command = [
        *(sys.executable, str(ROOT / "benchmarks" / "chaos_run.py")),
        *("--config", arguments.config, f"run_dir={run_dir}"),
        *(f"total_steps={arguments.steps}", "rollout.num_workers=2"),
        *(f"actor.parallel.data={arguments.ranks}", "scheduler.hung_after_s=5"),
        *("scheduler.heartbeat_interval_s=0.5", "checkpoint.every_steps=5"),
        *(f"actor.path={folder / 'warm_start'}", f"transport.shared_memory={memory}"),
        *arguments.overrides,
    ]
    path = os.pathsep.join(filter(None, [str(ROOT / "benchmarks"), os.getenv("PYTHONPATH")]))
    environment = os.environ | {BOOKS: str(books), "PYTHONPATH": path}
    script = Script(command, environment, folder / "output.txt", run_dir)
    kills: list[Kill] = []
    try:
        for kill in strike(script, run_dir, arguments):
            kills.append(kill)
        code = script.wait(max(600.0, 10.0 * arguments.steps))
        metrics = judge(folder, memory, kills, code, arguments.steps)
        metrics["num_failed_starts"] = script.num_failed
    finally:
        for pid in processes_of(run_dir):
            os.kill(pid, signal.SIGKILL)
        if arguments.keep:
            shutil.copytree(folder, arguments.keep)
    report.print_table(
        "Kills at random",
        {"steps": arguments.steps, "ranks": arguments.ranks, "seed": arguments.seed},
        ["what", "value"],
        list(metrics.items()),
    )
    return metrics


def judge(
    folder: Path, memory: Path, kills: list[Kill], code: int, num_steps: int
) -> dict[str, float]:
    """The account of a run that has ended.

    Raises: SystemExit: with an error.
    """
    run_dir, books = folder / "run", Books.read(folder / "books")
    (run_dir / "kills.jsonl").write_text(
        "".join(json.dumps(kill.told(books)) + "\n" for kill in kills)
    )
    if code:
        print((folder / "output.txt").read_text(errors="replace")[-6000:], file=sys.stderr)
        raise SystemExit(f"the job ended with exit code {code}, after {len(kills)} kills")
    metrics: dict[str, float] = {
        f"num_kills_{kind}": sum(kill.kind == kind for kill in kills) for kind in KINDS
    }
    metrics |= account(books, kills, run_dir, num_steps)
    for kind in KINDS:
        if kind != "server":  # its work stands in the books of its rollout worker
            metrics |= recovery_times(kind, kills, books)
    left = [*run_dir.rglob("*.partial"), *run_dir.glob("keys.json"), *processes_of(run_dir)]
    left += [*run_dir.glob("agents/*"), *memory.glob("*/*")]
    for it in left:
        report.say(f"left: {it}")
    return metrics | {"leftovers": len(left)}


def strike(script: Script, run_dir: Path, arguments: Any) -> Iterator[Kill]:
    """Kills, spread over the steps of the run, in random order."""
    rng = random.Random(arguments.seed)
    wanted = [kind for kind in KINDS for _ in range(getattr(arguments, kind))]
    rng.shuffle(wanted)
    first, last = 3, max(4, arguments.steps - 5)
    at_step = sorted(rng.uniform(first, last) for _ in wanted)
    for number, (kind, step) in enumerate(zip(wanted, at_step, strict=True)):
        is_at_once = number > 0 and rng.random() < DURING_RECOVERY_SHARE
        while script.is_running and not is_at_once and version_of(run_dir) < step:
            time.sleep(0.02)
        time.sleep(rng.uniform(0.0, 0.8 if is_at_once else 0.3))
        strike_one = strike_script if kind in SCRIPT_KINDS else strike_worker
        for kill in strike_one(kind, script, run_dir, rng):
            kill.is_nested |= is_at_once
            yield kill


def strike_worker(kind: str, script: Script, run_dir: Path, rng: random.Random) -> Iterator[Kill]:
    """A signal to one process of a kind, once there is one."""
    while script.is_running:
        alive = processes_of(run_dir)
        if pids := targets(alive, kind):
            kill = Kill(kind, time.time(), alive, False, rng.choice(pids))
            os.kill(kill.pid, signal.SIGSTOP if kind == "stopped" else signal.SIGKILL)
            yield kill
            return
        time.sleep(0.02)  # all of the kind are dead now


def strike_script(kind: str, script: Script, run_dir: Path, rng: random.Random) -> Iterator[Kill]:
    """Signals to the script; `attaching` and `segment` come after one of `controller`."""
    if not script.is_running:
        return
    alive, watch = processes_of(run_dir), script.segments if kind == "segment" else script.term
    before = watch()
    if kind == "paused":
        yield Kill(kind, time.time(), alive, False, script.process.pid)
        script.pause(rng.uniform(0.5, 3.0))
        return
    yield Kill("controller", time.time(), alive, False, script.process.pid)
    script.kill()
    if kind == "controller":
        return
    alive = processes_of(run_dir)
    while script.is_running and watch() == before:
        time.sleep(0.001)
    time.sleep(0.0 if kind == "segment" else rng.uniform(0.0, TAKES_OVER_S))
    if script.is_running:
        yield Kill(kind, time.time(), alive, True, script.process.pid)
        script.kill()


def targets(alive: Mapping[int, str], kind: str) -> list[int]:
    """Of the living processes those that such a kill may hit."""
    pids = [pid for pid, name in alive.items() if name.startswith(KINDS[kind])]
    if kind == "server":
        pids = [pid for pid in pids if SERVER_PROGRAM in _command_line(pid)]
    if "forks" in kind:  # of the agent, or of a rollout worker's rewards
        agents = {pid for pid, name in alive.items() if name.startswith(KINDS["agent"])}
        pids = [pid for pid in pids if (_parent(pid) in agents) == (kind == "forks")]
    return pids


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _parent(pid: int) -> int | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return int(status.partition("PPid:")[2].split()[0])


def version_of(run_dir: Path) -> int:
    """Training steps that the metrics file tells of."""
    try:
        return (run_dir / "metrics.jsonl").read_text().count('"kind":"step"')
    except OSError:
        return 0


def processes_of(run_dir: Path) -> dict[int, str]:
    """Processes of the run and their names, zombies left out."""
    mark = f"{BOOKS}={run_dir.parent / 'books'}".encode()
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes().split(b"\0")  # empty of a zombie
            if mark in environment:
                found[int(path.name)] = (path / "comm").read_text().strip()
        except OSError:
            continue
    return found


if __name__ == "__main__":
    main()
