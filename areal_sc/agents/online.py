"""Agents outside as episodes: a product, a browser or a person collects while the run trains.

No torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from areal_sc.agents.agent import as_json
from areal_sc.agents.workflow import SessionWorkflow
from areal_sc.workflows.base import EpisodeEngine, Trajectory


class OnlineWorkflow(SessionWorkflow):
    """Trains what agents outside sample, which claim episodes at the address of the run.

    An episode waits until somebody claims it, by `POST /episodes`. Whoever does gets its row of the
    data, calls the model, and tells the reward. An episode that is rejected, or left alone, is not
    trained.

    Args, errors: see `SessionWorkflow`.
    """

    waits_outside = True

    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> list[Trajectory]:
        """Returns: the rows of the agent's calls; their metrics are those of an `AgentWorkflow`.

        Raises: AgentError: the agent has rejected the episode, or has left it alone.
        """
        async with engine.open_session(**self._session) as session:
            reward = await engine.await_agent(prompt, session)
            return await asyncio.to_thread(self._rows_of, reward, session)

    def check_row(self, row: Mapping[str, Any]) -> None:
        super().check_row(row)
        as_json(row, "an agent outside")
