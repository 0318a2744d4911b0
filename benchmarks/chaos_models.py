"""A script with three models whose processes are killed at random: rows once, stores flat.

    python benchmarks/chaos_models.py --steps 200 --kills 40 --json chaos_models.json

A policy, a frozen reference and a model that is trained on demonstrations. Their ranks, the rollout
workers and the script get SIGKILL at random moments, some at once after one another; the script's
command is given again at once. Afterwards the journal tells which rows were trained, and a book of
the script how much lay in each worker's store after each step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Final

import report
from chaos import DURING_RECOVERY_SHARE, Script, processes_of, version_of
from chaos_models_run import STORES
from chaos_run import BOOKS, ROOT

from areal_sc.controller.ledger.ledger_account import GroupAccount, read_account

KINDS: Final = {
    "rollout": "areal:rollout/",
    "train": "areal:train/",
    "ref": "areal:ref/",
    "sft": "areal:sft/",
    "script": "",
}
"""Role of the killed process, and how it is called. The system keeps 15 characters of a name."""


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--kills", type=int, default=40, help="of all kinds together")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="copy the run folder there")
    arguments = report.parse(parser, steps=24, kills=5)
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as folder,
        tempfile.TemporaryDirectory(prefix="chaos-", dir="/dev/shm") as memory,
    ):
        metrics = play(Path(folder), Path(memory), arguments)
    report.print_table(
        "Three models, kills at random",
        {"steps": arguments.steps, "kills": arguments.kills, "seed": arguments.seed},
        ["what", "value"],
        list(metrics.items()),
    )
    report.write(metrics, arguments.json)


def play(folder: Path, memory: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """The run with its kills, and the account.

    Raises: SystemExit: with an error.
    """
    sys.path.insert(0, str(ROOT / "examples"))
    from minimal import make_model

    books, run_dir, model = folder / "books", folder / "run", folder / "model"
    books.mkdir()
    make_model(str(model))
    command = [
        *(sys.executable, str(ROOT / "benchmarks" / "chaos_models_run.py")),
        *("--config", "configs/minimal.yaml", f"run_dir={run_dir}", f"actor.path={model}"),
        *(f"total_steps={arguments.steps}", "rollout.num_workers=2", "actor.device=cpu"),
        *("rollout.device=cpu", "rollout.train_batch_groups=8", "rollout.group_size=4"),
        *("checkpoint.every_steps=10", "scheduler.heartbeat_interval_s=0.5"),
        f"transport.shared_memory={memory}",
    ]
    environment = os.environ | {BOOKS: str(books), "PYTHONPATH": f"{ROOT}/benchmarks:{ROOT}"}
    script = Script(command, environment, folder / "output.txt", run_dir)
    try:
        struck = strike(script, run_dir, arguments)
        code = script.wait(max(600.0, 10.0 * arguments.steps))
    finally:
        for pid in processes_of(run_dir):
            os.kill(pid, signal.SIGKILL)
        if arguments.keep:
            shutil.copytree(folder, arguments.keep)
    if code:
        print((folder / "output.txt").read_text(errors="replace")[-6000:], file=sys.stderr)
        raise SystemExit(f"the script ended with exit code {code}, after {struck.total()} kills")
    return judge(folder, struck, script.num_failed, arguments.steps)


def strike(script: Script, run_dir: Path, arguments: argparse.Namespace) -> Counter[str]:
    """Kills, spread over the steps of the run; how many there were of each kind."""
    rng, struck = random.Random(arguments.seed), Counter[str]()
    first, last = 2, max(3, arguments.steps - 4)
    at_step = sorted(rng.uniform(first, last) for _ in range(arguments.kills))
    for number, step in enumerate(at_step):
        is_at_once = number > 0 and rng.random() < DURING_RECOVERY_SHARE
        while script.is_running and not is_at_once and version_of(run_dir) < step:
            time.sleep(0.02)
        time.sleep(rng.uniform(0.0, 0.8 if is_at_once else 0.3))
        kind = rng.choice(list(KINDS))
        if kind == "script" and script.is_running:
            script.kill()
            struck[kind] += 1
        while kind != "script" and script.is_running:
            alive = processes_of(run_dir)
            if pids := [pid for pid, name in alive.items() if name.startswith(KINDS[kind])]:
                os.kill(rng.choice(pids), signal.SIGKILL)
                struck[kind] += 1
                break
            time.sleep(0.02)  # all of the kind are dead now
    return struck


def judge(folder: Path, struck: Counter[str], num_failed: int, num_steps: int) -> dict[str, float]:
    """What the journal, and the book of stores, tell of a run that has ended."""
    groups: list[GroupAccount] = []
    account = read_account(folder / "run" / "ledger", groups.append)
    lines = [json.loads(line) for line in (folder / "books" / STORES).read_text().splitlines()]
    held = list({line["version"]: line["bytes"] for line in lines}.values())
    metrics: dict[str, float] = {f"num_kills_{kind}": struck[kind] for kind in KINDS}
    metrics |= {
        "num_kills": struck.total(),
        "num_failed_starts": num_failed,
        "num_lineages": len(account.lineages),
        "rows_lost": account.rows_lost,
        "rows_trained_twice": len(account.trained_again),
        "groups_run_again": sum(group.attempt > 0 for group in groups),
        "steps_missing": num_steps - account.version,
    }
    quarter = max(1, len(held) // 4)
    for role in held[0]:
        of_role = [step[role] for step in held]
        early, late = (statistics.median(part) for part in (of_role[:quarter], of_role[-quarter:]))
        metrics[f"store_growth_{role}"] = late / max(early, 1)
        metrics[f"store_{role}_most_bytes"] = max(of_role)
    return metrics


if __name__ == "__main__":
    main()
