"""A run that is killed at a known place, as `kill -9` does: the environment's `DIE_AT` names it.

Each episode of training is noted in the file `task.book`: its prompt, and who played it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tiny_run import letter_prompts, partial

from areal_sc import GRPOConfig, PPOTrainer, SingleTurnWorkflow, Trajectory, load_config, run_script
from areal_sc.controller.ledger.journal import Journal
from areal_sc.controller.rollout.groups import OutsideGroups
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.controller.rollout.rollout_workers import RolloutWorkers
from areal_sc.fleet.fleet import Fleet
from areal_sc.trainer.checkpoints import Checkpoints
from areal_sc.workers.calls import RUN_GROUP
from areal_sc.workers.rank_methods import COMPUTE, DESCRIBE_RANK, UPDATE, RankDescription
from areal_sc.workflows.base import EpisodeEngine

SENT_AFTER_S: Final = 0.05
"""What a call sends is in the kernel's hands by then."""

PLACES: Final[dict[str, tuple[type[Any], str, object, float]]] = {
    # name: class, method, its first argument or None for any, seconds after the call begins (of
    # a call of ranks: after all of them have it), or when it has returned, what comes first;
    # below 0: when it has returned
    "generating": (Fleet, "call", RUN_GROUP, SENT_AFTER_S),
    "computing": (Fleet, "call_each", COMPUTE, 0),
    "training": (Fleet, "call_each", UPDATE, 0),
    "trained": (Fleet, "call_each", UPDATE, -1),
    "sealed": (RolloutController, "record_version_async", None, 0),
    "recorded": (RolloutController, "record_version_async", None, -1),
    "snapshot": (Checkpoints, "_begin", None, -1),
    "evaluating": (OutsideGroups, "evaluate", None, SENT_AFTER_S),
    "taking_up": (Journal, "take_up", None, -1),
    "taking_over": (RolloutWorkers, "take_over", None, -1),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def die_once_all_have_it(fleet: Fleet, before: list[RankDescription]) -> None:
    """A call that has reached some ranks only has the ranks started anew."""
    while True:
        ranks = await fleet.call_all(DESCRIBE_RANK, None)
        if all(map(has_more, ranks, before)):
            die()
        await asyncio.sleep(0.005)


def has_more(rank: RankDescription, before: RankDescription) -> bool:
    return (rank.num_computed, rank.operations) != (before.num_computed, before.operations)


def die_at(place: str) -> None:
    """The first call of a method ends this process."""
    owner, name, wanted, after_s = PLACES[place]
    original: Callable[..., Any] = getattr(owner, name)
    watches: list[asyncio.Task[None]] = []

    def is_meant(args: tuple[Any, ...]) -> bool:
        return wanted is None or wanted in args

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_meant(args) and after_s == 0:
            die()
        result = original(*args, **kwargs)
        if is_meant(args):
            die()
        return result

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        if is_meant(args) and name == "call_each" and after_s >= 0:
            before = await args[0].call_all(DESCRIBE_RANK, None)
            watches.append(asyncio.create_task(die_once_all_have_it(args[0], before)))
        elif is_meant(args) and after_s >= 0:
            asyncio.get_running_loop().call_later(after_s, die)
        result = await original(*args, **kwargs)
        if is_meant(args):
            die()
        return result

    setattr(owner, name, call_async if asyncio.iscoroutinefunction(original) else call)


class BookedWorkflow(SingleTurnWorkflow):
    """Notes each episode that begins; waits a little, so that a group takes longer than a call."""

    def __init__(self, book: Path) -> None:
        super().__init__(partial)
        self.book = book

    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> Trajectory | None:
        with self.book.open("a") as book:
            book.write(f"{prompt['prompt']} {os.getpid()}\n")
        await asyncio.sleep(0.2)
        return await super().run_episode(prompt, engine)


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    if place := os.environ.get("DIE_AT"):
        die_at(place)
    PPOTrainer(config).fit(
        BookedWorkflow(Path(config.task["book"])),
        letter_prompts(64, seed=0),
        evaluation_prompts=letter_prompts(8, seed=1),
        evaluation_workflow=SingleTurnWorkflow(partial),
    )


if __name__ == "__main__":
    sys.exit(run_script(main))
