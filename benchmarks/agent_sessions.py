"""Many agents beside each other, at the address of one worker.

    python benchmarks/agent_sessions.py               1,000 agents of 8 turns, 2,000 tokens a call
    python benchmarks/agent_sessions.py --quick       50 agents of 3 turns

Then 20,000 episodes of 2 turns, and what memory the process has after a tenth of them and after
all.

Clients are a process of their own. The engine takes a fixed time and answers what it is told to, so
that what is measured is the worker's own work: HTTP, JSON, messages, tokens, rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import aiohttp
import chat_turns
import report
from planes_role import resident_bytes

from areal_sc.agents.server import AgentServer
from areal_sc.agents.session import Session, SessionSettings
from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion

DELAY_S = 0.2
THINK_S = (0.2, 2.0)
LOOK_S = 0.02
PARTS = 20


class DelayedEngine:
    """Gives the same answer, after a time."""

    def __init__(self, tokenizer: Any, answer: str) -> None:
        self.tokenizer = tokenizer
        self.max_context_tokens = 1 << 20
        self.end_token_ids = (tokenizer.eos_token_id,)
        self._tokens = tokenizer.encode(answer, add_special_tokens=False)

    async def generate(
        self, input_ids: Sequence[int], sampling: GenerationConfig | None = None, **_: Any
    ) -> Completion:
        await asyncio.sleep(DELAY_S)
        size = len(self._tokens)
        return Completion(self._tokens, [-1.0] * size, [0] * size, "stop", 1.0)


async def lateness(found: list[float]) -> None:
    """How much later than it asked for the event loop goes on, in seconds."""
    while True:
        due = time.perf_counter() + LOOK_S
        await asyncio.sleep(LOOK_S)
        found.append(time.perf_counter() - due)


async def play(
    pool: Executor,
    server: AgentServer,
    engine: DelayedEngine,
    num_agents: int,
    turns: int,
    think: bool,
) -> report.Metrics:
    """What the calls of so many agents cost, from the first to the last, and their rows then."""
    sampling = GenerationConfig(max_new_tokens=100)
    async with contextlib.AsyncExitStack() as stack:
        sessions: list[Session] = [
            await stack.enter_async_context(server.open(engine, sampling, SessionSettings()))
            for _ in range(num_agents)
        ]
        keys = [it.api_key for it in sessions]
        told = {"url": sessions[0].base_url, "keys": keys, "turns": turns, "think": think}
        late = list[float]()
        watch = asyncio.create_task(lateness(late))
        begun_s = time.process_time()
        clients = asyncio.get_running_loop().run_in_executor(pool, be_clients, told)
        num_refused = await clients
        calls_s = time.process_time() - begun_s
        watch.cancel()
        late.sort()
        begun_s = time.process_time()
        rows = [row for it in sessions for row in it.trajectories(1.0)]
        rows_s = time.process_time() - begun_s
    assert len(rows) == num_agents
    num_calls = sum(int(row.metrics["agent/calls"]) for row in rows)
    return {
        "calls": num_calls,
        "refused": num_refused,
        "call_cpu_ms": 1e3 * calls_s / num_calls,
        "rows_cpu_a_call_ms": 1e3 * rows_s / num_calls,
        "late_p99_ms": 1e3 * late[int(0.99 * len(late))],
        "late_most_ms": 1e3 * late[-1],
    }


def be_clients(told: dict[str, Any]) -> int:
    """In the clients' process."""
    return asyncio.run(ask_all(**told))


async def ask_all(url: str, keys: Sequence[str], turns: int, think: bool) -> int:
    """Plays one agent a key; returns how many of their calls were refused."""
    text = " ".join(random.Random(0).choices(WORDS, k=400))
    pool = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=pool) as client:

        async def agent(number: int, key: str) -> int:
            rng, num_refused = random.Random(number), 0
            messages: list[Any] = [{"role": "user", "content": f"{number} {text} {text} {text}"}]
            for _ in range(turns):
                if think:
                    await asyncio.sleep(rng.uniform(*THINK_S))
                async with client.post(
                    f"{url}/chat/completions",
                    json={"model": "policy", "messages": messages},
                    headers={"Authorization": f"Bearer {key}"},
                ) as response:
                    body = await response.json()
                    num_refused += response.status != 200
                messages += [body["choices"][0]["message"], {"role": "user", "content": text}]
            return num_refused

        return sum(await asyncio.gather(*[agent(n, key) for n, key in enumerate(keys)]))


WORDS = [
    "".join(random.Random(seed).choices("etaoinshrdlu", k=2 + seed % 6)) for seed in range(500)
]


async def growth(
    pool: Executor, server: AgentServer, engine: DelayedEngine, num_episodes: int
) -> report.Metrics:
    """The memory of this process after so many episodes, and over that after a tenth of them."""
    found = list[int]()
    for _ in range(PARTS):
        await play(pool, server, engine, num_episodes // PARTS, turns=2, think=False)
        found.append(resident_bytes())
    return {
        "resident_bytes": float(found[-1]),
        "resident_growth": found[-1] / found[PARTS // 10 - 1],
    }


async def measure(pool: Executor, num_agents: int, turns: int, num_episodes: int) -> report.Metrics:
    tokenizer = chat_turns.make_tokenizer(" ".join(WORDS))
    answer = " ".join(random.Random(1).choices(WORDS, k=60)) + "<|end|>"
    engine, server = DelayedEngine(tokenizer, answer), AgentServer("rollout/0")
    gc.collect()
    gc.freeze()  # as the fork server of workers does it after its imports
    metrics: report.Metrics = {}
    for name, num_turns, think in (("thinking", turns, True), ("at_once", 1, False)):
        found = await play(pool, server, engine, num_agents, num_turns, think)
        metrics |= {f"{name}_{metric}": value for metric, value in found.items()}
    metrics |= await growth(pool, server, engine, num_episodes)
    await server.close()
    return metrics


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--episodes", type=int, default=20_000)
    arguments = report.parse(parser, agents=50, turns=3, episodes=40)
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        pool.submit(gc.collect).result()  # its process begins while this one has no threads
        how = arguments.agents, arguments.turns, arguments.episodes
        metrics = asyncio.run(measure(pool, *how))
    settings = {"agents": arguments.agents, "turns": arguments.turns}
    report.print_metrics("Agents beside each other", settings, metrics)
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
