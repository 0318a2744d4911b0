"""Nothing lost, nothing trained twice: the main job while its processes are killed at random.

    python benchmarks/chaos.py --steps 400 --json chaos.json

Workers, reward processes, fork servers and agents get SIGKILL, and some workers SIGSTOP, at random
moments; some kills strike while the run recovers from an earlier one. Afterwards the account is
made from the books that ranks, rollout workers and rewards wrote by themselves (`chaos_run.py`):
which rows were sealed with which tokens and rewards, and which were trained at which version.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import report
from chaos_run import BOOKS, ROOT
from processes import process_tree

KINDS: Final = {
    "rollout": "areal:rollout/",
    "train": "areal:train/",
    "reward": "areal:reward/",
    "forks": "areal:forks",
    "reward_forks": "areal:forks",
    "agent": "areal:agent",
    "stopped": "areal:rollout/",
    "server": "",
}
"""What is killed, and how its processes are called; what is stopped is a rollout worker, and a
server's process is known by its program."""

SERVER_PROGRAM: Final = b"servers/launcher.py"

DURING_RECOVERY_SHARE: Final = 0.35
"""Of the kills, those that follow at once on the one before."""


@dataclass
class Kill:
    """A signal that was sent.

    Attributes:
        alive: process ids of the run before it.
        is_nested: it followed at once on another one.
    """

    kind: str
    time_s: float
    alive: frozenset[int]
    is_nested: bool
    pid: int

    def told(self, books: Books) -> dict[str, Any]:
        """For a line of JSON."""
        return {
            "time": self.time_s,
            "kind": self.kind,
            "pid": self.pid,
            "is_nested": self.is_nested,
            "recovered_s": self.recovered_s(books),
        }

    def recovered_s(self, books: Books) -> float | None:
        """Until a process that is new did work of that kind; None: none did."""
        book = {"train": books.trained, "reward": books.rewards}.get(self.kind, books.begun)
        after = (r["time"] for r in book if r["time"] > self.time_s and r["pid"] not in self.alive)
        first = next(after, None)
        return None if first is None else first - self.time_s


@dataclass
class Books:
    """What the workers wrote down, in order of time."""

    begun: list[dict[str, Any]] = field(default_factory=list)
    sealed: list[dict[str, Any]] = field(default_factory=list)
    trained: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Books:
        books = cls()
        for name in ("begun", "sealed", "trained", "rewards"):
            records = getattr(books, name)
            for path in folder.glob(f"{name}-*.jsonl"):
                # the last line of a killed process may be torn
                records += [json.loads(x) for x in path.read_text().split("\n")[:-1]]
            records.sort(key=lambda record: record["time"])
        return books


KILLS: Final = {
    "rollout": 25,
    "train": 25,
    "reward": 8,
    "forks": 6,
    "reward_forks": 4,
    "agent": 3,
    "stopped": 3,
    "server": 0,
}


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
    job = subprocess.Popen(
        [
            *(sys.executable, str(ROOT / "benchmarks" / "chaos_run.py")),
            *("--config", arguments.config, f"run_dir={run_dir}"),
            *(f"total_steps={arguments.steps}", "rollout.num_workers=2"),
            *(f"actor.parallel.data={arguments.ranks}", "scheduler.hung_after_s=5"),
            *("scheduler.heartbeat_interval_s=0.5", "checkpoint.every_steps=5"),
            *(f"actor.path={folder / 'warm_start'}", f"transport.shared_memory={memory}"),
            *arguments.overrides,
        ],
        cwd=ROOT,
        env=os.environ | {BOOKS: str(books), "PYTHONPATH": str(ROOT / "benchmarks")},
        stdout=(folder / "output.txt").open("wb"),
        stderr=subprocess.STDOUT,
    )
    try:
        kills = list(strike(job, run_dir, arguments))
        code = job.wait(max(600.0, 10.0 * arguments.steps))
    finally:
        tree = process_tree(job.pid) if job.poll() is None else []
        for pid in tree:
            os.kill(pid, signal.SIGKILL)
    output = (folder / "output.txt").read_text(errors="replace")
    if code:
        print(output[-6000:], file=sys.stderr)
        raise SystemExit(f"the job ended with exit code {code}, after {len(kills)} kills")
    read = Books.read(books)
    (run_dir / "kills.jsonl").write_text(
        "".join(json.dumps(kill.told(read)) + "\n" for kill in kills)
    )
    metrics = account(read, kills, run_dir, arguments.steps)
    left = [*run_dir.rglob("*.partial"), *run_dir.glob("keys.json"), *processes_of(run_dir)]
    left += list(memory.glob("*/*"))
    metrics["leftovers"] = len(left)
    if arguments.keep:
        shutil.copytree(folder, arguments.keep)
    report.print_table(
        "Kills at random",
        {"steps": arguments.steps, "ranks": arguments.ranks, "seed": arguments.seed},
        ["what", "value"],
        list(metrics.items()),
    )
    return metrics


