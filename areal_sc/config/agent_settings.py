"""The settings of agents: programs that call the model by its address."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from areal_sc.config.fields import setting


class AgentNetwork(StrEnum):
    """What agents can reach.

    all: whatever their worker can.
    session: the model alone, in a network of their own; it needs namespaces of the kernel.
    """

    all = "all"
    session = "session"


@dataclass
class AgentsConfig:
    """How agents run; docs/agents.md."""

    episode_timeout_s: float = setting(
        900.0, "limit of one call of an agent; late ones run once more, alone", gt=0
    )
    max_turns: int = setting(0, "most answers of the model in an episode; 0: no limit", ge=0)
    num_processes: int = setting(
        32, "processes a worker in which agents run alone; others share one", ge=1
    )
    network: AgentNetwork = setting(AgentNetwork.all)
    python: str = setting(
        "", "an interpreter that runs agents; empty: the workers' own, which has areal_sc"
    )
