"""A training step as a run takes it: TrainController, RPC, a train worker that pulls its rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

from processes import cpu_seconds, worker_pids
from random_model_run import Controllers, started

from areal_sc import Trajectory, Workflow
from areal_sc.config.schema import ActorConfig
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.workflows.base import EpisodeEngine

ROWS_A_SHARD = 8
"""As many as a usual group has."""


class GivenRows(Workflow):
    """The prompt holds the trajectories themselves: nothing is generated."""

    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> list[Trajectory]:
        return [
            Trajectory(
                **row,
                versions=[0] * len(row["input_ids"]),
                temperatures=[1.0] * len(row["input_ids"]),
            )
            for row in prompt["rows"]
        ]


class ControllerSide:
    """Started controllers that train on the given rows, again and again."""

    def __init__(self, run: Controllers, rows: PackedRows) -> None:
        self._actor, self._rollout = run.actor, run.rollout
        # the rows in their order; they live as long as the run
        self._batch = run.rollout.rollout_batch(prompts_of(rows), GivenRows())
        assert [row.sequence_length for row in self._batch.rows] == list(rows.lengths)

    def step(self) -> None:
        batch = self._actor.compute_advantages(self._batch)
        batch = self._actor.compute_proximal_logprobs(batch)
        self._actor.ppo_update(batch)

    def publish(self) -> None:
        """Ends the policy version: the worker seals its weights and forgets the step's shards."""
        self._actor.publish_weights(self._rollout)
        self._rollout.wait_for_weights()

    def cpu_s(self) -> float:
        """CPU seconds so far of this process and the train worker."""
        return sum(cpu_seconds(worker_pids(self._actor)).values())


@contextmanager
def controller_side(config: ActorConfig, rows: PackedRows) -> Iterator[ControllerSide]:
    """Starts the workers of a side that trains on the rows; ends them after."""
    with started(
        config,
        max_running_sequences=1,
        max_context_tokens=max(rows.lengths),
        max_episode_tokens=ROWS_A_SHARD * max(rows.lengths),
    ) as run:
        yield ControllerSide(run, rows)


def prompts_of(rows: PackedRows) -> list[dict[str, Any]]:
    """Arguments of the rows' Trajectories; the reward of each is its advantage."""
    assert rows.advantages is not None
    names = ("input_ids", "loss_mask", "behavior_logprobs")
    bounds = pairwise(accumulate(rows.lengths, initial=0))
    trajectories = [
        {"reward": reward} | {name: rows.fields[name][start:end].tolist() for name in names}
        for reward, (start, end) in zip(rows.advantages, bounds, strict=True)
    ]
    return [
        {"rows": trajectories[first : first + ROWS_A_SHARD]}
        for first in range(0, rows.num_rows, ROWS_A_SHARD)
    ]