def strike(job: subprocess.Popen[bytes], run_dir: Path, arguments: Any) -> Iterator[Kill]:
    """Kills, spread over the steps of the run, in random order."""
    rng = random.Random(arguments.seed)
    wanted = [kind for kind in KINDS for _ in range(getattr(arguments, kind))]
    rng.shuffle(wanted)
    first, last = 3, max(4, arguments.steps - 5)
    at_step = sorted(rng.uniform(first, last) for _ in wanted)
    for number, (kind, step) in enumerate(zip(wanted, at_step, strict=True)):
        is_at_once = number > 0 and rng.random() < DURING_RECOVERY_SHARE
        while not is_at_once and version_of(run_dir) < step:
            if job.poll() is not None:
                return
            time.sleep(0.02)
        time.sleep(rng.uniform(0.0, 0.8 if is_at_once else 0.3))
        while not (pids := targets(run_dir, kind)):
            if job.poll() is not None:
                return
            time.sleep(0.02)  # all of the kind are dead now
        alive, pid = frozenset(processes_of(run_dir)), rng.choice(pids)
        os.kill(pid, signal.SIGSTOP if kind == "stopped" else signal.SIGKILL)
        yield Kill(kind, time.time(), alive, is_at_once, pid)


def targets(run_dir: Path, kind: str) -> list[int]:
    """Processes that such a kill may hit."""
    pids = list(processes_of(run_dir, KINDS[kind]))
    if kind == "server":
        pids = [pid for pid in pids if SERVER_PROGRAM in _command_line(pid)]
    if "forks" in kind:  # of the agent, or of a rollout worker's rewards
        agents = set(processes_of(run_dir, KINDS["agent"]))
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


def account(books: Books, kills: list[Kill], run_dir: Path, num_steps: int) -> dict[str, float]:
    """What became of every row, by the books alone, and how long it took to go on."""
    sealed = {_key(record): record for record in books.sealed}
    histories: dict[int, dict[tuple[int, int, int], str]] = {}
    for record in books.trained:  # of a repeated step the last one is what survives
        histories.setdefault(record["version"], {})[_key(record)] = record["hash"]
    surviving = Counter(key[0] for rows in histories.values() for key in rows)
    versions_of_group: dict[int, set[int]] = {}
    for version, rows in histories.items():
        for group, _, _ in rows:
            versions_of_group.setdefault(group, set()).add(version)
    twice = [group for group, versions in versions_of_group.items() if len(versions) > 1]
    unknown = [k for rows in histories.values() for k, h in rows.items() if sealed[k]["hash"] != h]
    steps = [json.loads(x) for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in steps if record["kind"] == "step"]
    num_expected = {record["step"] - 1: record["num_rows"] for record in steps}
    lost = sum(
        max(0, num_expected.get(version, 1) - len(histories.get(version, {})))
        for version in range(num_steps)
    )
    false_zeros = [
        record
        for record in books.sealed
        if record["reward"] == 0.0 and _right_answer(record["text"])
    ]
    summary = json.loads((run_dir / "summary.json").read_text())
    metrics: dict[str, float] = {
        f"num_kills_{kind}": sum(kill.kind == kind for kill in kills) for kind in KINDS
    }
    metrics |= {
        "num_kills_in_recovery": sum(kill.is_nested for kill in kills),
        "num_steps": len(histories),
        "rows_trained": sum(surviving.values()),
        "rows_lost": lost,
        "rows_trained_twice": sum(surviving[group] for group in twice),
        "rows_of_other_content": len(unknown),
        "false_zero_rewards": len(false_zeros),
        "accuracy_after": summary["accuracy_after"],
        "num_rows_trained_by_the_run": summary["num_rows_trained"],
    }
    for kind in KINDS:
        if kind != "server":  # its work stands in the books of its rollout worker
            metrics |= _recovery_times(kind, kills, books)
    return metrics


def _recovery_times(kind: str, kills: list[Kill], books: Books) -> dict[str, float]:
    """Of all kills of a kind, and of those that no other kill was close to."""
    all_s: list[float] = []
    alone_s: list[float] = []
    for number, kill in enumerate(kills):
        recovered_s = kill.recovered_s(books) if kill.kind == kind else None
        if recovered_s is None:
            continue
        all_s.append(recovered_s)
        if not (kill.is_nested or any(after.is_nested for after in kills[number + 1 : number + 2])):
            alone_s.append(recovered_s)
    times = {f"{kind}_recovery_worst_s": max(all_s)} if all_s else {}
    if alone_s:
        times[f"{kind}_recovery_alone_median_s"] = statistics.median(alone_s)
        times[f"{kind}_recovery_alone_worst_s"] = max(alone_s)
    return times


def _key(record: Mapping[str, Any]) -> tuple[int, int, int]:
    return record["group"], record["attempt"], record["episode"]


def _right_answer(text: str) -> bool:
    prompt, _, answer = text.partition("=")
    return answer == "".join(sorted(prompt)) + "$"


def version_of(run_dir: Path) -> int:
    """Training steps that the metrics file tells of."""
    try:
        return (run_dir / "metrics.jsonl").read_text().count('"kind":"step"')
    except OSError:
        return 0


def processes_of(run_dir: Path, name: str = "") -> Iterator[int]:
    """Processes of the run whose name begins so, zombies left out."""
    mark = f"{BOOKS}={run_dir.parent / 'books'}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if not (path / "comm").read_text().startswith(name):
                continue
            environment = (path / "environ").read_bytes().split(b"\0")  # empty of a zombie
        except OSError:
            continue
        if mark in environment:
            yield int(path.name)


if __name__ == "__main__":
    main()
