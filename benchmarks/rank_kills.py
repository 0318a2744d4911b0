"""Ranks that are killed in each state of a step: their weights, their rows, and the time it takes.

    python benchmarks/rank_kills.py [--quick] [--kills 100] [--ranks 2] [--json FILE]

The same run is made twice from the same seed: undisturbed, and with a kill in every other step. One
answer is sampled at a time and without staleness, so both have the same rows, bit for bit. A rank
sends SIGKILL to itself where a step computes, or this script sends it. After each step the weights
of both runs are compared; in the end the journal tells what became of the rows.

`<state>_until_step_s` is the time from the signal until the next step is over, the first that began
afterwards: its weights are published, and the rollout worker has them.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import qwen2_models
import report
import torch
import torch.distributed as dist
from random_model_run import Controllers, model_folder, started
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from areal_sc import Trajectory, Workflow
from areal_sc.algorithms.losses import LossTokens
from areal_sc.algorithms.policy_gradient import policy_gradient
from areal_sc.config.parallel_settings import ParallelConfig
from areal_sc.config.ppo_settings import PPOConfig
from areal_sc.config.schema import ActorConfig, Device, Dtype, GenerationConfig
from areal_sc.controller.ledger.ledger_account import GroupAccount, read_account
from areal_sc.engines.training.whole_tensors import Publication
from areal_sc.workflows.base import EpisodeEngine
from areal_sc.workflows.transcript import Transcript

SHAPE: Final = qwen2_models.Shape(32, 64, 2, 4, 2, 64)
NUM_MINIBATCHES: Final = 2

IN_RANK: Final = {
    "computing_logprobs": 1,
    "before_forward": NUM_MINIBATCHES,
    "in_forward": NUM_MINIBATCHES,
    "in_backward": NUM_MINIBATCHES,
    "before_optimizer": NUM_MINIBATCHES,
    "after_optimizer": NUM_MINIBATCHES,
    "copying_snapshot": 4,
    "sealing_weights": 4,
}
"""States that a rank is in, and how often it comes there in a step, or more often."""

BETWEEN_CALLS: Final = ("after_update", "after_publication", "between_steps")
"""States between the calls of the user's loop."""


