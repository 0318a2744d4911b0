"""Episodes of a worker whose engine is asleep, as training has the card."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from areal_sc import user_code
from areal_sc.agents.server import AgentServer
from areal_sc.config.schema import RolloutConfig
from areal_sc.rejection import Rejection, RejectionKind
from areal_sc.weights.adopter import Adopter
from areal_sc.weights.published import WeightsReference
from areal_sc.workers import rollout_worker
from areal_sc.workers.episode_routes import EpisodeRoutes
from areal_sc.workers.rollout_worker import RolloutWorker
from areal_sc.workflows.base import EpisodeEngine, Trajectory, Workflow

LIMIT_S = 0.05


class Engine:
    """Has slept, or got weights."""

    async def sleep(self) -> None: ...

    @property
    def version(self) -> int:
        return 0

    async def update_weights(self, version: int, source: Any) -> None: ...

    async def update_weights_from_disk(self, version: int, folder: Any) -> None: ...


class Waits(Workflow):
    """Answers nothing, once it may."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def run_episode(
        self, prompt: Mapping[str, Any], engine: EpisodeEngine
    ) -> Trajectory | None:
        await self.may_end.wait()
        return None


async def test_an_episode_is_late_only_by_the_time_in_which_its_engine_is_awake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(user_code, "_ASLEEP_LOOK_S", 0.01)
    monkeypatch.setattr(
        rollout_worker,
        "WorkerEpisodeEngine",
        lambda *_, **__: SimpleNamespace(
            failure=None, endless="", past_waits=[], routes=EpisodeRoutes(None)
        ),
    )
    recorder = SimpleNamespace(add_event=lambda *_: None, span=lambda *_, **__: nullcontext())
    worker: Any = RolloutWorker.__new__(RolloutWorker)
    worker._endless = ""
    config = RolloutConfig(train_batch_groups=1, max_context_tokens=8, group_timeout_s=LIMIT_S)
    worker.handle, worker.recorder = SimpleNamespace(config=config), recorder
    worker._engine, worker.plane = Engine(), None
    worker._starting = asyncio.ensure_future(asyncio.sleep(0))
    worker._agents = AgentServer("rollout/0")
    worker._weights = Adopter(worker, lambda: worker.engine, worker._agents.clock)
    worker._weights.held = SimpleNamespace(keep_only=id)
    worker._rewards = worker._agent_pool = None
    worker._own_fields = {}
    worker._sessions = SimpleNamespace(journal=lambda *_: None)
    worker._all_episodes = SimpleNamespace(running=lambda _: nullcontext(), note_rejected=id)
    worker.spec = SimpleNamespace(log_path="")

    async def play(workflow: Waits) -> Rejection:
        found = await worker._episode(workflow, {}, SimpleNamespace(index=0), "g", 0, None, None)
        assert isinstance(found, Rejection)
        return found

    await worker.sleep(None)
    workflow = Waits()
    playing = asyncio.create_task(play(workflow))
    await asyncio.wait([playing], timeout=4 * LIMIT_S)
    assert not playing.done()
    workflow.may_end.set()
    assert (await playing).kind is not RejectionKind.timeout
    await worker._weights.adopt(WeightsReference(1, ()))
    assert (await play(Waits())).kind is RejectionKind.timeout
