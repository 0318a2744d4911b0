"""Rollout workers are killed while k of n episodes of a group have ended: what is played again.

    python benchmarks/episode_kills.py --kills 200 --json episode_kills.json
    python benchmarks/episode_kills.py --quick

The local engine plays groups of eight episodes, one group after the other. When k of them are
sealed, SIGKILL hits the worker; the others are held until then. k goes through 0 to 7, and episodes
are of one turn, of two turns, and of agents. The program ends with an error unless every row of the
batch is bit for bit one that an episode gave, every row that was there before the kill is among
them, and no shard is left beside them. `whole_group_played_per_needed` is what a worker would play
that seals a group as a whole.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import minimal
import report
from integration.held_episodes import Kills, kill_at
from integration.run_process import TINY_YAML
from integration.scripts import agents, episodes

from areal_sc import (
    AgentWorkflow,
    GRPOConfig,
    SingleTurnWorkflow,
    Workflow,
    load_config,
    make_scheduler,
)

GROUP_SIZE = 8
WORKFLOWS = {
    "one_turn": SingleTurnWorkflow(episodes.by_letters),
    "two_turns": episodes.TwoTurns(),
    "agents": AgentWorkflow(agents.does),
}


def chat_model(folder: Path) -> Path:
    """A tiny one, with a template for agents."""
    path = folder / "model"
    minimal.make_model(str(path))
    settings = path / "tokenizer_config.json"
    template = "{% for message in messages %}{{ message.content }}{% endfor %}="
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    return path


def measure(folder: Path, name: str, played: Workflow, num_kills: int, model: Path) -> Kills:
    """One run of one workflow."""
    free = [number % GROUP_SIZE for number in range(num_kills)]
    settings = (
        *(f"run_dir={folder / name}", f"actor.path={model}", "task.gate=unused"),
        *(f"rollout.group_size={GROUP_SIZE}", "rollout.max_staleness=0"),
        *(f"rollout.train_batch_groups={num_kills}", "rollout.max_concurrent_groups=1"),
        *("rollout.max_context_tokens=16", "rollout.max_episode_tokens=32"),
        *("generation.max_new_tokens=5", "scheduler.heartbeat_interval_s=10"),
        "scheduler.orphan_timeout_s=600",
    )
    config = load_config(["--config", str(TINY_YAML), *settings], GRPOConfig)
    scheduler = make_scheduler(config.scheduler)
    try:
        path = folder / f"{name}.rows"
        return asyncio.run(kill_at(config, scheduler, played, free, path, does="answers"))
    finally:
        scheduler.close()


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=200, help="of all workflows together")
    arguments = report.parse(parser, kills=6)
    records: dict[tuple[str | int, ...], report.Metrics] = {}
    folder = Path(tempfile.mkdtemp(prefix="episode-kills-"))
    try:
        model = chat_model(folder)
        for name, played in WORKFLOWS.items():
            num_kills = max(arguments.kills // len(WORKFLOWS), 1)
            kills = measure(folder, name, played, num_kills, model)
            kills.check()
            if kills.num_left:
                sys.exit(f"{name}: {kills.num_left} shards are left beside those of the batch")
            num_kept = sum(number % GROUP_SIZE for number in range(num_kills))
            records[(name,)] = {
                "num_kills": float(num_kills),
                "num_needed_episodes": float(kills.num_needed),
                "played_per_needed": kills.num_played / kills.num_needed,
                "whole_group_played_per_needed": 1 + num_kept / kills.num_needed,
                "median_recovery_s": statistics.median(kills.took_s),
            }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    settings = {"kills": arguments.kills, "group size": GROUP_SIZE}
    report.print_records(
        "Workers killed while k of n episodes have ended", settings, ["workflow"], records
    )
    report.write(report.flat(records), arguments.json)


if __name__ == "__main__":
    main()
