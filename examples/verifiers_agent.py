"""A task of `verifiers` as an agent: it plays the task as it is, and returns its reward.

It runs where `verifiers` is installed, without areal_sc; `verifiers_task.py` trains it.
"""

from __future__ import annotations

import os
from functools import cache

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment


@cache
def environment_of(taskset: str) -> vf.Env:
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    settings = {"taskset": {"id": taskset}, "agent": agent}
    return load_environment(vf.SingleAgentEnvConfig.model_validate(settings))


async def play(row: dict) -> float:
    """One episode of a task. Args: row: which `taskset`, and the `number` of the task there."""
    environment = environment_of(row["taskset"])
    task = next(it for number, it in enumerate(environment.taskset) if number == row["number"])
    model = vf.ModelContext(
        client=vf.EvalClientConfig(
            base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
        ),
        model="policy",
        sampling=vf.SamplingConfig(),
    )
    async with environment.serving():
        episode = await environment.run_episode(task, model)
    if not episode.ok:
        raise RuntimeError(episode.errors or [trace.errors for trace in episode.traces])
    return episode.traces[0].reward
