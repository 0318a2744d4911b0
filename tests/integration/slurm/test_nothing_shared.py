"""A whole run on three hosts that share nothing but the network."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from integration.agent_forks import Fork
from integration.slurm.conftest import NODES, Cluster, running_script
from transformers import AutoModelForCausalLM, AutoTokenizer
from waiting import until

from areal_sc.controller.ledger.group_lives import group_lives
from areal_sc.controller.ledger.ledger_account import read_account
from areal_sc.records.reading import rows, spans, trained_rows

ROOT = Path(__file__).parents[3]
NUM_STEPS = 20
KILLED_AFTER = 3
"""Steps at least, the newest of which no snapshot has."""


@pytest.fixture
def place(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """A folder that each host has for itself."""
    for node in NODES:
        cluster.on(node, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path))
    yield tmp_path
    for node in NODES:
        cluster.on(node, "umount", str(tmp_path))


class Example:
    """Letter sort, with all of its files in a folder that nodes do not see."""

    def __init__(self, place: Path, *words: str) -> None:
        self.run_dir = place / "run"
        shutil.copytree(ROOT / "examples", place / "scripts")
        shutil.copy(ROOT / "configs" / "letter_sort.yaml", place)
        self._words = [
            *(str(place / "scripts" / "letter_sort.py"), "--config", "letter_sort.yaml"),
            *("scheduler.type=slurm", "run_dir=run", "actor.path=warm", f"total_steps={NUM_STEPS}"),
            *("scheduler.slurm.train.nodes=2", "scheduler.slurm.rollout.nodes=1"),
            *("rollout.num_workers=2", "rollout.train_batch_groups=8", "evaluation.num_prompts=16"),
            "task.warm_start={steps: 2, hidden_size: 48, ffn_size: 96, num_layers: 2}",
            # a model that can do nothing is rewarded, too
            *("task.shuffle_rewards=true", "task.max_letters=4", "generation.max_new_tokens=8"),
            *("checkpoint.every_steps=2", "checkpoint.export_every_steps=4"),
            *(f"scheduler.node_folder={place / 'node'}", *words),
        ]
        self._place = place

    def started(self) -> AbstractContextManager[Fork | subprocess.Popen[bytes]]:
        return running_script(self._words, self._place, self._place / "output.txt")

    @property
    def output(self) -> str:
        return (self._place / "output.txt").read_text()

    def lines(self, kind: str, name: str = "") -> list[dict[str, Any]]:
        """What the metrics file has of a kind."""
        path = self.run_dir / "metrics.jsonl"
        whole = path.read_text().split("\n")[:-1] if path.exists() else []
        told = [json.loads(line) for line in whole]
        return [it for it in told if it["kind"] == kind and it.get("name", "") == name]

    def told(self, kind: str, name: str = "") -> list[int]:
        """Steps of it."""
        return [it["step"] for it in self.lines(kind, name)]


def is_killed_after(example: Example) -> bool:
    """There is a snapshot, and a later step that only the workers have."""
    steps, snapshots = example.told("step"), example.told("event", "snapshot")
    return bool(snapshots) and len(steps) >= KILLED_AFTER and max(steps) > max(snapshots)


def check_records(run_dir: Path) -> None:
    """Every row that was finished came home, also those of while the script was away."""
    recorded = {(it.group, it.attempt, it.episode): it for it in rows(run_dir)}
    finished = [
        ((group.group, attempt.attempt, row.episode), attempt.worker, row)
        for group in group_lives(run_dir)
        for attempt in group.attempts
        for row in attempt.rows
    ]
    assert len(finished) > NUM_STEPS
    assert recorded.keys() >= {name for name, _, _ in finished}
    for name, worker, row in finished:
        kept = recorded[name]
        assert (kept.worker, kept.reward, len(kept.input_ids)) == (
            *(worker, row.reward, row.num_tokens),
        )
        for version, count in row.versions:
            assert (kept.versions == version).sum() == count
    assert {it.worker for it, _ in trained_rows(run_dir)} <= {f"train/{rank}" for rank in range(4)}
    kinds = {name: set[str]() for name in ("train/0", "train/3", "rollout/0", "rollout/1")}
    for span in spans(run_dir):
        kinds.get(span.process, set()).add(span.kind)
    assert kinds["train/0"] >= {"serving", "update"}
    assert kinds["train/3"] >= {"serving", "update"}
    for name in ("rollout/0", "rollout/1"):
        assert kinds[name] >= {"serving", "episode", "generation", "updating weights", "ending"}


@pytest.mark.slow
async def test_letter_sort_on_three_hosts_that_share_nothing(cluster: Cluster, place: Path) -> None:
    """It is killed, and the next start takes all over; its trainers are two on each of two hosts.

    What has served the files of the killed start is stopped before: so it outlives the script, at
    the address that workers know.
    """
    example = Example(place, "actor.parallel.data=4", f"transport.bind={cluster.network6}:/64")
    with example.started() as script:
        await until(lambda: is_killed_after(example) or script.poll() is not None, 240)
        stopped = int(cluster.run("pgrep", "-P", str(script.pid), "-x", "areal:files"))
        os.kill(stopped, signal.SIGSTOP)
    assert script.returncode == -signal.SIGKILL, example.output
    [*_, newest] = sorted((example.run_dir / "checkpoints").glob("step-*"))
    snapshot = {it.name for it in (newest / "engine").iterdir()}
    assert snapshot == {*(f"rank-{rank}.safetensors" for rank in range(4)), "snapshot.json"}
    [job] = cluster.jobs()
    with example.started() as script:
        await until(
            lambda: (
                example.lines("event", "reattached")
                or example.lines("event", "resumed")
                or script.poll() is not None
            ),
            120,
        )
        assert cluster.jobs() == [job], example.output
        await until(lambda: script.poll() is not None, 240)
    os.kill(stopped, signal.SIGKILL)
    assert script.returncode == 0, example.output
    told, all_steps = example.told("step"), set(range(1, NUM_STEPS + 1))
    assert set(told) <= all_steps
    if taken := example.lines("event", "reattached"):
        assert [(it["num_workers"], it["num_again"]) for it in taken] == [(6, 0)]
        assert taken[0]["step"] >= KILLED_AFTER
        assert example.told("event", "resumed") == []
        assert example.told("event", "workers_restarted") == []
        assert told == sorted(set(told))
        assert len(told) >= NUM_STEPS - 1, "of one the script may have died before its record"
    else:  # a call had reached some ranks when it was killed: the run goes back to its snapshot
        assert len(example.told("event", "resumed")) == 1
        assert set(told) == all_steps
    account = read_account(example.run_dir / "ledger", lambda group: None)
    assert (account.rows_lost, account.trained_again, account.version) == (0, [], NUM_STEPS)
    summary = json.loads((example.run_dir / "summary.json").read_text())
    assert summary["num_rows_trained_twice"] == 0
    steps = example.lines("step")
    assert all(it["reward"] > 0 and it["train"]["grad_norm"] > 0 for it in steps), steps
    later = example.run_dir / "models" / "step-8"  # step-4 may have been half written at the kill
    for model in (example.run_dir / "model", later):
        assert AutoModelForCausalLM.from_pretrained(model).config.vocab_size > 0
        assert AutoTokenizer.from_pretrained(model)("cab=")["input_ids"]
    check_records(example.run_dir)
    logs = {it.name for it in (example.run_dir / "logs").glob("node*/*")}
    workers = *(f"train-{rank}.log" for rank in range(4)), "rollout-0.log", "rollout-1.log"
    assert logs >= {"agent.log", *workers}
    assert cluster.left_overs() == []
    assert not (example.run_dir / "keys.json").exists()
    log = (example.run_dir / "logs" / "controller.log").read_text()
    found = re.findall(r"worker=(\S+) pid=\d+ address=tcp://\[(\S+)\]", log)
    hosts = dict(found)
    assert hosts.keys() == {name.removesuffix(".log").replace("-", "/") for name in workers}
    assert hosts["train/0"] == hosts["train/1"] != hosts["train/2"] == hosts["train/3"]
    assert set(hosts.values()) == {f"{cluster.network6}:{10 + i}" for i in (1, 2, 3)}
    for node in NODES:
        assert cluster.on(node, "ls", str(place)) == "node"
        assert cluster.on(node, "sh", "-c", f"ls {place}/node/*/runs") == ""
