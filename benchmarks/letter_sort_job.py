"""The letter-sorting job for benchmarks: many short runs through the real controllers and workers.

All runs of a benchmark share one temporary folder and one fork server, so that the workers of a
run start within a second or two, and one warm-start model a seed.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import report
from letter_sort_task import (
    LetterSortDemonstrations,
    LetterSortPrompts,
    letter_sort_reward,
)
from letter_sort_warm_start import WarmStart
from processes import cpu_seconds, worker_pids

from areal_sc import (
    FSDPPPOActor,
    GRPOConfig,
    LocalGenerator,
    RolloutController,
    TrainController,
    Trajectory,
    Workflow,
    load_config,
    make_scheduler,
    start,
)
from areal_sc.config.schema import GenerationConfig, SchedulerConfig
from areal_sc.controller.rollout.staleness import StalenessStats
from areal_sc.engines.base import Completion
from areal_sc.log import setup_logging
from areal_sc.metadata import BatchMetadata
from areal_sc.schedulers.base import Scheduler
from areal_sc.workflows.base import EpisodeEngine
from areal_sc.workflows.text import decode_completion, encode_text
from areal_sc.workflows.transcript import Transcript

ROOT = Path(__file__).resolve().parents[1]

HELD_OUT_SEED = 1_000_003
"""Added to a run's seed: evaluation prompts are others than those trained on."""


class PacedWorkflow(Workflow):
    """Sorting by a model that takes `seconds_per_token` to decode a token, whatever its load.

    That is what decoding on an accelerator is like, and what a model small enough for a CPU is
    not. The answer is sampled in pieces, each after the time that it would take. Weights that
    arrive in between are used from the next piece on, and all that came before is computed anew
    under them: what an interruption by a weight update does.
    """

    def __init__(self, seconds_per_token: float, tokens_per_piece: int, max_tokens: int) -> None:
        self.seconds_per_token = seconds_per_token
        self.tokens_per_piece = tokens_per_piece
        self.max_tokens = max_tokens

    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> Trajectory | None:
        transcript = Transcript()
        transcript.add_context(encode_text(engine.tokenizer, prompt["prompt"]))
        token_ids: list[int] = []
        finish_reason = "length"
        while finish_reason == "length" and len(token_ids) < self.max_tokens:
            num_tokens = min(self.tokens_per_piece, self.max_tokens - len(token_ids))
            await asyncio.sleep(self.seconds_per_token * num_tokens)
            piece = await engine.generate(
                transcript.input_ids, GenerationConfig(max_new_tokens=num_tokens)
            )
            transcript.add_completion(piece)
            token_ids += piece.token_ids
            finish_reason = piece.finish_reason
        answer = decode_completion(
            engine.tokenizer, Completion(token_ids, [], [], finish_reason, 1.0)
        )
        return transcript.trajectory(await engine.score(letter_sort_reward, prompt, answer))


@dataclass(frozen=True)
class Step:
    """One training step.

    Attributes:
        accuracy: of the batch, sampled by the versions that generated it.
        ended_s: seconds from the start of the loop.
        wait_s: waiting for the batch.
        train_s: proximal log-probabilities, advantages, updates.
        sync_s: publication.
    """

    accuracy: float
    staleness: StalenessStats
    ended_s: float
    wait_s: float
    train_s: float
    sync_s: float


