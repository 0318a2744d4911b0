"""Ranks of a model on two nodes: each has in memory what its own ranks need to begin again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from integration.test_dead_ranks import LOSS, Steps, write_snapshot
from integration.test_weight_publication import controllers

from areal_sc import GRPOConfig
from areal_sc.config.schema import SchedulerConfig
from areal_sc.errors import StepsLost
from areal_sc.preflight.plan import plan
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.agent_process import StartedAgent
from areal_sc.schedulers.base import Node
from areal_sc.schedulers.local import LocalScheduler

LIMIT_S = 60.0


class TwoNodes(LocalScheduler):
    """This machine twice: a second agent, whose shared memory is another folder.

    Attributes:
        other: the second agent; a new one when it was replaced.
    """

    def __init__(self, config: SchedulerConfig, memory: Path) -> None:
        super().__init__(config)
        self._memory = memory
        self.other = self._start_other()
        self._other_node = Node(self._wait_for_facts(self.other), self._log_path)

    def _start_other(self) -> StartedAgent:
        own = self.config
        transport = replace(own.transport, shared_memory=str(self._memory))
        self.config = replace(own, transport=transport)
        try:
            return self._start_agent()
        finally:
            self.config = own

    async def nodes(self) -> list[Node]:
        return [*await super().nodes(), self._other_node]

    async def ended_nodes(self) -> dict[Node, str]:
        how = self.other.how_it_ended()
        return await super().ended_nodes() | ({} if how is None else {self._other_node: how})

    async def renew(self, node: Node, incarnation: str) -> None:
        if node is not self._other_node:
            await super().renew(node, incarnation)
        elif node.facts.incarnation == incarnation:
            self.other.close()
            self.other = self._start_other()
            node.facts, node.found = await asyncio.to_thread(self._wait_for_facts, self.other), []

    def close(self) -> None:
        self.other.end(LIMIT_S)
        self.other.close()
        super().close()


def test_ranks_begin_from_the_memory_of_their_nodes_and_from_the_disk_when_one_is_lost(
    tiny_config: Callable[..., GRPOConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = tiny_config(
        f"run_dir={tmp_path / 'run'}",
        "actor.parallel={data: 1, tensor: 2}",  # norms are on both nodes
        f"actor.ppo.loss={LOSS}",
        f"actor.ppo.loss_settings={{marker: {tmp_path / 'marker'}}}",
        "actor.optimizer.lr=1e-2",
    )
    room = max(worker.store_bytes for worker in plan(config).workers if worker.role == "train")
    config.actor.store_bytes = room + (64 << 10)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # for the loss
    scheduler = TwoNodes(config.scheduler, tmp_path / "memory")
    try:
        with controllers(config, scheduler) as (actor, rollout):
            nodes = [member.worker.node for member in actor.fleet.members]
            assert len(set(nodes)) == 2
            assert rollout.fleet.members[0].worker.node == nodes[0]
            steps = Steps(config, actor, rollout, tmp_path / "model")
            write_snapshot(actor, RunFolder(config.run_dir))
            at_the_start, expected, metrics = rollout.state(), [], []
            for _ in range(2):
                metrics.append(steps.update())
                steps.publish()
                expected.append(steps.model())
            actor.load_snapshot(0)
            rollout.go_back(at_the_start)

            def check(step: int) -> None:
                assert steps.update() == metrics[step]
                steps.publish()
                assert steps.model() == expected[step]
                in_memory = f"{actor.ranks.state.lineage}-{step + 1}"
                found = tmp_path.glob(f"memory/*/*/snapshots-train/*/*.{in_memory}.json")
                assert {path.name for path in found} == {f"rank-1-of-2.{in_memory}.json"}

            check(0)
            steps.kill(1)
            check(1)
            assert "ranks are back at version=1, from its memory state" in caplog.text
            # before its end: the agent that takes its place writes there at once
            (tmp_path / "memory").rename(tmp_path / "lost")
            os.kill(scheduler.other.pid, signal.SIGKILL)
            with pytest.raises(StepsLost, match="of which there is no snapshot"):
                steps.update()
            assert "a snapshot (memory) cannot be read" in caplog.text
            actor.load_snapshot(0)
            rollout.go_back(at_the_start)
            assert steps.update() == metrics[0]
            steps.publish()
            assert steps.model() == expected[0]
    finally:
        scheduler.close()
