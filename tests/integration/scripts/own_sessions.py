"""A user's workflow that opens sessions by itself."""

from __future__ import annotations

from typing import Any

from integration.scripts import agents

from areal_sc import Trajectory, Workflow
from areal_sc.workflows.base import EpisodeEngine


class OpensASession(Workflow):
    """Does by itself what an agent would."""

    async def run_episode(
        self, prompt: dict[str, Any], engine: EpisodeEngine
    ) -> list[Trajectory] | None:
        async with engine.open_session(max_turns=8) as session:
            end = await engine.run_agent(agents.does, prompt, session, is_alone=True)
            assert isinstance(end.reward, float)
            return session.trajectories(end.reward, discount=0.9)