@dataclass(frozen=True)
class Workers:
    """The controllers of one run, and what its processes cost."""

    actor: TrainController
    rollout: RolloutController

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of the script, and of each worker with the processes below it."""
        return cpu_seconds(worker_pids(self.actor, self.rollout))

    def num_generated_tokens(self) -> int:
        """Tokens sampled so far, also those of unfinished answers and of evaluations."""
        return int(sum(worker["generated_tokens"] for worker in self.rollout.worker_stats()))

    def mean_running(self) -> float:
        """Answers that a busy worker ran at one time."""
        workers = self.rollout.worker_stats()
        busy_s = sum(worker["busy_s"] for worker in workers)
        return sum(worker["answer_s"] for worker in workers) / busy_s

    def num_wasted_tokens(self) -> int:
        """Tokens generated and thrown away so far."""
        cancelled = sum(worker["cancelled_tokens"] for worker in self.rollout.worker_stats())
        return self.rollout.rejections.wasted_tokens + int(cancelled)


@dataclass(frozen=True)
class LetterSortJob:
    """What the runs of a benchmark share; see `letter_sort_job`.

    Attributes:
        num_warm_steps: supervised steps of a warm-start model.
    """

    folder: Path
    scheduler: Scheduler
    num_warm_steps: int

    def config(self, *, seed: int, total_steps: int, **overrides: object) -> GRPOConfig:
        """The shipped configuration with overrides, `__` for the dots of a key."""
        settings = {
            "run_dir": self.folder / "run",
            "seed": seed,
            "total_steps": total_steps,
            "actor.path": self.folder / f"warm_start-{seed}",
            **{name.replace("__", "."): value for name, value in overrides.items()},
        }
        path = ROOT / "configs" / "letter_sort.yaml"
        arguments = [f"{name}={value}" for name, value in settings.items()]
        return load_config(["--config", str(path), *arguments], GRPOConfig)

    def warm_start(self, seed: int, sizes: dict[str, int], lengths: dict[str, float]) -> None:
        """Makes the model that the seed's runs start from, by imitation.

        Args:
            sizes: of the model, see `WarmStart`.
            lengths: of the demonstrations.
        """
        demonstrations = LetterSortDemonstrations(seed, **lengths)
        recipe = WarmStart(num_steps=self.num_warm_steps, sizes=sizes)
        config = self.config(seed=seed, total_steps=1)
        recipe.train(config.actor, demonstrations, self.scheduler)
        report.say(f"seed {seed}: warm start is made")

    @contextmanager
    def workers(self, config: GRPOConfig) -> Iterator[Workers]:
        """Starts the workers of a run and ends them afterwards."""
        actor = TrainController(FSDPPPOActor(config.actor), self.scheduler)
        rollout = RolloutController(LocalGenerator(config.rollout), self.scheduler)
        with start(actor, rollout):
            yield Workers(actor, rollout)


@contextmanager
def letter_sort_job(num_warm_steps: int) -> Iterator[LetterSortJob]:
    """A job in a temporary folder, with a fork server; nothing is left behind."""
    with TemporaryDirectory(prefix="areal-sc-benchmark-") as name:
        setup_logging("controller", Path(name) / "controller.log")
        scheduler = make_scheduler(SchedulerConfig(run_dir=str(Path(name) / "run")))
        try:
            yield LetterSortJob(Path(name), scheduler, num_warm_steps)
        finally:
            scheduler.close()


def training_steps(
    workers: Workers,
    num_steps: int,
    prompts: LetterSortPrompts,
    workflow: Workflow,
    *,
    before_step: Callable[[int], None] = lambda version: None,
    before_publication: Callable[[BatchMetadata], None] = lambda batch: None,
) -> Iterator[Step]:
    """The training loop; what the two hooks take is in no part of a step's time."""
    actor, rollout = workers.actor, workers.rollout
    began = time.monotonic()
    for version in range(num_steps):
        before_step(version)
        times = [time.monotonic()]
        batch = rollout.prepare_batch(prompts, workflow)
        times.append(time.monotonic())
        batch = actor.compute_advantages(batch)
        batch = actor.compute_proximal_logprobs(batch)
        actor.ppo_update(batch)
        times.append(time.monotonic())
        before_publication(batch)
        times.append(time.monotonic())
        actor.publish_weights(rollout)
        times.append(time.monotonic())
        yield Step(
            accuracy=sum(row.reward for row in batch.rows) / batch.total_batch_size,
            staleness=StalenessStats.of(batch.rows, batch.global_step, batch.min_token_version),
            ended_s=times[-1] - began,
            wait_s=times[1] - times[0],
            train_s=times[2] - times[1],
            sync_s=times[4] - times[3],
        )
