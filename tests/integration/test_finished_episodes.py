"""A worker dies while some episodes of a group have ended: these are not played again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from integration.held_episodes import kill_at
from integration.run_process import LIMIT_S, PATIENT
from integration.scripts import agents, episodes

from areal_sc import AgentWorkflow, GRPOConfig, SingleTurnWorkflow, Workflow
from areal_sc.schedulers.base import Scheduler

FREE = (0, 3, 7)
"""How many of eight have ended; benchmarks/episode_kills.py has all numbers."""

PLAYED = {
    "one turn": SingleTurnWorkflow(episodes.by_letters),
    "two turns": episodes.TwoTurns(),
    "agents": AgentWorkflow(agents.does),
    "what a group shares": episodes.Shares(episodes.by_letters),
}


@pytest.mark.parametrize("played", PLAYED.values(), ids=PLAYED)
async def test_what_has_ended_is_not_played_again(
    played: Workflow,
    tiny_config: Callable[..., GRPOConfig],
    scheduler: Scheduler,
    chat_model: Path,
    tmp_path: Path,
) -> None:
    config = tiny_config(
        *(f"actor.path={chat_model}", "rollout.group_size=8", "rollout.max_staleness=0", *PATIENT),
        *(f"rollout.train_batch_groups={len(FREE)}", "rollout.max_concurrent_groups=1"),
        "rollout.max_episode_tokens=256",
    )
    async with asyncio.timeout(LIMIT_S):
        kills = await kill_at(config, scheduler, played, FREE, tmp_path / "rows", does="answers")
    kills.check()
    assert kills.num_left == 0
    assert kills.shared_bytes == (len(FREE) * 100_000 if played.fields else 0), "once a group"
