"""Agents while processes are killed at random: each delivered turn is trained once, or not at all.

    python benchmarks/agent_kills.py --json agent_kills.json      300 kills, in two runs
    python benchmarks/agent_kills.py --only served --sglang-python .venv-sglang/bin/python
    python benchmarks/agent_kills.py --quick

A model learns a tool from agents of the run (`inside`), then from agents outside (`outside`), and
from agents of the run whose answers come from two SGLang servers (`served`). All of them speak
HTTP, and close a tenth of their connections themselves to try again. SIGKILL hits the processes of
agents, of clients outside, of the run's address, servers, workers, ranks, and the script; some
kills strike while the run recovers from an earlier one. Afterwards the account is made from the
books of agents, rollout workers and ranks (`agent_kills_run.py`), and from the journal.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import report
from chaos import DURING_RECOVERY_SHARE, Script, processes_of, started, targets, version_of
from chaos_books import Books, Kill
from chaos_run import BOOKS, ROOT

from areal_sc.controller.ledger.ledger_account import read_account

KINDS: Final = {
    "episode": "areal:episode/",
    "client": "",
    "address": "areal:agents",
    "server": "",
    "rollout": "areal:rollout/",
    "train": "areal:train/",
    "controller": "",
}
"""What is killed, and how its processes are called: an agent's process, a client outside."""

SHARES: Final = {
    "inside": {"episode": 6, "rollout": 4, "train": 2, "controller": 3},
    "outside": {"client": 4, "address": 3, "rollout": 3, "train": 2, "controller": 3},
    "served": {"server": 8, "episode": 3, "rollout": 1, "train": 1, "controller": 2},
}
NUM_CLIENTS: Final = 3
END_S: Final = 60.0

BOOK_NAMES: Final = ("calls", "answers", "returns", "sessions")


class Clients:
    """Processes of agents outside; another one begins where one was killed."""

    def __init__(self, num: int, environment: dict[str, str], folder: Path) -> None:
        command = [sys.executable, str(ROOT / "benchmarks" / "agent_kills_run.py"), "collect"]
        self._command = [*command, str(folder / "run")]
        self._environment, self._output = environment, folder / "clients.txt"
        self.processes = [self._started() for _ in range(num)]

    def kill(self, rng: random.Random) -> int:
        """Which process was killed."""
        place = rng.randrange(len(self.processes))
        killed = self.processes[place]
        killed.kill()
        killed.wait()
        self.processes[place] = self._started()
        return killed.pid

    def end(self) -> int:
        """How many did not end by themselves when the run had ended."""
        give_up_s = time.monotonic() + END_S
        while any(it.poll() is None for it in self.processes) and time.monotonic() < give_up_s:
            time.sleep(0.1)
        left = [it for it in self.processes if it.poll() is None]
        for it in left:
            it.kill()
        return len(left)

    def _started(self) -> subprocess.Popen[bytes]:
        return started(self._command, self._environment, self._output)


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=150, help="of each run")
    parser.add_argument("--steps", type=int, default=300, help="of training, of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--only", choices=list(SHARES), help="one of the runs")
    parser.add_argument("--sglang-python", type=Path, help="that has SGLang, for `served`")
    arguments = report.parse(parser, kills=6, steps=15)
    if arguments.only == "served" and not arguments.sglang_python:
        parser.error("--only served: expected --sglang-python")
    runs = [it for it in SHARES if it != "served" or arguments.sglang_python]
    metrics: report.Metrics = {}
    for agents in [arguments.only] if arguments.only else runs:
        with (
            tempfile.TemporaryDirectory(prefix="agents-") as folder,
            tempfile.TemporaryDirectory(prefix="agents-", dir="/dev/shm") as memory,
        ):
            found = play(agents, Path(folder), Path(memory), arguments)
        settings = {"agents": agents, "steps": arguments.steps, "seed": arguments.seed}
        report.print_metrics("Kills at random", settings, found)
        metrics |= {f"{agents}_{name}": value for name, value in found.items()}
    report.write(metrics, arguments.json)


