"""Servers that die or hang in the middle of answers, and come back."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from integration.sglang.policies import Generating, Policies

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.process import (
    ServerProcess,
    mapped_files,
    read_process,
    session_members,
)
from areal_sc.engines.servers.replica import Replica
from areal_sc.engines.servers.sglang.handle import SGLangEngine
from areal_sc.engines.weight_group import NamedTensor

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

Until = Callable[[Callable[[], bool]], Awaitable[None]]
LONG = GenerationConfig(max_new_tokens=900)
PROMPTS = [[5 + i, 6, 7 + i] for i in range(16)]


@dataclass(frozen=True)
class Scene:
    """Answers run on both servers, one of which is about to fail.

    Attributes:
        before: the engine's counters.
        server: the victim's processes.
    """

    tasks: list[asyncio.Task[Completion]]
    before: Mapping[str, float]
    victim: Replica
    other: Replica
    server: ServerProcess


async def set_scene(
    engine: ServerEngine, until: Until, generating: Generating, victim: int = 0
) -> Scene:
    """Starts the answers; the server of that number is the one to fail."""
    both = engine.replicas
    tasks = await generating(
        lambda: [asyncio.create_task(engine.generate(prompt, LONG)) for prompt in PROMPTS]
    )
    assert all(replica.num_running > 0 for replica in both)
    server = both[victim].server
    assert server
    return Scene(tasks, engine.stats(), both[victim], both[1 - victim], server)


async def check_after_loss(
    engine: ServerEngine,
    policies: Policies,
    until: Until,
    scene: Scene,
) -> None:
    """All answers are whole; weights may change meanwhile; the server comes back with them."""
    version = policies.add()
    await engine.update_weights(version, policies.source(version))
    assert engine.version == version
    answers = await asyncio.gather(*scene.tasks)
    policies.check_all(PROMPTS, answers)
    assert all(len(answer.token_ids) == LONG.max_new_tokens for answer in answers)
    victim = scene.victim
    await until(lambda: victim.is_open)
    assert victim.version == version
    before = victim.busy.answer_s
    answers = await asyncio.gather(
        *(engine.generate(prompt, GenerationConfig(max_new_tokens=60)) for prompt in PROMPTS)
    )
    assert victim.busy.answer_s > before, "it is used again"
    policies.check_all(PROMPTS, answers)
    assert all(set(answer.versions) == {version} for answer in answers)


async def test_a_server_that_dies_between_two_buckets(
    engine: ServerEngine,
    policies: Policies,
    until: Until,
    generating: Generating,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other one gets its weights all the same, and goes on with all answers."""
    scene = await set_scene(engine, until, generating)
    processes = session_members(scene.server.pid)
    (loads,) = mapped_files(scene.server.pid, SGLangEngine.left_files)
    running = scene.victim.num_running
    fill = engine._buckets._fill

    def kill_and_fill(bucket: Sequence[NamedTensor], number: int) -> Any:
        if number == 2:
            os.kill(scene.server.pid, signal.SIGKILL)
            while read_process(scene.server.pid) is not None:
                time.sleep(0.01)
        return fill(bucket, number)

    monkeypatch.setattr(engine._buckets, "_fill", kill_and_fill)
    version = policies.add()
    await engine.update_weights(version, policies.source(version))
    monkeypatch.undo()
    assert scene.other.version == version
    assert scene.other.is_open
    await until(lambda: engine.stats()["lost_requests"] - scene.before["lost_requests"] >= running)
    await check_after_loss(engine, policies, until, scene)
    after = engine.stats()
    assert after["lost_servers"] - scene.before["lost_servers"] == 1
    assert after["server_restarts"] - scene.before["server_restarts"] == 1
    assert not any(read_process(pid) for pid in processes)  # nothing of it is left
    assert not loads.exists()


async def test_a_stopped_scheduler(
    engine: ServerEngine, policies: Policies, until: Until, generating: Generating
) -> None:
    """Its HTTP process goes on answering; only the scheduler is silent."""
    scene = await set_scene(engine, until, generating, victim=1)
    (scheduler,) = scene.server.schedulers
    os.kill(scheduler, signal.SIGSTOP)
    await until(lambda: engine.stats()["serving_servers"] == 1)
    why = rf"hung: it has not answered for .* s, and its process {scheduler} is stopped"
    assert re.fullmatch(why, scene.victim.failure)
    await check_after_loss(engine, policies, until, scene)
    assert engine.stats()["lost_servers"] - scene.before["lost_servers"] == 1
    assert read_process(scheduler) is None


async def test_a_slow_answer_is_no_failure(engine: ServerEngine, until: Until) -> None:
    """A server that is paused for longer than a hung one may be silent is left alone."""
    lost = engine.stats()["lost_servers"]
    running = asyncio.create_task(engine.generate([5, 6], LONG))
    await until(lambda: engine.stats()["running_requests"] == 1)
    await engine.pause()
    await asyncio.sleep(
        engine._config.sglang.hung_after_s + 2 * engine._config.sglang.probe_interval_s
    )
    assert all(replica.is_paused for replica in engine.replicas)
    await engine.resume()
    assert len((await running).token_ids) == LONG.max_new_tokens
    assert engine.stats()["lost_servers"] == lost
