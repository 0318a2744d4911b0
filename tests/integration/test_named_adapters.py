"""Completions with adapters of the run folder, whatever happens to the worker that gives them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from several_adapters import Merged, add_adapter, check_answer, of_the_model
from transformers import AutoModelForCausalLM
from waiting import wait_until

from areal_sc import RolloutController
from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion
from areal_sc.errors import ModelError, WorkflowError
from areal_sc.schedulers.base import Scheduler

TOLERANCE = 1e-4
"""Nats: as in `test_local_adapters.py`."""

NUM_KILLS = 3
LIMIT_S = 120.0
SAMPLED = GenerationConfig(max_new_tokens=40, temperature=0.7)
PROMPT = list(range(3, 20))


@pytest.fixture(scope="module")
def merged(tiny_model_folder: Path, scheduler: Scheduler) -> list[Merged]:
    """Eight adapters in the run folder, and none."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    folder = Path(scheduler.config.run_dir) / "serving" / "adapters"
    found = [
        add_adapter(model, folder / f"{seed}", seed=seed, rank=rank)
        for seed, rank in enumerate((1, 2, 4, 8, 3, 5, 16, 8))
    ]
    return [*found, of_the_model(model)]


def begin(rollout: RolloutController, it: Merged) -> Future[Completion]:
    return rollout.begin_generate(
        PROMPT, SAMPLED, prefix_group="g", adapter=it.folder, prompt_logprobs=True, top_k_logprobs=2
    )


def test_a_worker_that_is_started_again_serves_them_again(
    start_rollout: Callable[..., Any], merged: list[Merged], scheduler: Scheduler
) -> None:
    with start_rollout("rollout.max_running_sequences=12") as rollout:
        for kill in range(NUM_KILLS + 1):
            worker = rollout.fleet.members[0].worker
            futures = [begin(rollout, it) for it in merged]
            if kill == NUM_KILLS:  # before that, none has been answered
                futures[0].result(LIMIT_S)
            if kill:
                os.kill(worker.pid, signal.SIGKILL)
            for it, future in zip(merged, futures, strict=True):
                answer = future.result(LIMIT_S)
                check_answer(it, PROMPT, answer, 0.7, tolerance=TOLERANCE, num_top=2)
            if kill:
                wait_until(lambda old=worker: rollout.fleet.members[0].worker.pid != old.pid)
        relative = os.path.relpath(merged[3].folder, scheduler.config.run_dir)
        answer = rollout.begin_generate(
            PROMPT, SAMPLED, adapter=relative, prompt_logprobs=True
        ).result(LIMIT_S)
        check_answer(merged[3], PROMPT, answer, 0.7, tolerance=TOLERANCE)


def test_what_is_no_adapter_of_the_run_fails_its_own_request(
    start_rollout: Callable[..., Any], merged: list[Merged], scheduler: Scheduler, tmp_path: Path
) -> None:
    run_dir = Path(scheduler.config.run_dir)
    model = merged[-1].model
    outside = add_adapter(model, tmp_path / "outside", seed=0, rank=4)
    link = run_dir / "serving" / "link"
    link.symlink_to(outside.folder)
    with start_rollout() as rollout:
        worker = rollout.fleet.members[0].worker
        others = [begin(rollout, it) for it in merged[:3]]
        for path, words in (
            (outside.folder, "expected a folder in the run folder"),
            ("../outside", "expected a folder in the run folder"),
            (link, "expected a folder in the run folder"),
            ("serving/adapters/none", "adapter_model.safetensors: No such file"),
            ("keys.json", "adapter_model.safetensors: Not a directory"),
        ):
            with pytest.raises(ModelError, match=words):
                rollout.begin_generate(PROMPT, SAMPLED, adapter=path).result(LIMIT_S)
        with pytest.raises(WorkflowError, match="the prompt is empty"):
            rollout.begin_generate([], SAMPLED, adapter=merged[0].folder).result(LIMIT_S)
        for it, future in zip(merged, others, strict=False):
            check_answer(it, PROMPT, future.result(LIMIT_S), 0.7, tolerance=TOLERANCE, num_top=2)
        assert rollout.fleet.members[0].worker == worker  # it has not been lost by any of them
