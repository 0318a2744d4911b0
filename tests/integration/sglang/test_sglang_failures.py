"""Servers that die or hang in the middle of answers, and end their engine; and slow ones."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from integration.sglang.policies import Answers, Generating, Policies
from waiting import until

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.process import (
    ServerProcess,
    mapped_files,
    read_process,
    session_members,
)
from areal_sc.errors import EngineFailed
from areal_sc.weights.group import NamedTensor

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

LONG = GenerationConfig(max_new_tokens=900)
PROMPTS = [[5 + i, 6, 7 + i] for i in range(16)]


class Victim:
    """A server that is about to fail, while answers run on it."""

    def __init__(self, engine: ServerEngine, tasks: Answers) -> None:
        assert engine.server.process
        self.process: ServerProcess = engine.server.process
        self._engine = engine
        self._tasks = tasks
        self._members = session_members(self.process.pid)
        self._shared = mapped_files(self.process.pid, engine._handle.session_files)

    @classmethod
    async def find(cls, engine: ServerEngine, generating: Generating) -> Victim:
        tasks = await generating(
            lambda: [asyncio.create_task(engine.generate(prompt, LONG)) for prompt in PROMPTS]
        )
        return cls(engine, tasks)

    async def check_loss(self, why: str) -> None:
        """All that it has to answer fails, and nothing of it is left."""
        lost = rf"the server of \S+ at {re.escape(self._engine.server.url)} is lost: {why}"
        assert re.fullmatch(lost, await self._engine.wait_until_lost())
        late = self._engine.generate(PROMPTS[0], LONG)
        for outcome in await asyncio.gather(*self._tasks, late, return_exceptions=True):
            if isinstance(outcome, Completion):  # it was complete before
                assert len(outcome.token_ids) == LONG.max_new_tokens
            else:
                assert isinstance(outcome, EngineFailed)
                assert re.fullmatch(lost, str(outcome))
        assert isinstance(outcome, EngineFailed), "the late one"
        await until(lambda: not any(map(read_process, self._members)))
        assert self._shared
        assert not any(map(Path.exists, self._shared))


async def test_a_server_that_dies_between_two_buckets(
    doomed: ServerEngine,
    policies: Policies,
    generating_there: Generating,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    victim = await Victim.find(doomed, generating_there)
    pid, fill = victim.process.pid, doomed._buckets._fill

    def kill_and_fill(bucket: Sequence[NamedTensor], number: int) -> Any:
        if number == 2:
            os.kill(pid, signal.SIGKILL)
            while read_process(pid) is not None:
                time.sleep(0.01)
        return fill(bucket, number)

    monkeypatch.setattr(doomed._buckets, "_fill", kill_and_fill)
    with pytest.raises(EngineFailed, match="is lost: its weight update to version 1 failed"):
        await doomed.update_weights(1, policies.source(0))
    await victim.check_loss(".*")


async def test_a_stopped_scheduler(doomed: ServerEngine, generating_there: Generating) -> None:
    """Its HTTP process goes on answering; only the scheduler is silent."""
    victim = await Victim.find(doomed, generating_there)
    (scheduler,) = victim.process.schedulers
    os.kill(scheduler, signal.SIGSTOP)
    why = rf"hung: it has not answered for .* s, and its process {scheduler} is stopped"
    await victim.check_loss(why)


async def test_a_slow_answer_is_no_failure(engine: ServerEngine) -> None:
    """A server that is paused for longer than a hung one may be silent is left alone."""
    running = asyncio.create_task(engine.generate([5, 6], LONG))
    await until(lambda: engine.stats()["running_requests"] == 1)
    await engine.pause()
    await asyncio.sleep(
        engine._config.servers.hung_after_s + 2 * engine._config.servers.probe_interval_s
    )
    assert engine.server.is_paused
    await engine.resume()
    assert len((await running).token_ids) == LONG.max_new_tokens
