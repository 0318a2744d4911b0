"""The three ways of new weights, through real controllers and workers with embedded generation.

With SGLang's servers: tests/integration/sglang.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from integration.scripts.episodes import by_letters
from integration.scripts.tiny_run import letter_prompts
from msgspec.structs import replace

from areal_sc import (
    FSDPPPOActor,
    GRPOConfig,
    RolloutController,
    SingleTurnWorkflow,
    TrainController,
    make_generator,
)
from areal_sc import start as start_controllers
from areal_sc.config.fields import join_sections
from areal_sc.schedulers.base import Scheduler
from areal_sc.weights.channel import CollectiveChannel
from areal_sc.weights.methods import LEAVE_WEIGHT_GROUP, WEIGHT_RANKS, WeightRanks
from areal_sc.weights.tree import WeightTree

PROMPTS = letter_prompts(16, seed=3)
WORKFLOW = SingleTurnWorkflow(by_letters)

SAME_KL = 1e-7
"""Of two float32 computations of the same distribution; one update of lr 1e-2 moves it by more."""


@contextmanager
def controllers(
    config: GRPOConfig, scheduler: Scheduler
) -> Iterator[tuple[TrainController, RolloutController]]:
    actor = TrainController(FSDPPPOActor(config.actor), scheduler)
    rollout = RolloutController(make_generator(config.rollout), scheduler)
    with start_controllers(actor, rollout):
        yield actor, rollout


def train_step(actor: TrainController, rollout: RolloutController) -> dict[str, float]:
    """Trains on rows that the newest weights have sampled; they are published then."""
    batch = rollout.rollout_batch(PROMPTS, WORKFLOW, 4)
    assert {version for row in batch.rows for version, _ in row.version_spans} == {actor.version}
    batch = actor.compute_proximal_logprobs(actor.compute_advantages(batch))
    stats = actor.ppo_update(batch)
    actor.publish_weights(rollout)
    rollout.wait_for_weights()
    return stats


@pytest.mark.parametrize(
    ("method", "mesh", "is_far"),
    [
        ("pull", "{data: 1}", False),
        ("pull", "{data: 2}", False),
        ("disk", "{data: 2}", False),
        ("collective", "{data: 1, tensor: 2}", False),
        ("pull", "{data: 1, tensor: 2}", True),
    ],
)
def test_generation_has_the_trainers_weights(
    tiny_config: Callable[..., GRPOConfig],
    scheduler: Scheduler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    mesh: str,
    is_far: bool,
) -> None:
    """Rows sampled after an update have the log-probabilities that the trainer computes.

    Args:
        is_far: the workers are taken for those of another node, of which one keeps a copy.
    """
    copies = []
    copy = WeightTree._copy

    async def counted(self: WeightTree, member: Any, source: Any) -> None:
        copies.append(member.name)
        await copy(self, member, source)

    monkeypatch.setattr(WeightTree, "_copy", counted)
    if is_far:
        monkeypatch.setattr(WeightTree, "_is_far", lambda *_: True)
    config = tiny_config(
        f"weight_update.method={method}",
        f"weight_update.folder={tmp_path / 'weights'}",
        f"actor.parallel={mesh}",
        "rollout.num_workers=2",
        "actor.optimizer.lr=1e-2",
    )
    config.weight_update.bucket_bytes = 20_000
    join_sections(config)
    with controllers(config, scheduler) as (actor, rollout):
        for step in range(3):
            stats = train_step(actor, rollout)
            assert stats["behavior_kl"] < SAME_KL, f"version {step}"
            assert stats["grad_norm"] > 0
        assert actor.publication_stats["failed_broadcasts"] == 0
        counters = rollout.worker_stats()
        held = {rank["store_shards"] for rank in actor.worker_stats()}
    assert held == {0 if method == "disk" else 1}, "of what was computed nothing is left"
    assert all(worker["weight_updates"] == 3 for worker in counters)
    assert len({worker["update_bytes"] for worker in counters}) == 1
    assert len(copies) == 3 * is_far, "workers on the trainers' node need none"
    if method == "disk":
        # the version before stays for whoever still reads it; those before it went
        left = [folder.name.split("-") for folder in (tmp_path / "weights").iterdir()]
        assert {version for _, _, _, version in left} == {"2", "3"}
    if method == "collective":
        assert actor.publication_stats["published_bytes"] == counters[0]["update_bytes"]


def test_other_nodes_get_what_has_changed(
    tiny_config: Callable[..., GRPOConfig], scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version after the first; each third comes whole."""
    monkeypatch.setattr(WeightTree, "_is_far", lambda *_: True)
    config = tiny_config(
        "weight_update.whole_every_steps=3",
        "actor.dtype=bfloat16",
        "actor.parallel={data: 1, tensor: 2}",
        "rollout.num_workers=2",
        "actor.optimizer.lr=1e-6",
    )
    published = [0.0]
    with controllers(config, scheduler) as (actor, rollout):
        for _ in range(5):
            assert train_step(actor, rollout)["grad_norm"] > 0
            published.append(actor.publication_stats["published_bytes"])
        counters = rollout.worker_stats()
        held = {rank["store_shards"] for rank in actor.worker_stats()}
    sizes = [after - before for before, after in itertools.pairwise(published)]
    whole = max(sizes)
    assert [size / whole < 0.3 for size in sizes] == [False, True, False, True, True]
    assert held == {2}, "the version, and what has changed in it"
    total = {name: sum(worker[name] for worker in counters) for name in counters[0]}
    assert (total["whole_copies"], total["changed_copies"], total["unfit_changes"]) == (2, 3, 0)