class Doom:
    """Ends this rank where a file says: "<rank> <state> <the how manieth time from now>"."""

    def __init__(self, order: Path) -> None:
        self._order = order
        self._times = Counter[str]()
        self._is_in_minibatch = False
        torch.nn.modules.module.register_module_forward_pre_hook(self._before_module)
        torch.nn.modules.module.register_module_forward_hook(self._after_module)
        register_optimizer_step_pre_hook(self._before_optimizer)
        register_optimizer_step_post_hook(self._after_optimizer)
        copy, own_parts = torch.Tensor.copy_, Publication.own_parts

        def counted_copy(tensor: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
            if sys._getframe(1).f_code.co_filename.endswith("training/snapshots.py"):
                self.reach("copying_snapshot")
            return copy(tensor, *args, **named)

        def counted_parts(publication: Publication) -> Any:
            unfilled, values = own_parts(publication)
            return unfilled, map(self._sealed, values)

        torch.Tensor.copy_ = counted_copy  # type: ignore[assignment, method-assign]
        Publication.own_parts = counted_parts  # type: ignore[method-assign]

    def reach(self, state: str) -> None:
        """This rank is in that state now."""
        try:
            rank, doomed, times = self._order.read_text().split()
        except FileNotFoundError:
            self._times.clear()
            return
        if doomed == state and int(rank) == (dist.get_rank() if dist.is_initialized() else 0):
            self._times[state] += 1
            if self._times[state] == int(times):
                self._order.rename(died_at(self._order))
                os.utime(died_at(self._order))
                os.kill(os.getpid(), signal.SIGKILL)

    def _before_module(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            self.reach("computing_logprobs")
        elif not self._is_in_minibatch:
            self._is_in_minibatch = True
            self.reach("before_forward")

    def _after_module(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.reach("in_forward")

    def _before_optimizer(self, *_: Any) -> None:
        self.reach("before_optimizer")

    def _after_optimizer(self, *_: Any) -> None:
        self._is_in_minibatch = False
        self.reach("after_optimizer")

    def _sealed(self, value: torch.Tensor) -> torch.Tensor:
        self.reach("sealing_weights")
        return value


doom = cache(Doom)


def died_at(order: Path) -> Path:
    """Its time is that of the death."""
    return order.with_suffix(".done")


def deadly_loss(tokens: LossTokens, *, order: str) -> Any:
    """That of PPO; a rank that is told to die does so from its first call on."""
    here = doom(Path(order))
    if tokens.logprobs.requires_grad:
        tokens.logprobs.register_hook(lambda _: here.reach("in_backward"))
    return policy_gradient(tokens, clip_low=0.2, clip_high=0.2)


class TokenSums(Workflow):
    """Eight random tokens, whose sum is the reward."""

    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> Trajectory:
        transcript = Transcript()
        transcript.add_context(prompt["input_ids"])
        completion = await engine.generate(transcript.input_ids, GenerationConfig(max_new_tokens=8))
        transcript.add_completion(completion)
        return transcript.trajectory(sum(completion.token_ids) / 100)


@dataclass
class Played:
    """A run.

    Attributes:
        digests: of the weights after each step.
        until_step_s: by state, of each kill.
        groups: number of times that each was in a batch.
        rows_lost, trained_again: as the journal tells; negative: it is not read.
    """

    digests: list[str] = field(default_factory=list)
    until_step_s: dict[str, list[float]] = field(default_factory=dict)
    groups: Counter[int] = field(default_factory=Counter)
    step_s: list[float] = field(default_factory=list)
    rows_lost: int = -1
    trained_again: int = -1
    not_trained: int = -1


def play(model: Path, num_ranks: int, num_steps: int, kills: dict[int, str], seed: int) -> Played:
    """Trains; `kills` has the state in which a rank dies, by step."""
    order, rng, played = model.with_name("order"), random.Random(seed), Played()
    prompts = [{"input_ids": rng.choices(range(64), k=6)} for _ in range(64)]
    actor_config = ActorConfig(
        path=str(model),
        device=Device.cpu,
        seed=0,
        parallel=ParallelConfig(data=num_ranks),
        ppo=PPOConfig(
            loss="rank_kills:deadly_loss",
            loss_settings={"order": str(order)},
            num_minibatches=NUM_MINIBATCHES,
        ),
    )
    actor_config.optimizer.lr = 1e-4  # with 1e-2 all answers are alike after 30 steps
    run_of = started(
        actor_config,
        group_size=2,
        train_batch_groups=4,
        max_staleness=0,
        max_running_sequences=1,
        max_context_tokens=64,
    )
    with run_of as run:
        killed_s: float | None = None
        for step in range(num_steps):
            began_s, before_s = time.perf_counter(), killed_s
            killed_s = step_of(run, prompts, order, kills.get(step, ""), rng, played)
            played.step_s.append(time.perf_counter() - began_s)
            if before_s is not None:
                state, lasted_s = kills[step - 1], time.time() - before_s
                played.until_step_s.setdefault(state, []).append(lasted_s)
                report.say(f"step {step - 1}: {state}, {lasted_s:.2f} s")
            run.actor.save_hf(model.with_name("saved"))
            weights = model.with_name("saved") / "model.safetensors"
            played.digests.append(hashlib.sha256(weights.read_bytes()).hexdigest())
        (ledger,) = model.parent.rglob("ledger")
        groups: list[GroupAccount] = []
        account = read_account(ledger, groups.append)
        played.rows_lost, played.trained_again = account.rows_lost, len(account.trained_again)
        trained = {it.group for it in groups if it.outcome == "trained"}
        played.not_trained = len(played.groups.keys() - trained)
    return played


def step_of(
    run: Controllers,
    prompts: list[dict[str, Any]],
    order: Path,
    state: str,
    rng: random.Random,
    played: Played,
) -> float | None:
    """One step; returns the time of the kill, if there is one, since the epoch."""
    actor, victim = run.actor, rng.randrange(len(run.actor.fleet.members))
    killed_s: float | None = None

    def kill_at(place: str) -> float | None:
        if place != state:
            return killed_s
        os.kill(actor.fleet.members[victim].worker.pid, signal.SIGKILL)
        return time.time()

    if state in IN_RANK:
        part = order.with_suffix(".part")
        part.write_text(f"{victim} {state} {rng.randint(1, IN_RANK[state])}")
        part.rename(order)
    batch = run.rollout.prepare_batch(prompts, TokenSums())
    batch = actor.compute_proximal_logprobs(actor.compute_advantages(batch))
    actor.ppo_update(batch)
    killed_s = kill_at("after_update")
    actor.publish_weights(run.rollout)
    killed_s = kill_at("after_publication")
    run.rollout.wait_for_weights()
    killed_s = kill_at("between_steps")
    played.groups.update({row.group_id for row in batch.rows})
    if state in IN_RANK:
        assert not order.exists(), f"no rank was in the state {state}"
        killed_s = died_at(order).stat().st_mtime
    return killed_s


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=100, help="in every other step one")
    parser.add_argument("--ranks", type=int, default=2, help="of the model")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and kills")
    arguments = report.parse(parser, kills=11, ranks=1)
    states = [*IN_RANK, *BETWEEN_CALLS]
    of_kills = [states[number % len(states)] for number in range(arguments.kills)]
    random.Random(arguments.seed).shuffle(of_kills)
    num_steps = 2 * arguments.kills + 1
    kills = {2 * number + 1: state for number, state in enumerate(of_kills)}
    runs = []
    for its in ({}, kills):
        with model_folder(SHAPE, Dtype.float32) as model:
            runs.append(play(model, arguments.ranks, num_steps, its, arguments.seed))
    undisturbed, killed = runs
    pairs = zip(undisturbed.digests, killed.digests, strict=True)
    metrics: dict[str, float] = {
        "num_kills": sum(map(len, killed.until_step_s.values())),
        "num_steps": num_steps,
        "steps_of_other_weights": sum(one != other for one, other in pairs),
        "groups_in_two_batches": sum(times > 1 for times in killed.groups.values()),
        "groups_not_trained": killed.not_trained,
        "rows_lost": killed.rows_lost,
        "rows_trained_again": killed.trained_again,
        "undisturbed_step_median_s": statistics.median(undisturbed.step_s),
    }
    for state in states:
        if times := killed.until_step_s.get(state):
            metrics[f"{state}_until_step_s"] = statistics.median(times)
            metrics[f"{state}_until_step_worst_s"] = max(times)
    every = [it for times in killed.until_step_s.values() for it in times]
    metrics |= {"until_step_s": statistics.median(every), "until_step_worst_s": max(every)}
    settings = {"kills": arguments.kills, "ranks": arguments.ranks, "seed": arguments.seed}
    report.print_metrics("Ranks killed in each state of a step", settings, metrics)
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
