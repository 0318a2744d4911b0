"""A training run whose workers, agents and connections fail, and what must hold all the same.

The books are kept by the simulation itself: rows as the workers sealed them, steps as the ranks
made them. The ledger is compared with them, and never asked what is true.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from contextlib import AbstractContextManager
from statistics import fmean
from typing import Any
from unittest.mock import patch

from simulation.books import SLOWEST_MESSAGES_S
from simulation.faults import NO_DEATH, FaultKind, draw_faults_of_turns
from simulation.faulty_script import FaultyScript
from simulation.process import Process
from simulation.scenario import ALL_KINDS, DRAWN_KINDS, Scenario, draw_scenario
from simulation.store import RowKey, row_key
from simulation.virtual_loop import VirtualTimeLoop, run_virtual
from simulation.workers import SimulatedRolloutWorker

from areal_sc.config.parallel_settings import Placement
from areal_sc.config.schema import KeepGroups, WeightUpdateMethod
from areal_sc.controller.ledger import journal
from areal_sc.controller.ledger.ledger_records import WENT_BACK
from areal_sc.controller.rollout.groups import DEATHS_TO_BLAME
from areal_sc.controller.rollout.rejections import EQUAL_REWARDS, ONE_EPISODE
from areal_sc.errors import RunFolderError, StepsLost, WorkerError

SOFT = {FaultKind.scale, FaultKind.wall_clock, FaultKind.slow_disk, FaultKind.short_writes}
"""No group plays again because of these."""
OUT_OF_REACH = {
    FaultKind.partition,
    FaultKind.partition_one_way,
    FaultKind.partition_data,
    FaultKind.hang_rollout,
    FaultKind.hang_agent,
    FaultKind.suspend,
}
"""For so long that what a worker holds may be taken for lost."""
MAX_VIRTUAL_S = 3000.0
MAX_TURNS = 300_000
WALL_CLOCK_S = 1.7e9
FIRST_POLICY = (0, 0)
"""Lineage and version of the weights of the model's folder."""


