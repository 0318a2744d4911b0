"""Train workers are killed at every point of a step; the model is that of the undisturbed run.

The same rows are trained twice: first undisturbed, then, from the snapshot of step 0 on, with a
death in each step.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from integration.run_process import LIMIT_S
from integration.test_operations import model_of
from integration.test_weight_publication import PROMPTS, WORKFLOW, controllers

from areal_sc import GRPOConfig, RolloutController, TrainController, make_scheduler
from areal_sc.controller.train import ranks
from areal_sc.errors import StepsLost
from areal_sc.preflight.plan import plan
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.base import Scheduler
from areal_sc.schedulers.local import LocalScheduler
from areal_sc.system.durable import commit_folder, partial_of
from areal_sc.transport.shards.memory_folder import user_folder

LOSS = "integration.scripts.fatal_loss:fatal_loss"
NUM_STEPS = 7
GROUPS_A_STEP = 2


class Steps:
    """Trains on the same rows in the same order, as often as it is asked to."""

    def __init__(
        self, config: GRPOConfig, actor: TrainController, rollout: RolloutController, folder: Path
    ) -> None:
        self.actor = actor
        self.rollout = rollout
        self._models = folder
        self._marker = Path(config.actor.ppo.loss_settings["marker"])
        rows = rollout.rollout_batch(PROMPTS, WORKFLOW, NUM_STEPS * GROUPS_A_STEP)
        rows = actor.compute_advantages(rows)
        num_rows = GROUPS_A_STEP * config.rollout.group_size
        self._batches = [
            rows.take(range(step * num_rows, (step + 1) * num_rows)) for step in range(NUM_STEPS)
        ]

    def arm(self, rank: int, call: int) -> None:
        """The rank dies in so manieth minibatch."""
        self._marker.write_text(f"{rank} {call}")

    def kill(self, rank: int) -> None:
        os.kill(self.actor.fleet.members[rank].worker.pid, signal.SIGKILL)

    def update(self) -> dict[str, float]:
        batch = self._batches[self.actor.version]
        return self.actor.ppo_update(self.actor.compute_proximal_logprobs(batch))

    def publish(self) -> None:
        self.actor.publish_weights(self.rollout)

    def model(self) -> bytes:
        return model_of(self.actor, self._models)


def write_snapshot(actor: TrainController, folder: RunFolder) -> None:
    step = actor.version
    actor.begin_snapshot().result(LIMIT_S)
    commit_folder(partial_of(folder.snapshot_path(step)), folder.snapshot_path(step))
    actor.note_snapshot(step)


@contextmanager
def after_first(owner: Any, name: str, then: Callable[[], None]) -> Iterator[None]:
    """Something happens when a coroutine method has ended for the first time."""
    method = getattr(owner, name)

    async def call(*args: Any, **named: Any) -> Any:
        setattr(owner, name, method)
        result = await method(*args, **named)
        then()
        return result

    setattr(owner, name, call)
    yield
    assert getattr(owner, name) == method, f"{name} was not called"


def memory_of(scheduler: Scheduler) -> Path:
    """The run's folder in shared memory."""
    assert isinstance(scheduler, LocalScheduler)
    (node,) = asyncio.run(scheduler.nodes())
    return user_folder(Path(node.facts.memory_root)) / scheduler._run_id


def flip_bits(folder: Path, pattern: str) -> int:
    """Damages all files of that kind; returns how many there were."""
    paths = list(folder.glob(pattern))
    for path in paths:
        content = bytearray(path.read_bytes())
        content[-8] ^= 1
        path.write_bytes(content)
    return len(paths)


@pytest.mark.parametrize(
    ("mesh", "shared_memory"),
    [("{data: 1}", "auto"), ("{data: 2}", "off"), ("{data: 1, tensor: 2}", "auto")],
)
def test_the_model_is_that_of_the_undisturbed_run(
    tiny_config: Callable[..., GRPOConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mesh: str,
    shared_memory: str,
) -> None:
    config = tiny_config(
        f"run_dir={tmp_path / 'run'}",
        f"actor.parallel={mesh}",
        f"transport.shared_memory={shared_memory}",
        f"actor.ppo.loss={LOSS}",
        f"actor.ppo.loss_settings={{marker: {tmp_path / 'marker'}}}",
        "actor.optimizer.lr=1e-2",
    )
    # two versions of the weights, and the rows' log-probabilities
    room = max(worker.store_bytes for worker in plan(config).workers if worker.role == "train")
    config.actor.store_bytes = room + (64 << 10)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # for the loss
    scheduler, last = make_scheduler(config.scheduler), config.actor.parallel.num_ranks - 1
    folder = RunFolder(config.run_dir)
    try:
        with controllers(config, scheduler) as (actor, rollout):
            steps = Steps(config, actor, rollout, tmp_path / "model")
            write_snapshot(actor, folder)
            at_the_start = rollout.state()
            expected, metrics = [], []
            for _ in range(NUM_STEPS):
                metrics.append(steps.update())
                steps.publish()
                expected.append(steps.model())
            assert len(set(expected)) == NUM_STEPS
            actor.load_snapshot(0)
            rollout.go_back(at_the_start)

            def check() -> None:
                steps.publish()
                rollout.wait_for_weights()
                assert steps.model() == expected[actor.version - 1]

            for step, call in enumerate((1, 2)):  # in each minibatch
                steps.arm(last, call)
                assert steps.update() == metrics[step]
                check()
            assert steps.update() == metrics[2]
            steps.kill(0)  # between update and publication
            check()
            with after_first(actor.ranks.channel, "seal", lambda: steps.kill(last)):
                assert steps.update() == metrics[3]
                check()
            with after_first(actor.ranks.memory, "take", lambda: steps.kill(last)):
                assert steps.update() == metrics[4]  # its snapshot is whole, and nobody knows it
                check()
            with after_first(ranks, "meet", lambda: steps.kill(last)):
                steps.kill(0)
                assert steps.update() == metrics[5]
                check()
            written = actor.begin_snapshot()
            steps.kill(last)
            written.result(LIMIT_S)
            path = folder.snapshot_path(actor.version)
            commit_folder(partial_of(path), path)
            actor.note_snapshot(actor.version)
            memory = memory_of(scheduler)
            assert flip_bits(memory, "snapshots-train/*/*.json")
            steps.arm(0, 2)
            assert steps.update() == metrics[6]
            check()
            assert "snapshot (memory) cannot be read" in caplog.text
            assert "ranks are back at version=6, from its disk state" in caplog.text

            flip_bits(memory, "snapshots-train/*/*.json")
            steps.kill(0)
            with pytest.raises(StepsLost, match="of which there is no snapshot"):
                steps.publish()
            actor.load_snapshot(0)  # the ranks live
            rollout.go_back(at_the_start)
            assert steps.update() == metrics[0]
            check()
    finally:
        scheduler.close()
