"""The task of `tool_use.py`, collected from outside while the run trains.

    python examples/online.py --config configs/tool_use.yaml run_dir=runs/online
    python examples/online.py collect runs/online    # in other terminals: as often as you like

What collects is the agent of `agent.py`, as it is. A product would do the same: claim an episode,
let its agent answer, and say what that was worth.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
from agent import look_up
from tool_use import LookUp, train

from areal_sc import OnlineWorkflow, run_script

AGENTS = 64
"""So many collect beside each other."""


async def collect(client: aiohttp.ClientSession) -> None:
    """One episode after the other, until the run has ended."""
    while True:
        async with client.post("/episodes") as answer:
            episode: dict[str, Any] = await answer.json()
        if answer.status in (429, 503):  # it admits none before it has trained; no worker is there
            await asyncio.sleep(float(answer.headers.get("Retry-After", 1)))
            continue
        answer.raise_for_status()
        try:
            reward = await look_up(episode["row"], SimpleNamespace(**episode))
        except Exception as error:
            end, body = "reject", {"reason": repr(error)}
        else:
            end, body = "reward", {"reward": reward}
        # a worker that has died meanwhile answers 410: its episodes are played again
        await (await client.post(f"/episodes/{episode['id']}/{end}", json=body)).read()


async def collect_all(told: dict[str, str]) -> bool:
    """Many agents until nobody answers; False: nobody did. Args: told: by `agents.json`."""
    url, headers = told["url"].removesuffix("/v1"), {"Authorization": f"Bearer {told['key']}"}
    async with aiohttp.ClientSession(url, headers=headers) as client:
        try:
            (await client.get("/")).close()
        except aiohttp.ClientConnectionError:
            return False
        with suppress(aiohttp.ClientConnectionError):
            await asyncio.gather(*(collect(client) for _ in range(AGENTS)))
        return True


def collect_until_the_end(path: Path) -> None:
    """Collects from a run until it has ended: its `agents.json` is gone then.

    Before it has begun there is none, or one of a script that was killed, where nobody answers.
    """
    has_collected = False
    while path.exists() or not has_collected:
        with suppress(FileNotFoundError):
            has_collected |= asyncio.run(collect_all(json.loads(path.read_text())))
        time.sleep(0.5)
    print("the run has ended")


def main(argv: list[str]) -> None:
    if argv[:1] == ["collect"]:
        collect_until_the_end(Path(argv[1], "agents.json"))
    else:
        train(argv, OnlineWorkflow(), evaluation_workflow=LookUp())


if __name__ == "__main__":
    sys.exit(run_script(main))
