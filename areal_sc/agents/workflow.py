"""An agent as an episode: it calls a URL and returns a number, and what it sampled is trained.

No torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from areal_sc.agents.agent import AgentFunction, NamedAgent, check_agent, check_in_interpreter
from areal_sc.agents.command import AgentCommand
from areal_sc.agents.rows import Rewards
from areal_sc.agents.session import SessionSettings
from areal_sc.config.agent_settings import AgentNetwork
from areal_sc.config.sandbox_settings import Isolation
from areal_sc.config.schema import RolloutConfig
from areal_sc.errors import AgentError, ConfigError, WorkflowError
from areal_sc.rejection import RejectionKind
from areal_sc.rewards.base import name_of
from areal_sc.workflows.base import (
    AgentSession,
    EpisodeEngine,
    GroupReward,
    Trajectory,
    Workflow,
)

_ALONE_NEXT: Final = (RejectionKind.agent_timeout, RejectionKind.agent_died)
"""What an agent may have done to others, or others to it."""

_WITHOUT_NETWORKS: Final = (Isolation.landlock, Isolation.none)
"""Isolations in which no process has a network of its own."""


class SessionWorkflow(Workflow):
    """An episode is a session of an agent.

    Args:
        discount: of the reward, for each call before the last one; in [0, 1].
        rows, history, chat_template_arguments: see `EpisodeEngine.open_session`.
        group_reward: compares the episodes of a row when all have ended, see
            `Workflow.score_group`.
    Raises: WorkflowError: an argument is none of those.
    """

    pictures_of_rows = True

    def __init__(
        self,
        discount: float = 1.0,
        *,
        rows: str = "merge",
        history: str = "template",
        chat_template_arguments: Mapping[str, Any] | None = None,
        group_reward: GroupReward | None = None,
    ) -> None:
        if not 0 <= discount <= 1:
            raise WorkflowError(f"discount: expected a number in [0, 1], got {discount!r}")
        self.discount = discount
        self._session: dict[str, Any] = {
            "rows": rows,
            "history": history,
            "chat_template_arguments": dict(chat_template_arguments or {}),
        }
        SessionSettings(rows, history)
        self.group_reward = group_reward

    def constructor_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self.discount,), self._named_arguments()

    def _named_arguments(self) -> dict[str, Any]:
        """Of the constructor; what stands at its default is left out."""
        own = {} if self.group_reward is None else {"group_reward": self.group_reward}
        return {**self._session, **own}

    def _rows_of(self, reward: Rewards, session: AgentSession) -> list[Trajectory]:
        """Raises: WorkflowError: a reward is of no call."""
        metrics = {"accuracy": float(reward >= 1.0)} if isinstance(reward, float) else {}
        return session.trajectories(reward, discount=self.discount, metrics=metrics)


class AgentWorkflow(SessionWorkflow):
    """Trains what an agent samples that knows nothing of training.

    The agent runs in a process of its own that can be killed. It gets the row, and finds the model
    by `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`; an agent
    with a parameter `session` by `session.base_url` and `session.api_key`, and if it is async, it
    runs beside others in one process.

    Args:
        agent: a function, async or not, of a row, or of a row and a session. It returns the reward:
            a number, or several by the name of the model in its calls. Or its name, `module:name`
            or `file.py:name`, for what only workers import; or an `AgentCommand`.
        discount: of the reward, for each call before the last one; in [0, 1].
        rows, history, chat_template_arguments: see `EpisodeEngine.open_session`.
        group_reward: see `Workflow.score_group`.
    Raises: WorkflowError: there is no agent of that name, or an argument is none of those.
    """

    def __init__(
        self,
        agent: AgentFunction | AgentCommand | NamedAgent | str,
        discount: float = 1.0,
        *,
        rows: str = "merge",
        history: str = "template",
        chat_template_arguments: Mapping[str, Any] | None = None,
        group_reward: GroupReward | None = None,
    ) -> None:
        self.agent = NamedAgent.find(agent) if isinstance(agent, str) else agent
        check_agent(self.agent)
        super().__init__(
            discount,
            rows=rows,
            history=history,
            chat_template_arguments=chat_template_arguments,
            group_reward=group_reward,
        )

    def constructor_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A worker finds the agent where the script did."""
        return (self.agent, self.discount), self._named_arguments()

    async def run_episode(
        self, prompt: dict[str, Any], engine: EpisodeEngine
    ) -> list[Trajectory] | None:
        """Returns: the rows of the agent's calls.

        Their metrics are `accuracy`: 1 where the reward is one number of 1 or more; and those of
        the session. An agent that takes too long, or whose process ends, runs again alone.

        Raises: AgentError: it failed.
        """
        try:
            return await self._run_once(prompt, engine, is_alone=False)
        except AgentError as error:
            if error.kind not in _ALONE_NEXT:
                raise
        return await self._run_once(prompt, engine, is_alone=True)

    def check(self) -> None:
        if isinstance(self.agent, AgentCommand):
            self.agent.check()

    def check_row(self, row: Mapping[str, Any]) -> None:
        super().check_row(row)
        if isinstance(self.agent, AgentCommand):
            self.agent.check_row(row)

    def check_settings(self, config: RolloutConfig) -> None:
        agents, isolation = config.agents, config.sandbox.isolation
        if agents.episode_timeout_s >= config.group_timeout_s:
            raise ConfigError(
                "agents.episode_timeout_s: expected less than rollout.group_timeout_s="
                f"{config.group_timeout_s:g}, in which a late agent still ends, got "
                f"{agents.episode_timeout_s:g}"
            )
        if agents.network == AgentNetwork.session and isolation in _WITHOUT_NETWORKS:
            raise ConfigError(
                f"agents.network={agents.network}: a network of its own needs namespaces, which "
                f"rollout.sandbox.isolation={isolation} does not give: set that to auto"
            )
        if config.agents.python and not isinstance(self.agent, AgentCommand):
            check_in_interpreter(self.agent, config.agents.python)

    async def _run_once(
        self, row: dict[str, Any], engine: EpisodeEngine, *, is_alone: bool
    ) -> list[Trajectory]:
        async with engine.open_session(**self._session) as session:
            end = await engine.run_agent(self.agent, row, session, is_alone=is_alone)
            try:
                rows = await asyncio.to_thread(self._rows_of, end.reward, session)
            except WorkflowError as error:  # a reward is of no call
                message = f"agent {name_of(self.agent)}: {error}"
                raise AgentError(message, kind=RejectionKind.bad_reward) from error
            if not rows:
                raise AgentError(
                    f"agent {name_of(self.agent)}: it ended without an answer of the model: "
                    "expected calls of OPENAI_BASE_URL with OPENAI_API_KEY as they are when it is "
                    "called, so make its client inside the agent",
                    kind=RejectionKind.agent_no_call,
                )
        return [replace(one, output=end.output) for one in rows]
