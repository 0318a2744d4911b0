"""The settings of agents: programs that call the model by its address."""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from areal_sc.config.fields import setting
from areal_sc.errors import ConfigError

LOOPBACK: Final = "127.0.0.1"


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
    idle_timeout_s: float = setting(
        300.0, "an agent outside that neither calls nor rewards for so long loses its episode", gt=0
    )
    max_turns: int = setting(0, "most answers of the model in an episode; 0: no limit", ge=0)
    num_processes: int = setting(
        32, "processes a worker in which agents run alone; others share one", ge=1
    )
    network: AgentNetwork = setting(AgentNetwork.all)
    python: str = setting(
        "", "an interpreter that runs agents; empty: the workers' own, which has areal_sc"
    )
    bind: str = setting(
        "",
        "IP address, or ADDRESS:PORT, of the run's address for agents outside; empty: a free port "
        "of 127.0.0.1, for workflows that wait for such agents",
    )

    def bound(self) -> tuple[str, int]:
        """IP address and port of `bind`; port 0: any free one.

        Raises: ConfigError: it is neither an IP address nor one with a port.
        """
        if not self.bind:
            return LOOPBACK, 0
        host, _, port = self.bind.rpartition(":")
        for address, number in ((self.bind, "0"), (host, port)):
            with suppress(ValueError):
                if number.isdecimal() and int(number) < 1 << 16:
                    return str(ipaddress.ip_address(address.strip("[]"))), int(number)
        raise ConfigError(
            "agents.bind: expected an IP address of this machine, or ADDRESS:PORT, "
            f"[ADDRESS]:PORT of IPv6, got {self.bind!r}"
        )
