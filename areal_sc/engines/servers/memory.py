"""The share of a GPU's memory that a server takes for parameters and KV cache together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from areal_sc.errors import ConfigError
from areal_sc.sizing.worker_plan import HOST, RunPlan, format_bytes

_STEPS = 100
"""A share is proposed in hundredths."""


@dataclass(frozen=True)
class MemoryShare:
    """The argument of a kind of server that sets the share.

    Attributes:
        section: of the settings of the servers' program.
        argument: its name on the command line.
        default: about what the program takes by itself.
    """

    section: str
    argument: str
    default: float

    @property
    def setting(self) -> str:
        return f"{self.section}.args.{self.argument.replace('-', '_')}"

    def kv_bytes(
        self, given: Mapping[str, str], device: str, memory: int, parameter_bytes: int
    ) -> int:
        """What is left of it beside the parameters.

        Args:
            given: the server's arguments.
            memory: of the device, in bytes.
        Raises: ConfigError: it is no share, or does not even hold the parameters.
        """
        share = self._of(given)
        left = int(share * memory) - parameter_bytes
        if left >= 0:
            return left
        raise ConfigError(
            f"{self.setting}: {share:g} of what is free on {device} "
            f"({format_bytes(memory)}) does not hold the parameters of a server "
            f"({format_bytes(parameter_bytes)}), and it has to hold the KV cache, too; "
            "set a larger share or servers.tp_size; or let more ranks train, which need less each"
        )

    def way_out(self, plan: RunPlan) -> str | None:
        """Which share would fit, as `GeneratorHandle.way_out`."""
        if plan.takes_turns:  # it is not the server that has too little room
            return None
        shares = [_largest_share(plan, place) for place in plan.short_places]
        known = [share for share in shares if share is not None]
        if not known:
            return None
        return f"{self.setting} may be at most {min(known):g} beside all else on that device"

    def _of(self, given: Mapping[str, str]) -> float:
        text = given.get(self.argument, str(self.default))
        try:
            share = float(text)
        except ValueError:
            share = math.nan
        if not 0 < share < 1:
            raise ConfigError(f"{self.setting}: expected a number above 0 and below 1, got {text}")
        return share


def _largest_share(plan: RunPlan, place: str) -> float | None:
    """The share that each server on a device may take, all else staying.

    None: there are none, or not even their parameters have room.
    """
    memory = plan.available_bytes.get(place)
    servers = [w for w in plan.workers if w.role == "server" and w.device == place]
    if place == HOST or not servers or memory is None:
        return None
    used = sum(server.memory[place] for server in servers)
    free = memory - (plan.needed_bytes[place] - used)
    steps = min(_STEPS // len(servers), _STEPS - 1)
    if steps * free < _STEPS * max(server.parameter_bytes for server in servers):
        return None
    return steps / _STEPS
