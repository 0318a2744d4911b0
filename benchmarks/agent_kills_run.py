"""The job of `examples/tool_use.py` by agents who keep books; a part of `agent_kills.py`.

    python agent_kills_run.py inside --config configs/tool_use.yaml ...     agents of the run
    python agent_kills_run.py outside --config configs/tool_use.yaml ...    agents outside
    python agent_kills_run.py collect RUN_DIR                               such agents
    python agent_kills_run.py <run id> <SchedulerConfig as JSON>            a node agent

Beside the books of `chaos_run.py`, whose trained rows name the answers here that they train:

    calls-<pid>     an agent begins a call
    answers-<pid>   an agent has the whole answer of a call
    returns-<pid>   an agent has decided on the reward of an episode
    sessions-<pid>  a rollout worker has opened, or ended, a session
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import aiohttp
from chaos_run import BOOKS, note, start_workers_by
from tool_use import TOOL, Keys, warm_up

from areal_sc import AgentWorkflow, OnlineWorkflow
from areal_sc.token_fields import TensorMetadata

NUM_AGENTS: Final = 16
"""So many collect beside each other in a process outside."""

CUT_SHARE: Final = 0.1
"""Of the calls, those whose connection the client closes at a random moment, and tries again."""

CUT_WITHIN_S: Final = 0.1
COMES_AGAIN_S: Final = 0.1
GIVES_UP_S: Final = 120.0
RETRY_COUNT: Final = "x-stainless-retry-count"


TURN: Final = {"turn": TensorMetadata(dtype="int32")}
"""At each trained token the answer that it is of, see `turn_of`; 0 elsewhere."""


class Inside(AgentWorkflow):
    fields = TURN


class Outside(OnlineWorkflow):
    fields = TURN


class EpisodeLost(Exception):
    """The episode has ended without its agent."""


def turn_of(answer_id: str) -> int:
    """A number of an answer that a row's field holds: almost surely another one in the episode."""
    return int(answer_id.rpartition("-")[2][:8], 16) >> 1 or 1


async def look_up(row: dict[str, Any], session: Any) -> float:
    """An agent of the run."""
    return await play(row, session.base_url, session.api_key)


async def play(row: dict[str, Any], base_url: str, key: str) -> float:
    """One call of the tool, and the answer; 1 for the right digit, else 0."""
    rng = random.Random(key)
    episode = key.rpartition("-")[0]
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["question"]}]
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as client:

        async def ask() -> dict[str, Any]:
            body = {"model": "policy", "messages": messages, "tools": [TOOL]}
            body["stream"] = rng.random() < 0.5
            note("calls", [{"session": episode}])
            async with asyncio.timeout(GIVES_UP_S):
                for number in range(1 << 20):
                    is_cut = number == 0 and rng.random() < CUT_SHARE
                    try:
                        async with asyncio.timeout(
                            rng.uniform(0, CUT_WITHIN_S) if is_cut else None
                        ):
                            told, message = await post(body, number)
                    except (aiohttp.ClientError, OSError, TimeoutError):
                        await asyncio.sleep(COMES_AGAIN_S)
                        continue
                    if message is not None:
                        note("answers", [{"session": episode, "turn": turn_of(told)}])
                        return message
                    await asyncio.sleep(COMES_AGAIN_S)
            raise AssertionError

        async def post(body: dict[str, Any], number: int) -> tuple[str, dict[str, Any] | None]:
            url, again = f"{base_url}/chat/completions", {RETRY_COUNT: str(number)}
            async with client.post(url, json=body, headers=again) as answer:
                if answer.status in (409, 410):
                    raise EpisodeLost(await answer.text())
                if answer.status in (429, 503):
                    return "", None
                assert answer.status == 200, await answer.text()
                if not body["stream"]:
                    told = await answer.json()
                    return told["id"], told["choices"][0]["message"]
                return streamed(await answer.text())

        message = await ask()
        calls = message.get("tool_calls") or []
        if calls:
            messages.append(message)
            for call in calls:
                asked = json.loads(call["function"]["arguments"]).get("key")
                found = row["table"].get(asked, "none") if isinstance(asked, str) else "none"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": found})
            message = await ask()
    value = float(bool(calls) and message["content"] == row["table"][row["key"]])
    note("returns", [{"session": episode, "value": value}])
    return value


