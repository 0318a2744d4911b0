"""Which rollout worker pulls new weights from whom, where workers are on many nodes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace
from simulation.behavior import Behavior
from simulation.lives import serving_life
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import run_virtual

from areal_sc.config.schema import RolloutConfig, SchedulerConfig, WeightUpdateConfig
from areal_sc.controller.background import Background
from areal_sc.controller.rollout.rollout_workers import RolloutWorkers
from areal_sc.controller.shared_card import SharedCard
from areal_sc.engines.handles import make_generator
from areal_sc.errors import ShardGone, StoreFull
from areal_sc.fleet.worker_life import LifeState, Tell
from areal_sc.sizing.store_room import live_row_bytes
from areal_sc.weights.methods import COPY_WEIGHTS, CopyWeights
from areal_sc.weights.published import ShardReference, WeightChanges, WeightsReference
from areal_sc.weights.tree import (
    MAX_REFUSED,
    MIN_LATE_S,
    TRAINER_PULLS,
    WeightHolder,
    WeightTree,
)

TRAINERS = "trainers"
STORE_BYTES = 1 << 20


class Cluster:
    """Workers that copy and read weights when the test says so: they have no engines.

    Attributes:
        copying: worker -> whom it pulls a copy from.
        reading: worker -> whom it reads from.
        copied, read: (worker, whom from), in the order of their ends.
        read_versions: those that workers have read, in that order.
        spare_bytes: what copies had to leave free.
        asked: what copies were asked for, by worker.
    """

    def __init__(
        self,
        num_nodes: int,
        per_node: int,
        *,
        first_node: int = 1,
        whole_every_steps: int = 1,
        store_bytes: int = STORE_BYTES,
    ) -> None:
        self.config = SchedulerConfig(run_dir="unused")
        self.tell: Tell = lambda event: None
        self.copying: dict[str, str] = {}
        self.reading: dict[str, str] = {}
        self.copied: list[tuple[str, str]] = []
        self.read: list[tuple[str, str]] = []
        self.read_versions: list[int] = []
        self.spare_bytes: set[int] = set()
        self.asked: dict[str, CopyWeights] = {}
        self._ends: dict[str, asyncio.Future[None]] = {}
        self._num_shards = 0
        num_workers = num_nodes * per_node
        self.rollout_config = config = RolloutConfig(
            num_workers=num_workers,
            max_context_tokens=1,
            train_batch_groups=1,
            store_bytes=store_bytes,
            weight_update=WeightUpdateConfig(whole_every_steps=whole_every_steps),
        )
        fleet: Any = self
        self.background = Background(100_000.0, lambda: "")
        self.workers = RolloutWorkers(
            make_generator(config),
            fleet,
            self.background,
            lambda run: True,
            partial(asyncio.sleep, 0),
            lambda event: None,
            SharedCard(),
        )
        self.members: list[Any] = [
            SimpleNamespace(
                name=f"rollout/{i}",
                index=i,
                is_adopted=False,
                has_lived=True,
                life=serving_life(),
                worker=SimpleNamespace(
                    node=f"node-{first_node + i // per_node}",
                    store_room_bytes=3 << 20,
                    incarnation="life",
                ),
            )
            for i in range(num_workers)
        ]
        self.workers.track(self.members)

    def publish(self, version: int, base: int | None = None) -> None:
        """The trainers, on node 0, have sealed a version, and what has changed since another."""
        shard = ShardReference(TRAINERS, "address", f"life.{version}")
        weights = WeightsReference(version, (shard,), nodes=("node-0",))
        if base is not None:
            changes = ShardReference(TRAINERS, "address", f"life.{version}000")
            weights = replace(weights, changes=WeightChanges((0, base), (changes,), 9))
        self.workers.updates.adopt(weights)

    async def call(self, member: Any, method: Any, args: Any, *, timeout_s: float) -> Any:
        assert timeout_s > 300
        is_copy = method is COPY_WEIGHTS
        weights = args.weights if is_copy else args
        (shard,) = weights.shards
        assert shard.shard_id.startswith("life.")
        if isinstance(args, CopyWeights):
            self.spare_bytes.add(args.spare_bytes)
            self.asked[member.name] = args
        going_on = self.copying if is_copy else self.reading
        going_on[member.name] = shard.node_id
        end = self._ends[member.name] = asyncio.get_running_loop().create_future()
        try:
            await end
        finally:
            del going_on[member.name]
        if not is_copy:
            self.read.append((member.name, shard.node_id))
            self.read_versions.append(weights.version)
            return None
        self.copied.append((member.name, shard.node_id))
        self._num_shards += 1
        ids = [f"life.{self._num_shards}", f"life.{self._num_shards}000"]
        copies = [ShardReference(member.name, "address", shard_id) for shard_id in ids]
        return tuple(copies if weights.changes else copies[:1])

    async def finish(self, *names: str) -> None:
        """What these workers do ends well."""
        for name in names:
            self._ends[name].set_result(None)
        await turn()

    async def fail(self, name: str, error: Exception) -> None:
        self._ends[name].set_exception(error)
        await turn()

    async def finish_all(self) -> int:
        """Whatever goes on ends at the same time, again and again; returns how many times."""
        num_rounds = 0
        while self.copying or self.reading:
            num_rounds += bool(self.copying)
            busy = Counter(self.copying.values())
            del busy[TRAINERS]
            assert set(busy.values()) <= {1}, "a node serves several others"
            await self.finish(*self.copying, *self.reading)
        await self.workers.updates.wait_until_newest()
        return num_rounds

    async def lose_hung(self, error: Exception, members: Any, limit: str) -> None:
        """Workers that give no reply are not lost here."""

    def lose(self, name: str) -> None:
        member = next(member for member in self.members if member.name == name)
        member.life.state = LifeState.lost
        self.workers.leave_out(name)


async def turn() -> None:
    """Lets everything that can go on do so."""
    for _ in range(30):
        await asyncio.sleep(0)


def play(scenario: Coroutine[Any, Any, None]) -> None:
    run_virtual(scenario)


def test_the_trainers_serve_two_nodes_of_64_and_these_serve_the_others() -> None:
    async def scenario() -> None:
        cluster = Cluster(64, per_node=4)
        for version in (1, 2):
            cluster.publish(version)
            await turn()
            num_rounds = await cluster.finish_all()
            assert num_rounds <= 7  # 2, 4, 8, ... nodes have it
            sources = Counter(source for _, source in cluster.copied)
            assert sources[TRAINERS] == TRAINER_PULLS
            assert len(cluster.copied) == 64, "one worker of each node pulls"
            keepers = {name for name, _ in cluster.copied}
            assert all(source in keepers for _, source in cluster.read)
            assert len(cluster.read) == 4 * 64
            cluster.copied.clear()
            cluster.read.clear()
        assert cluster.spare_bytes == {3 << 20}, "what its stores may hold together"
        await cluster.background.close()

    play(scenario())


def test_copies_leave_room_for_rows_in_use_where_stores_have_no_limit() -> None:
    """Not for all that rows might take of the node's memory: then there would be no copies."""

    async def scenario() -> None:
        cluster = Cluster(2, per_node=4, store_bytes=0)
        cluster.publish(1)
        await turn()
        await cluster.finish_all()
        assert cluster.spare_bytes == {4 * live_row_bytes(cluster.rollout_config)}
        await cluster.background.close()

    play(scenario())