class FaultRun(FaultyScript):
    """A run of one scenario, through all starts of its script."""

    @property
    def num_repeated_steps(self) -> int:
        """Steps that ranks made again after a death."""
        return len(self.cluster.trained) - len({step.version for step in self.cluster.trained})

    async def play(self) -> FaultRun:
        """The script is started again until it has made all steps."""
        asyncio.get_running_loop().set_exception_handler(self._note_broken_callback)
        try:
            with (
                super().watching(),
                patch.object(journal, "SEGMENT_BYTES", self.segment_bytes),
                patch.object(time, "time", lambda: WALL_CLOCK_S + self.faults.wall_clock_s),
            ):
                while (end := await self._live()) != "completed":
                    self.ends[end] += 1
                    await self._wait_for_start()
                    self._prepare_start()
        finally:
            super().clean_up()
        self.journal.check_end(self.rollout.groups.ledger)
        for task in self.stale:
            assert not task.done() or task.cancelled() or task.exception(), "it has gone on"
        for task in self.left_beside:
            _ = task.done() and (task.cancelled() or task.exception())
        assert not self.broken_callbacks, self.broken_callbacks
        return self

    async def _live(self) -> str:
        """One life of the script; tells how it has ended."""
        self.process = self.faults.controllers = Process(f"start {self.ends.total()}")
        self.process.on_await = self.faults.after_await
        self._superseded = asyncio.Event()
        script = self.process.create_task(self._begin(), "the script")
        outside = [
            asyncio.create_task(self.process.wait_for_death()),
            asyncio.create_task(self._superseded.wait()),
        ]
        await asyncio.wait([script, *outside], return_when=asyncio.FIRST_COMPLETED)
        for task in outside:
            task.cancel()
        if self.process.is_dead:
            return "killed"
        if self._superseded.is_set():
            self.stale.append(script)
            return "superseded"
        await self._end_beside()
        self._check_workers_ended()
        self.cluster.give_back()
        try:
            script.result()
        except WorkerError:  # workers that die in a start end it
            if self.phase not in ("taking over", "going back"):
                raise
            return "not started"
        except StepsLost:  # after the last one nobody goes back in place
            if self.phase != "end" or not self._has_lost_rows_of_a_step:
                raise
            return "lost their last steps"
        except RunFolderError as error:
            if not self.disk.num_failures or "cannot write" not in str(error):
                raise
            return "ended by their journal"
        is_failed = self.disk.is_broken or self.disk.room_bytes == 0
        assert not is_failed or not self.disk.num_failures, "nobody noticed"
        return "completed"

    def end_controllers(self, paused_s: float | None) -> None:
        """SIGKILL: what they had in memory is gone, and their connections end.

        Args:
            paused_s: they are only stopped, and go on after so long; another start begins.
        """
        if paused_s is not None:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualTimeLoop)
            loop.pause(self.process, paused_s)
            self._superseded.set()
            return
        self.process.kill()
        self.cluster.network.forget(self.process)
        self.disk.crash()

    async def _wait_for_start(self) -> None:
        """Somebody will give the command again, but not on a machine that is suspended."""
        wait_s = self.restart_s
        while True:
            await asyncio.sleep(wait_s)
            wait_s = self.cluster.asleep_until_s - self.cluster.now_s
            if wait_s <= 0.0:
                return

    def _prepare_start(self) -> None:
        """Somebody gives the same command again, maybe with other stores."""
        self.disk.repair()
        self._change_room()
        beside = (self._evaluation, self._snapshot)
        self.left_beside += [task for task in beside if task is not None]
        self._evaluation = self._snapshot = None

    def watching(self) -> AbstractContextManager[Any]:
        """All starts are watched at once."""
        return contextlib.nullcontext()

    def clean_up(self) -> None:
        """The folder stays, for the next start."""

    def _check_workers_ended(self) -> None:
        """However the run has ended, unless a fault may have kept the news from them."""
        if not {kind for kind, _ in self.faults.struck} - NO_DEATH - {FaultKind.lose_node}:
            left = [worker.name for worker in self.cluster.lives if worker.exit_status is None]
            assert not left, f"workers outlive the run: {left}"

    def check_restarts(self) -> None:
        """Nobody is started again whose life was not touched, and plays nothing again.

        Ranks are started again to go back. A start that is superseded ends its workers if its
        journal fails before its successor begins.
        """
        if self.has_other_room:
            return
        kinds = {kind for kind, _ in self.faults.struck}
        is_ended = bool(self.ends.keys() - {"killed", "superseded"}) or self.disk.num_failures
        if kinds - NO_DEATH or is_ended:
            return
        if 2 * self.slowest_s > self.cluster.config.heartbeat_interval_s:
            return  # several signs of life in a row may be so late that a worker is taken for lost
        lives = [life for life in self.cluster.lives if life.role == "rollout"]
        if not self.has_scaled:
            assert len(lives) == self.settings.num_rollout_workers, "workers were started again"
        if kinds <= SOFT:
            again = [start for start in self.cluster.starts if start.attempt]
            assert not again, f"{again} play again, and nobody was lost"
        played = Counter((start.group_id, start.incarnation) for start in self.cluster.starts)
        again = [group for (group, _), times in played.items() if times > 1 and group >= 0]
        assert not again, f"groups {again} are generated again, and their workers live"
        # of the last calls of a start some may reach one rank, and not the others
        is_last_call_partial = (
            FaultKind.succeed_controllers in kinds and len(self.cluster.train_workers) > 1
        )
        if FaultKind.kill_controllers not in kinds and not is_last_call_partial:
            assert not self.actor.num_restarts + self.num_retreats, "for no reason"

    def _note_broken_callback(self, _: Any, context: dict[str, Any]) -> None:
        self.broken_callbacks.append(repr(context))

    async def _check_stores_drain(self) -> None:
        """No rows are left: those of the steps are trained."""
        await asyncio.sleep(SLOWEST_MESSAGES_S)
        for worker in self.present_workers:
            left = dict(worker.store.group_of)
            assert not left, f"{worker.name} still holds {left}"

    def check_played_again(self) -> None:
        """What an episode gave is not played again while its memory is there.

        Finished groups whose rows cannot be read at their address any more play all again: so it is
        when workers end beside the script.
        """
        kinds = {kind for kind, _ in self.faults.struck}
        is_alone = not self.ends or (self.ends.keys() == {"killed"} and not kinds - NO_DEATH)
        if self.has_other_room or self.cluster.losses or not is_alone or kinds & OUT_OF_REACH:
            return
        again = self.cluster.played_again
        assert not again, f"episodes {again} (group, number) are played again"

    async def check_end(self) -> None:
        await super().check_end()
        self.check_history()
        self.check_played_again()
        num_staying = len(self.rollout._workers.set.staying)
        assert num_staying == self.num_wanted, f"{self.num_wanted} workers were asked for"
        for group_id, reason in self.rejected.items():
            attempts = {s.attempt for s in self.cluster.starts if s.group_id == group_id}
            is_to_blame = reason == "worker_died" and len(attempts) > DEATHS_TO_BLAME
            has_cause = is_to_blame or group_id in self.cluster.rejected_groups
            if reason in (EQUAL_REWARDS, ONE_EPISODE):
                has_cause = self._has_lacked_signal(group_id)
            assert has_cause or reason in ("stale", WENT_BACK), (
                f"group {group_id} is rejected as {reason}, and no worker said so"
            )
        for worker in self.cluster.lives:
            if isinstance(worker, SimulatedRolloutWorker):
                # those of the model's folder are version 0 of each lineage
                pairs = zip([FIRST_POLICY, *worker.policies], worker.policies, strict=False)
                later = [new for old, new in pairs if (new, old[1]) != (FIRST_POLICY, 0)]
                assert later == sorted(later), f"{worker.name} went back: {worker.policies}"

    def _has_lacked_signal(self, group_id: int) -> bool:
        """Whether the episodes of one of its attempts were all worth the same."""
        assert self.settings.keep_groups is KeepGroups.with_signal
        for (group, _), rows in self.cluster.sealed_rows.items():
            rewards: dict[int, list[float]] = {}
            for row in rows:
                rewards.setdefault(row.episode, []).append(row.reward)
            if group == group_id and len(set(map(fmean, rewards.values()))) == 1:
                return True
        return False

    def check_history(self) -> None:
        """Every rank has made each step once, in order, of exactly the rows of its batch."""
        heads = [rank for rank in self.cluster.train_workers if rank.is_head]
        for rank in heads:
            versions = [version for version, _ in rank.past]
            assert versions == sorted(versions), f"{rank.name}: {versions}"
        for batch in self.batches:
            trained: Counter[RowKey] = Counter()
            for rank in heads:
                for version, rows in rank.past:
                    trained.update(rows if version == batch.global_step else ())
            expected = Counter(map(row_key, batch.rows))
            assert trained == expected, (
                f"step {batch.global_step}: too much: {trained - expected}, missing: "
                f"{expected - trained}"
            )


def play(seed: int, kinds: tuple[FaultKind, ...] = ALL_KINDS) -> FaultRun:
    """Plays a seed in virtual time; the run is the same each time."""
    return _play(draw_scenario(seed, kinds))


def play_in_turns(seed: int) -> FaultRun:
    """The same on machines that have room for ranks, or for rollout workers, but not for both."""
    scenario = draw_scenario(seed, DRAWN_KINDS)  # the number of workers is fixed
    settings = scenario.settings
    settings.placement = Placement.turns
    scenario.faults.extend(draw_faults_of_turns(random.Random(f"turns {seed}")))
    if settings.weight_update is WeightUpdateMethod.collective:  # which needs both at one time
        settings.weight_update = WeightUpdateMethod.pull
    run = _play(scenario)
    assert not run.cluster.overfull, run.cluster.overfull
    return run


def _play(scenario: Scenario) -> FaultRun:
    run = FaultRun(scenario)
    return run_virtual(run.play(), max_virtual_s=MAX_VIRTUAL_S, max_turns=MAX_TURNS)