def play(agents: str, folder: Path, memory: Path, arguments: Any) -> report.Metrics:
    """A run with its kills, and the account."""
    books, run_dir = folder / "books", folder / "run"
    books.mkdir()
    served = agents == "served"
    command = [
        *(sys.executable, str(ROOT / "benchmarks" / "agent_kills_run.py")),
        "inside" if served else agents,
        *("--config", "configs/tool_use.yaml", f"run_dir={run_dir}"),
        *(f"total_steps={arguments.steps}", "task.warm_up_steps=100"),
        *(
            "rollout.num_workers=2",
            "rollout.train_batch_groups=8",
            "rollout.group_size=4",
            "evaluation.every_steps=0",
        ),
        *("rollout.rejection_window=1000000", "agents.idle_timeout_s=4"),
        *("scheduler.heartbeat_interval_s=0.5", "scheduler.hung_after_s=20"),
        *("checkpoint.every_steps=5", f"transport.shared_memory={memory}"),
        f"actor.path={folder / 'model'}",
    ]
    if served:
        command += ["rollout.engine=sglang", f"sglang.python={arguments.sglang_python}"]
    paths = str(ROOT / "benchmarks"), str(ROOT / "examples"), os.getenv("PYTHONPATH")
    environment = os.environ | {
        BOOKS: str(books),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    script = Script(command, environment, folder / "output.txt", run_dir)
    clients = Clients(NUM_CLIENTS if agents == "outside" else 0, environment, folder)
    kills: list[Kill] = []
    try:
        for kill in strike(agents, script, clients, run_dir, arguments):
            kills.append(kill)
        if code := script.wait(max(600.0, 10.0 * arguments.steps)):
            print((folder / "output.txt").read_text(errors="replace")[-6000:], file=sys.stderr)
            raise SystemExit(f"the job ended with exit code {code}, after {len(kills)} kills")
        num_left = clients.end() + len(processes_of(run_dir))
        found = account(Books.read(books), read_own(books), kills, run_dir, arguments.steps)
    finally:
        for pid in processes_of(run_dir):
            os.kill(pid, signal.SIGKILL)
    told = {f"kills_{kind}": float(sum(it.kind == kind for it in kills)) for kind in SHARES[agents]}
    left = [*run_dir.glob("keys.json"), *run_dir.glob("agents.json"), *memory.glob("*/*")]
    return {"kills": len(kills), **told, **found, "left": num_left + len(left)}


def strike(
    agents: str, script: Script, clients: Clients, run_dir: Path, arguments: Any
) -> Iterator[Kill]:
    """Kills, spread over the steps of the run, in random order."""
    rng = random.Random(arguments.seed)
    shares = SHARES[agents]
    kinds = [kind for kind, share in shares.items() for _ in range(share)]
    rng.shuffle(kinds)
    wanted = [kinds[number % len(kinds)] for number in range(arguments.kills)]
    rng.shuffle(wanted)
    at_step = sorted(rng.uniform(1, max(2, arguments.steps - 3)) for _ in wanted)
    for kind, step in zip(wanted, at_step, strict=True):
        is_at_once = rng.random() < DURING_RECOVERY_SHARE
        while script.is_running and not is_at_once and version_of(run_dir) < step:
            time.sleep(0.02)
        time.sleep(rng.uniform(0.0, 0.8 if is_at_once else 0.3))
        while script.is_running:
            alive = processes_of(run_dir)
            if (pid := kill(kind, alive, script, clients, rng)) is not None:
                yield Kill(kind, time.time(), alive, is_at_once, pid)
                break
            time.sleep(0.02)  # all of the kind are dead now


def kill(
    kind: str, alive: dict[int, str], script: Script, clients: Clients, rng: random.Random
) -> int | None:
    """Which process got SIGKILL; None: there is none of the kind."""
    if kind == "client":
        return clients.kill(rng)
    if kind == "controller":
        pid = script.process.pid
        script.kill()
        return pid
    pids = [pid for pid, name in alive.items() if name.startswith(KINDS[kind])]
    if kind == "server":
        pids = targets(alive, kind)
    if not pids:
        return None
    os.kill(pid := rng.choice(pids), signal.SIGKILL)
    return pid


def read_own(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The books of agents, and of sessions."""
    found = {name: list[dict[str, Any]]() for name in BOOK_NAMES}
    for name, records in found.items():
        for path in folder.glob(f"{name}-*.jsonl"):  # the last line may be torn
            lines = path.read_text().split("\n")[:-1]
            records += [{**json.loads(it), "of": path.stem} for it in lines]
        records.sort(key=lambda record: record["time"])
    return found


def account(
    books: Books,
    own: dict[str, list[dict[str, Any]]],
    kills: list[Kill],
    run_dir: Path,
    num_steps: int,
) -> report.Metrics:
    """What became of each answer, by the books alone."""
    histories = books.survivors()
    rows = [it for version in histories.values() for it in version]
    sealed = {(*_episode(it), it["hash"]): it for it in books.sealed}
    trained = [(*_episode(it), turn) for it in rows for turn in it["turns"] if turn]
    attempts = defaultdict(set)
    for it in rows:
        attempts[it["group"], it["episode"]].add((it["attempt"], it["version"]))

    sessions_of, answered = defaultdict(set), defaultdict(set)
    for it in own["answers"]:
        sessions_of[it["turn"]].add(it["session"])
        answered[it["session"]].add(it["turn"])
    returned = dict[str, float]()
    for it in own["returns"]:
        returned[it["session"]] = it["value"]
    turns = defaultdict(set)
    for it in rows:
        turns[_episode(it)].update(turn for turn in it["turns"] if turn)
    sessions = {
        it: next(iter(set.intersection(*(sessions_of[turn] for turn in found))), "")
        for it, found in turns.items()
    }

    judged = ((it["reward"], _true_reward(it["text"])) for it in sealed.values())
    checked = [it for it in judged if it[1] is not None]
    told = [json.loads(it) for it in (run_dir / "metrics.jsonl").read_text().splitlines()]
    expected = {it["step"] - 1: it["num_rows"] for it in told if it["kind"] == "step"}
    summary = json.loads((run_dir / "summary.json").read_text())
    ledger = read_account(run_dir / "ledger", lambda _: None)
    return {
        "kills_in_recovery": sum(it.is_nested for it in kills),
        "kills_in_a_call": sum(_is_in_call(own, it.time_s) for it in kills),
        "calls": len(own["calls"]),
        "answers": len(own["answers"]),
        "turns_trained": len(trained),
        "turns_trained_twice": sum(n > 1 for n in Counter(trained).values()),
        "episodes_trained_twice": sum(len(it) > 1 for it in attempts.values()),
        "turns_not_delivered": sum(not sessions_of[turn] for *_, turn in trained),
        "turns_left_out": sum(len(answered[sessions[it]] - found) for it, found in turns.items()),
        "rows_trained": len(rows),
        "rows_lost": sum(
            max(0, expected.get(it, 0) - len(histories.get(it, ()))) for it in range(num_steps)
        ),
        "rows_of_other_content": sum((*_episode(it), it["hash"]) not in sealed for it in rows),
        "rewards_not_of_the_agent": sum(
            returned.get(sessions[_episode(it)]) != it["reward"] for it in rows
        ),
        "rewards_checked": len(checked),
        "false_rewards": sum(reward != true for reward, true in checked),
        "sessions": sum(it["is_open"] for it in own["sessions"]),
        "sessions_left_open": _left_open(own["sessions"], kills),
        "ledger_rows_lost": ledger.rows_lost,
        "ledger_trained_again": len(ledger.trained_again),
        "episodes_rejected": sum(summary["rejected_episodes"].values()),
    }


def _episode(record: dict[str, Any]) -> tuple[int, int, int]:
    return record["group"], record["attempt"], record["episode"]


def _is_in_call(own: dict[str, list[dict[str, Any]]], time_s: float) -> bool:
    """Whether an agent waited for an answer that it got later, or never."""
    begun = Counter(it["session"] for it in own["calls"] if it["time"] <= time_s)
    done = Counter(it["session"] for it in own["answers"] if it["time"] <= time_s)
    last = {it["session"]: it["time"] for it in own["calls"] if it["time"] <= time_s}
    return any(begun[it] > done[it] and time_s - last[it] < 1.0 for it in begun)


def _left_open(records: list[dict[str, Any]], kills: list[Kill]) -> int:
    """Sessions that a worker has not ended which was not killed."""
    killed = {f"sessions-{it.pid}" for it in kills}
    changes = Counter[str]()
    for it in records:
        changes[it["of"]] += 1 if it["is_open"] else -1
    return sum(n for of, n in changes.items() if of not in killed)


def _true_reward(text: str) -> float | None:
    """What an episode is worth by its tokens; None: they do not tell, as another key was asked."""
    parts = text.split("<|assistant|>")
    asked = parts[0].partition("<|user|>key ")[2][:1]
    if len(parts) != 3:
        return 0.0
    if parts[1].count("<tool_call>") != 1 or f'"arguments": {{"key": "{asked}"}}' not in parts[1]:
        return None
    found = parts[1].partition("<|tool|>")[2].removesuffix("<|end|>")
    return float(parts[2] == f"{found}<|end|>")


if __name__ == "__main__":
    main()