def test_on_the_trainers_node_nothing_is_copied() -> None:
    async def scenario() -> None:
        cluster = Cluster(1, per_node=8, first_node=0)
        cluster.publish(1)
        await turn()
        assert cluster.reading == {f"rollout/{i}": TRAINERS for i in range(8)}
        await cluster.finish_all()
        assert not cluster.copied
        await cluster.background.close()

    play(scenario())


def test_who_is_alone_in_need_of_weights_makes_no_copy() -> None:
    async def scenario() -> None:
        cluster = Cluster(1, per_node=1)
        cluster.publish(1)
        await turn()
        assert cluster.reading == {"rollout/0": TRAINERS}
        await cluster.finish_all()
        assert not cluster.copied
        await cluster.background.close()

    play(scenario())


def test_a_node_gets_what_has_changed_with_the_copy_that_it_is_of() -> None:
    async def scenario() -> None:
        cluster = Cluster(2, per_node=1, whole_every_steps=9)

        async def copy_all(version: int, base: int | None = None) -> dict[str, str | None]:
            """The base of each worker's copy."""
            cluster.publish(version, base)
            await turn()
            await cluster.finish_all()
            bases = {name: asked.base for name, asked in cluster.asked.items()}
            cluster.asked.clear()
            return {name: base and base.shard_id for name, base in bases.items()}

        assert await copy_all(1) == {"rollout/0": None, "rollout/1": None}, "none is left out"
        first = dict(zip((name for name, _ in cluster.copied), ("life.1", "life.2"), strict=True))
        assert await copy_all(2, base=1) == first
        assert None not in (await copy_all(3, base=2)).values()
        assert set((await copy_all(4, base=2)).values()) == {None}, "they have version 3"
        cluster.workers.updates._tree.forget(cluster.members[1])
        bases = await copy_all(5, base=4)
        assert bases["rollout/0"] is not None
        assert bases["rollout/1"] is None, "its memory went with it"
        await cluster.background.close()

    play(scenario())