def test_old_weights_would_be_noticed(
    tiny_config: Callable[..., GRPOConfig], scheduler: Scheduler
) -> None:
    """What the test above would see if an update had not come through."""
    config = tiny_config("actor.optimizer.lr=1e-2")
    with controllers(config, scheduler) as (actor, rollout):
        rows = actor.compute_advantages(rollout.rollout_batch(PROMPTS, WORKFLOW, 4))
        actor.ppo_update(actor.compute_proximal_logprobs(rows))
        stats = actor.ppo_update(actor.compute_proximal_logprobs(rows))
    assert stats["behavior_kl"] > 100 * SAME_KL


def test_a_broadcast_that_cannot_be_received_leaves_nobody_waiting(
    tiny_config: Callable[..., GRPOConfig], scheduler: Scheduler
) -> None:
    """A worker that has left the group, unknown to the trainer, gets the weights by pull."""
    config = tiny_config(
        "weight_update.method=collective",
        "rollout.num_workers=2",
        "actor.optimizer.lr=1e-2",
    )
    config.weight_update.bucket_bytes = 20_000
    join_sections(config)
    with controllers(config, scheduler) as (actor, rollout):
        train_step(actor, rollout)
        group = group_of(actor)
        leave_unnoticed(rollout, group)
        for step in range(2):
            assert train_step(actor, rollout)["behavior_kl"] < SAME_KL, f"version {step + 1}"
        assert actor.publication_stats["failed_broadcasts"] == 1
        assert group_of(actor) not in ("", group)


def group_of(actor: TrainController) -> str:
    """Name of the weight group; "": there is none."""
    channel = actor.ranks.channel
    assert isinstance(channel, CollectiveChannel)
    return channel._group


def leave_unnoticed(rollout: RolloutController, group: str) -> None:
    """One worker leaves, and the question whether all are members is answered as before."""

    async def leave() -> None:
        fleet = rollout.fleet
        await fleet.call(fleet.members[1], LEAVE_WEIGHT_GROUP, group)

    rollout._run(leave())
    ask = rollout.fleet.call_living

    async def ask_once(method: Any, name: str, members: Any) -> dict[Any, WeightRanks]:
        assert method is WEIGHT_RANKS
        rollout.fleet.call_living = ask  # type: ignore[method-assign]
        replies = await ask(WEIGHT_RANKS, name, members)
        return {member: replace(ranks, is_member=True) for member, ranks in replies.items()}

    rollout.fleet.call_living = ask_once  # type: ignore[assignment, method-assign]


def test_a_worker_that_dies_joins_the_next_meeting(
    tiny_config: Callable[..., GRPOConfig], scheduler: Scheduler
) -> None:
    config = tiny_config("weight_update.method=collective", "rollout.num_workers=2")
    with controllers(config, scheduler) as (actor, rollout):
        train_step(actor, rollout)
        group, dead = group_of(actor), rollout.fleet.members[1]
        os.kill(dead.worker.pid, signal.SIGKILL)
        train_step(actor, rollout)  # a broadcast that it should get fails, and others pull
        rollout._run(rollout._recovery.wait_until_ready(dead))
        for _ in range(2):
            assert train_step(actor, rollout)["behavior_kl"] < SAME_KL
        assert group_of(actor) not in ("", group)
