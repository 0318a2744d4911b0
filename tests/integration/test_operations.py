"""Real workers carry a training step out once, although it is asked for again or by two scripts."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from integration.test_weight_publication import PROMPTS, WORKFLOW, controllers
from small_disk import small_disk

from areal_sc import FSDPPPOActor, GRPOConfig, TrainController
from areal_sc.controller.train.rank_state import StartingPoint
from areal_sc.errors import CheckpointError, StaleCall
from areal_sc.fleet.member import Member
from areal_sc.fleet.runtime import Runtime
from areal_sc.fleet.worker_life import Joined
from areal_sc.metadata import BatchMetadata
from areal_sc.schedulers.base import Scheduler
from areal_sc.workers.rank_methods import SnapshotPlace


def restarted(actor: TrainController, scheduler: Scheduler) -> TrainController:
    """A controller of another life: it has new ids and connections, and the same ranks."""
    runtime = Runtime.create(scheduler.keys)
    again = TrainController(FSDPPPOActor(actor.config), scheduler, runtime=runtime)
    again.ranks.layout = actor.ranks.layout
    lineage = actor.ranks.state.lineage
    again.ranks.state.begin(lineage, StartingPoint(0, SnapshotPlace.initial))
    for member in actor.fleet.members:
        worker = member.worker
        connection = runtime.transport.connect(worker.address, worker.name, worker.incarnation)
        life = again.fleet.lives.of(member.order)
        again.fleet.members.append(Member(member.order, worker, connection, life))
        again.fleet.tell(Joined(life.unit, worker.incarnation))
    again._recovery.begin(again.ranks._bring_back)
    return again


def test_a_step_is_trained_once(
    tiny_config: Callable[..., GRPOConfig], scheduler: Scheduler, tmp_path: Path
) -> None:
    config = tiny_config("actor.parallel.data=2", "actor.optimizer.lr=1e-2")
    with controllers(config, scheduler) as (actor, rollout):
        rows = actor.compute_advantages(rollout.rollout_batch(PROMPTS, WORKFLOW, 4))
        batch = actor.compute_proximal_logprobs(rows)

        async def give_up_and_repeat() -> list[dict[str, float]]:
            given_up = asyncio.create_task(actor.ppo_update_async(batch))
            await asyncio.sleep(0)  # both calls are on their way
            asked = [asyncio.create_task(actor.ppo_update_async(batch)) for _ in range(2)]
            given_up.cancel()
            return await asyncio.gather(*asked)

        first, second = actor._run(give_up_and_repeat())
        assert first == second
        weights = model_of(actor, tmp_path / "once")

        async def after_a_restart(batch: BatchMetadata) -> dict[str, float]:
            again = restarted(actor, scheduler)
            try:
                return await again.ppo_update_async(batch)
            finally:
                await again._runtime.transport.close()

        assert actor._run(after_a_restart(batch)) == first
        with pytest.raises(StaleCall, match="asked for before, with something else"):
            actor._run(after_a_restart(batch.take(range(4))))
        assert model_of(actor, tmp_path / "repeated") == weights

        actor.publish_weights(rollout)
        actor.publish_weights(rollout)  # at the next version, this is another publication
        with pytest.raises(StaleCall, match=r"policy version 0: train/\d is at .* version 2"):
            actor._run(after_a_restart(batch))
        assert model_of(actor, tmp_path / "published") == weights

        with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:  # another file system
            target = Path(elsewhere) / "model"
            with small_disk(), pytest.raises(CheckpointError, match=rf"cannot write {target}:"):
                actor.save_hf(target)
            assert list(Path(elsewhere).iterdir()) == []
            assert list((Path(config.run_dir) / "exports" / "train").iterdir()) == []
            assert model_of(actor, target) == weights
    assert not (Path(config.run_dir) / "exports").exists()


def model_of(actor: TrainController, folder: Path) -> bytes:
    actor.save_hf(folder)
    return (folder / "model.safetensors").read_bytes()