def test_what_has_changed_is_handed_on_with_the_copy() -> None:
    async def scenario() -> None:
        cluster = Cluster(3, per_node=1, whole_every_steps=9)
        cluster.publish(1, base=0)
        await turn()
        first, _ = cluster.copying
        await cluster.finish(first)
        (third,) = (name for name, source in cluster.copying.items() if source == first)
        handed_on = cluster.asked[third].weights
        assert [shard.node_id for shard in handed_on.shards] == [first]
        assert handed_on.changes == WeightChanges(
            (0, 0), (ShardReference(first, "address", "life.1000"),), 9
        )
        await cluster.finish_all()
        await cluster.background.close()

    play(scenario())


def test_who_cannot_read_a_copy_reads_another_and_in_the_end_from_the_trainers() -> None:
    async def scenario() -> None:
        cluster = Cluster(8, per_node=1)
        cluster.publish(1)
        await turn()
        await cluster.finish(*cluster.copying)  # the first two, from the trainers
        tried = []
        late = next(name for name, source in cluster.copying.items() if source != TRAINERS)
        for _ in range(MAX_REFUSED):
            while late not in cluster.copying:  # until a source is free
                others = [name for name in cluster.copying if name != late]
                await cluster.finish(*others)
            tried.append(cluster.copying[late])
            await cluster.fail(late, ShardGone("its owner has died"))
        assert len(set(tried)) == MAX_REFUSED
        assert TRAINERS not in tried
        assert cluster.copying[late] == TRAINERS
        await cluster.finish_all()
        await cluster.background.close()

    play(scenario())


def test_a_copy_is_gone_with_its_worker() -> None:
    async def scenario() -> None:
        cluster = Cluster(3, per_node=1)
        cluster.publish(1)
        await turn()
        first, second = cluster.copying
        await cluster.finish(first)
        (third,) = set(cluster.copying) - {second}
        assert cluster.copying[third] == first
        cluster.lose(first)
        await cluster.fail(third, ShardGone("its owner has died"))
        assert third not in cluster.copying, "it waits for the copy that is on its way"
        cluster.lose(second)  # no copy is left, and none on its way
        await turn()
        assert cluster.copying == {third: TRAINERS}
        await cluster.finish_all()
        await cluster.background.close()

    play(scenario())


def test_slow_nodes_hold_up_nobody_for_long() -> None:
    async def scenario() -> None:
        cluster = Cluster(6, per_node=1)
        cluster.publish(1)
        await turn()
        slow = set(cluster.copying)
        assert len(slow) == TRAINER_PULLS
        await asyncio.sleep(MIN_LATE_S + 1)
        (third,) = set(cluster.copying) - slow
        assert cluster.copying[third] == TRAINERS
        while len(cluster.copied) < 4:
            await cluster.finish(*(set(cluster.copying) - slow), *cluster.reading)
        assert slow == set(cluster.copying)
        assert sum(source == TRAINERS for _, source in cluster.copied) == 1
        await cluster.finish_all()
        await cluster.background.close()

    play(scenario())


