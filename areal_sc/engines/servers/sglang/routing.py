"""Which server a request goes to. Plain data and rules; no I/O, no clock.

A request costs the tokens that it will sample, and a fraction of those that must be prefilled
for it. It goes where it would be through first: to the server with the least work ahead, measured
in its own seconds, so that a slow one gets less. Rows of one group have their prompt in common;
they stay together, on the server whose cache has it, while that costs no more than the wait for
about one group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

PREFILL_COST = 0.1
"""Of a prompt token, in sampled tokens: prefill is one pass over all of them."""

AFFINITY_ROWS = 8
"""Rows of work that the group's server may be ahead of the least loaded one."""

MAX_REMEMBERED_GROUPS = 4096
_NEWEST_SHARE = 0.2
"""Weight of the newest observation in a running mean."""


@dataclass(eq=False)
class ServerLoad:
    """What the router knows of one server.

    Attributes:
        name: for messages.
        max_running: requests that it may have at one time; more would queue inside it.
        is_open: it takes requests now.
        version: policy version of its weights.
        num_running: requests that it has.
        outstanding_tokens: their cost.
        seconds_per_token: that a running request waits for one of its tokens; None: not known yet.
    """

    name: str
    max_running: int
    is_open: bool = False
    version: int = 0
    num_running: int = 0
    outstanding_tokens: float = 0.0
    seconds_per_token: float | None = None


@dataclass(frozen=True)
class Work:
    """What is known of a request beforehand.

    Attributes:
        num_prompt_tokens: prompt, and what was sampled before.
        max_new_tokens: it may still sample.
        prefix_group: requests that share their prompt, or None.
        min_version: the server's weights must be at least this old a version.
    """

    num_prompt_tokens: int
    max_new_tokens: int
    prefix_group: str | None = None
    min_version: int = 0


@dataclass
class Router:
    """Chooses among servers, and keeps account of what they have.

    Attributes:
        servers: in a fixed order; the first of equals is taken.
        mean_new_tokens: running mean over finished requests; None: none has finished.
    """

    servers: list[ServerLoad]
    mean_new_tokens: float | None = None
    _group_servers: OrderedDict[str, ServerLoad] = field(default_factory=OrderedDict)

    @property
    def has_room(self) -> bool:
        return any(s.is_open and s.num_running < s.max_running for s in self.servers)

    def choose(self, work: Work) -> ServerLoad | None:
        """The server for a request, or None: every one that may take it is full or closed."""
        free = [
            server
            for server in self.servers
            if server.is_open
            and server.num_running < server.max_running
            and server.version >= work.min_version
        ]
        if not free:
            return None
        cost = self._cost(work)
        usual = self._usual_seconds_per_token()

        def finish_time(server: ServerLoad) -> float:
            return (server.outstanding_tokens + cost) * (server.seconds_per_token or usual)

        best = min(free, key=finish_time)
        home = self._group_servers.get(work.prefix_group or "")
        if home is not None and home in free:
            slack = AFFINITY_ROWS * cost * (home.seconds_per_token or usual)
            if finish_time(home) <= finish_time(best) + slack:
                return home
        return best

    def start(self, server: ServerLoad, work: Work) -> float:
        """Accounts for a request that goes to the server; returns its cost, for `finish`."""
        cost = self._cost(work)
        server.num_running += 1
        server.outstanding_tokens += cost
        if work.prefix_group is not None:
            self._group_servers[work.prefix_group] = server
            self._group_servers.move_to_end(work.prefix_group)
            while len(self._group_servers) > MAX_REMEMBERED_GROUPS:
                self._group_servers.popitem(last=False)
        return cost

    def finish(self, server: ServerLoad, cost: float) -> None:
        """Takes a request off the server, however it ended."""
        server.num_running -= 1
        server.outstanding_tokens = max(0.0, server.outstanding_tokens - cost)
        if server.num_running == 0:
            server.outstanding_tokens = 0.0  # no rounding error stays

    def observe(self, server: ServerLoad, num_new_tokens: int, seconds: float) -> None:
        """Learns from a request that ran to its end without interruption."""
        if num_new_tokens == 0:
            return
        server.seconds_per_token = _running_mean(server.seconds_per_token, seconds / num_new_tokens)
        self.mean_new_tokens = _running_mean(self.mean_new_tokens, num_new_tokens)

    def forget(self, server: ServerLoad) -> None:
        """The server starts anew: its cache is empty and its speed unknown."""
        server.seconds_per_token = None
        self._group_servers = OrderedDict(
            (group, home) for group, home in self._group_servers.items() if home is not server
        )

    def _cost(self, work: Work) -> float:
        expected = float(work.max_new_tokens)
        if self.mean_new_tokens is not None:
            expected = min(expected, self.mean_new_tokens)
        return expected + PREFILL_COST * work.num_prompt_tokens

    def _usual_seconds_per_token(self) -> float:
        return _mean([s.seconds_per_token for s in self.servers if s.seconds_per_token is not None])


def _running_mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _NEWEST_SHARE * (value - mean)


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else 1.0