def streamed(text: str) -> tuple[str, dict[str, Any] | None]:
    """Id and message of a stream; None: it has broken off."""
    pieces = [it.removeprefix("data: ") for it in text.split("\n\n") if it]
    if not pieces or pieces[-1] != "[DONE]":
        return "", None
    chunks = [json.loads(it) for it in pieces[:-1]]
    deltas = [choice["delta"] for it in chunks for choice in it["choices"]]
    message: dict[str, Any] = {"role": "assistant"}
    message["content"] = "".join(it.get("content") or "" for it in deltas)
    if calls := [call for it in deltas for call in it.get("tool_calls", ())]:
        message["tool_calls"] = calls
    return chunks[0]["id"], message


async def collect(run_dir: Path) -> None:
    """Plays episodes of a run until it has ended, however often its address goes and comes."""
    async with aiohttp.ClientSession() as client:
        await asyncio.gather(*(collect_one(client, run_dir) for _ in range(NUM_AGENTS)))


async def collect_one(client: aiohttp.ClientSession, run_dir: Path) -> None:
    while not (run_dir / "summary.json").exists():
        try:
            told = json.loads((run_dir / "agents.json").read_text())
            headers = {"Authorization": f"Bearer {told['key']}"}
            url = told["url"].removesuffix("/v1")
            async with client.post(f"{url}/episodes", headers=headers) as answer:
                episode = await answer.json() if answer.status == 200 else None
            if episode:
                value = await play(episode["row"], episode["base_url"], episode["api_key"])
                await reward(client, f"{url}/episodes/{episode['id']}/reward", headers, value)
                continue
        except (EpisodeLost, aiohttp.ClientError, OSError, ValueError):
            pass
        await asyncio.sleep(COMES_AGAIN_S)


async def reward(client: Any, url: str, headers: dict[str, str], value: float) -> None:
    """Says it until somebody has heard it: taken (409, if an answer was lost), or lost."""
    async with asyncio.timeout(GIVES_UP_S):
        while True:
            try:
                async with client.post(url, headers=headers, json={"reward": value}) as answer:
                    if answer.status in (200, 409, 410):
                        return
                    assert answer.status == 503, await answer.text()
            except (aiohttp.ClientError, OSError):
                pass
            await asyncio.sleep(COMES_AGAIN_S)


def run_worker(spec_dict: dict[str, Any]) -> int:
    """A worker that keeps books, and marks each trained token with the answer it is of."""
    import chaos_run
    import numpy as np

    from areal_sc.agents import rows, server, session

    numbers = WeakKeyDictionary[Any, int]()
    trained_of, transcript_of = session._trained, rows.transcript_of
    open_session = server.AgentServer.open

    def numbered(calls: Any) -> Any:
        found = trained_of(calls)
        numbers.update({it.node: turn_of(it.answer_id) for it in found})
        return found

    def marked(path: Any, trained: Any) -> Any:
        row, turns = transcript_of(path, trained), list[int]()
        for node in path:
            turns += [0] * len(node.context)
            number = numbers[node] if node in trained else 0
            turns += [number] * len(node.completion.token_ids)
        make = row.trajectory
        field = {"turn": np.array(turns, np.int32)}
        row.trajectory = lambda *given: replace(make(*given), fields=field)
        return row

    @asynccontextmanager
    async def booked_open(*given: Any, **named: Any) -> Any:
        async with open_session(*given, **named) as it:
            note("sessions", [{"session": it.api_key.rpartition("-")[0], "is_open": True}])
            try:
                yield it
            finally:
                note("sessions", [{"session": it.api_key.rpartition("-")[0], "is_open": False}])

    session._trained, rows.transcript_of = numbered, marked
    server.AgentServer.open = booked_open  # type: ignore[method-assign]
    return chaos_run.run_worker(spec_dict)


def main(argv: list[str]) -> None:
    from areal_sc import GRPOConfig, PPOTrainer, load_config

    start_workers_by(__file__)
    config = load_config(argv[1:], GRPOConfig, makes_model=True)
    with PPOTrainer(config) as trainer:
        if not Path(config.actor.path, "config.json").is_file():
            warm_up(config.actor, config.task["warm_up_steps"], config.seed, trainer.scheduler)
        workflow = Inside(look_up) if argv[0] == "inside" else Outside()
        trainer.fit(workflow, Keys(config.seed))


if __name__ == "__main__":
    if sys.argv[1] == "collect":
        asyncio.run(collect(Path(sys.argv[2])))
    elif sys.argv[1] in ("inside", "outside"):
        from areal_sc import run_script

        sys.exit(run_script(main))
    else:
        from areal_sc.nodes import agent

        assert BOOKS in os.environ
        sys.exit(agent.main(target="agent_kills_run:run_worker"))