def test_a_node_without_room_for_a_copy_gets_its_weights_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        cluster = Cluster(2, per_node=2)
        cluster.publish(1)
        await turn()
        full, other = cluster.copying
        await cluster.fail(full, StoreFull("no room"))
        await cluster.finish(other)
        await cluster.finish_all()
        assert Counter(source for _, source in cluster.read)[other] >= 2
        assert all(name == other for name, _ in cluster.copied)
        cluster.publish(2)  # it is not asked again
        await turn()
        assert full not in cluster.copying
        await cluster.finish_all()
        assert caplog.text.count("its node keeps no copy of the weights") == 1
        await cluster.background.close()

    play(scenario())


def test_who_waits_for_a_source_gets_the_newest_version() -> None:
    async def scenario() -> None:
        cluster = Cluster(4, per_node=1)
        cluster.publish(1)
        await turn()
        first, second = cluster.copying
        cluster.workers.updates.forget()  # a new lineage: nobody reads what is there now
        cluster.publish(2)
        await turn()
        assert len(cluster.copying) == 2 + TRAINER_PULLS
        await cluster.finish(first, second)  # copies of version 1, which nobody is sent to
        await cluster.finish_all()
        assert set(cluster.read_versions) == {2}
        assert [s for _, s in cluster.copied].count(TRAINERS) == 2 + TRAINER_PULLS
        await cluster.background.close()

    play(scenario())


def test_a_worker_that_is_lost_gives_its_source_back() -> None:
    async def scenario() -> None:
        cluster = Cluster(4, per_node=1)
        cluster.publish(1)
        await turn()
        first, second = cluster.copying
        await cluster.finish(first)
        (third,) = set(cluster.copying) - {second}
        cluster.lose(third)
        await turn()
        (fourth,) = set(cluster.copying) - {second}
        assert cluster.copying[fourth] == first
        await cluster.finish_all()
        await cluster.background.close()

    play(scenario())


@pytest.mark.parametrize("seed", range(3))
def test_a_run_whose_nodes_die_while_they_serve_others_goes_on(seed: int) -> None:
    """Simulated workers check that nobody gets another version than it was told."""
    rng = random.Random(seed)
    behavior = Behavior(
        generation_s=2.0, publication_s=lambda rng: rng.choice([0.5, 1.0, 4.0]), training_s=1.0
    )
    settings = Settings(num_rollout_workers=16, max_deaths=1000, seed=seed, behavior=behavior)
    pulls: Counter[str] = Counter()

    async def scenario() -> None:
        run = TrainingRun(settings)
        run.cluster.num_nodes = 9
        copy = WeightTree._copy

        async def counted(self: WeightTree, member: Any, source: WeightHolder) -> None:
            pulls["trainers" if source.keeper is None else "nodes"] += 1
            await copy(self, member, source)
            pulls["copies"] += 1

        async def keep_killing() -> None:
            while True:
                await asyncio.sleep(rng.expovariate(1 / 3))
                living = [w for w in run.cluster.rollout_workers if w.exit_status is None]
                victim = rng.choice(living)
                victim.end("signal 9 (SIGKILL)")
                if rng.random() < 0.5:
                    for shard_id in list(victim.store.copies):
                        victim.store.remove(shard_id)

        with patch.object(WeightTree, "_copy", counted):
            async with run.started():
                killer = asyncio.create_task(keep_killing())
                for _ in range(settings.num_steps):
                    await run.step()
                killer.cancel()
                await run.check_end()

    run_virtual(scenario())
    assert pulls["nodes"] > pulls["trainers"]
    assert pulls["copies"] < pulls["nodes"] + pulls["trainers"], "none was killed in a pull"
