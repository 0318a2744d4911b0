"""Rewards that look for what is not theirs. This file also runs them, as whoever executes it.

python apart_rewards.py LAYER FOLDER      prints what each came to, as JSON
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from areal_sc.config.sandbox_settings import SandboxConfig
from areal_sc.errors import RewardError
from areal_sc.rewards.base import declare_reward
from areal_sc.rewards.pool import RewardPool
from areal_sc.rewards.running import CodeRunner
from areal_sc.system import stacks
from areal_sc.system.fork_server import ForkServer

LIMIT_S = 100.0
"""Far above what a reward takes, for a machine that is busy with other work."""


def looks(prompt: dict[str, Any], completion: str) -> float:
    """Raises what it finds."""
    raise ValueError(json.dumps(list(map(_outcome, prompt["attempts"]))))


@declare_reward(network=False)
def looks_offline(prompt: dict[str, Any], completion: str) -> float:
    return looks(prompt, completion)


@declare_reward(read=["/proc/version"])
def looks_narrowly(prompt: dict[str, Any], completion: str) -> float:
    return looks(prompt, completion)


def leaves_a_daemon(prompt: dict[str, Any], completion: str) -> float:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path(prompt["begun"]).write_text("")
            time.sleep(1000)
        os._exit(0)
    while not Path(prompt["begun"]).exists():
        time.sleep(0.01)
    return 1.0


def is_killed_once(prompt: dict[str, Any], completion: str) -> float:
    try:
        Path(prompt["mark"]).touch(exist_ok=False)
    except FileExistsError:
        return 0.75
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@declare_reward(late_reward=0.25, late_after_s=0.2)
def computes_long(prompt: dict[str, Any], completion: str) -> float:
    while True:
        pass


def hangs(prompt: dict[str, Any], completion: str) -> float:
    time.sleep(1000)
    return 1.0


def _outcome(attempt: str) -> str:
    names = {"os": os, "socket": socket, "open": open, "multiprocessing": multiprocessing}
    try:
        return str(eval(attempt, names))
    except (OSError, ValueError) as error:
        return type(error).__name__


async def main(layer: str, folder: Path, victim: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What came of each reward."""
    run, free = folder / "run", folder / "free"
    server = ForkServer("areal_sc.rewards.process:run_reward_process")
    pool = RewardPool(
        server,
        num_processes=1,
        timeout_s=LIMIT_S,
        log_path=run / "reward.log",
        sources=run / "sources",
        run_code=CodeRunner(SandboxConfig()),
        isolation=layer,
        hides=[run, folder / "memory"],
    )
    told: dict[str, Any] = {}

    async def score(name: str, reward: Any, **prompt: Any) -> None:
        try:
            told[name] = await pool.score(reward, prompt, "")
        except RewardError as error:
            told[name] = f"{error}\n{error.frames}"

    attempts = {
        "keys": f"open({str(run / 'keys.json')!r}).read()",
        "memory": f"open({str(folder / 'memory' / 'block')!r}).read()",
        "keys from here": f"os.chdir({str(run)!r}) or open('keys.json').read()",
        "writes into the run": f"open({str(run / 'new')!r}, 'w').write('x')",
        "own sources": f"open({str(run / 'sources' / '0.json')!r}).read()",
        "signal": f"os.kill({victim.pid}, 0) or 'sent'",
        "environment of the run": f"open('/proc/{os.getpid()}/environ').read() and 'seen'",
        "other files": f"open({str(free / 'data.txt')!r}).read()",
        "writes elsewhere": f"open({str(free / 'new')!r}, 'w').write('x')",
        "own environment": "os.environ['TOKEN']",
        "network": "socket.socket() and 'open'",
        "descriptors": "sum(os.path.exists(f'/proc/self/fd/{fd}') for fd in range(4, 99))",
    }
    try:
        for reward in (looks, looks_offline, looks_narrowly):
            await score(reward.__name__, reward, attempts=list(attempts.values()))
            text = told[reward.__name__]
            if "ValueError: [" in text:
                found = json.loads("[" + text.split("ValueError: [", 1)[1].split("\n")[0])
                told[reward.__name__] = dict(zip(attempts, found, strict=True))
        told["layer"], told["folder"] = pool.isolation, str(folder)
        await score("killed", is_killed_once, mark=str(free / "mark"))
        await score("long", computes_long)
        await score("daemon", leaves_a_daemon, begun=str(free / "begun"))
        pool._timeout_s = 5.0
        stacks.WAIT_S = LIMIT_S  # type: ignore[misc]
        await score("hangs", hangs)
        told["victim"] = victim.poll()
    finally:
        await pool.close()
        await server.close()
    return told


def make(folder: Path) -> None:
    """The files of a run, and one beside it."""
    for name in ("run/sources/0.json", "run/keys.json", "memory/block", "free/data.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("data" if "data" in name or "0" in name else "SECRET")


if __name__ == "__main__":
    make(Path(sys.argv[2]))
    sys.path.insert(0, str(Path(__file__).parent))
    import apart_rewards  # rewards are found by a module's name

    victim = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        print(json.dumps(asyncio.run(apart_rewards.main(sys.argv[1], Path(sys.argv[2]), victim))))
    finally:
        victim.kill()
