"""What a test notes of a run by itself, and what must agree with it.

The ledger is compared with these books, and never asked what is true.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np
from simulation.cluster import SimulatedCluster
from simulation.settings import Settings
from simulation.workers import SimulatedRolloutWorker

from areal_sc.config.schema import AdmissionMode, OverBound
from areal_sc.controller.ledger.ledger import Ledger
from areal_sc.controller.ledger.ledger_records import WENT_BACK, Admit, LedgerState, Record, Reject
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.controller.rollout.worker_set import NO_VERSION
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.metadata import BatchMetadata, PromptReference
from areal_sc.transport.shards.ids import parse_shard_id

SLOWEST_MESSAGES_S = 100.0

_BOOKS = ("batches", "admitted", "rejected", "undone", "trained_at")


class RunBooks:
    """The books of one run, and the checks of all that happens in it.

    Attributes:
        batches: that were given to the script, by version.
        admitted: prompt and version of each group, by id.
        rejected: group id -> reason.
        undone: groups, by going back.
        trained_at: group id -> the version that trained it.
        has_other_room: the stores have had room for another number of groups before.
    """

    actor: TrainController
    rollout: RolloutController

    def __init__(self, settings: Settings, cluster: SimulatedCluster) -> None:
        self.settings = settings
        self.cluster = cluster
        self.batches: list[BatchMetadata] = []
        self.admitted: list[tuple[PromptReference, int]] = []
        self.rejected: dict[int, str] = {}
        self.undone: set[int] = set()
        self.trained_at: dict[int, int] = {}
        self.has_other_room = False
        self._left_behind: tuple[int, dict[str, Any]] = (-1, {})
        self._lost: dict[int, tuple[PromptReference, int]] = {}
        cluster.on_forgotten = self.before_forgotten

    def watch_journal(self) -> None:
        """Each change of the ledger is told to these books before it is made."""
        rollout = self.rollout
        append = rollout._journal.append

        def watched(record: Record) -> None:
            if rollout is self.rollout:  # else a later start has taken the run over
                self.before_record(record)
            append(record)

        rollout._journal.append = watched  # type: ignore[method-assign]

    def watched_go_back(self) -> Callable[[Ledger, int, LedgerState], None]:
        """`Ledger.go_back`, which tells these books where the run goes back to."""
        go_back = Ledger.go_back

        def watched(ledger: Ledger, lineage: int, state: LedgerState) -> None:
            if ledger is self.rollout.groups.ledger and lineage > self._left_behind[0]:
                self._left_behind = lineage, {name: copy(getattr(self, name)) for name in _BOOKS}
            go_back(ledger, lineage, state)
            if ledger is self.rollout.groups.ledger:
                self.note_gone_back(state)

        return watched

    def note_gone_back(self, state: LedgerState) -> None:
        """What came after `state` is undone, and prompts that are not trained in it come again.

        A snapshot may know of groups of which the journal lost the admission.
        """
        num_known = len(self.admitted)
        self.admitted += [self._lost[number] for number in range(num_known, state.next_id)]
        waiting = {group.group_id for group in state.unconsumed}
        for group_id in range(len(self.admitted)):
            if group_id >= state.next_id or group_id in waiting:
                self.undone.add(group_id)
                self.rejected.setdefault(group_id, WENT_BACK)
                self.trained_at.pop(group_id, None)
        del self.batches[state.version :]
        trained = self.cluster.trained
        trained[:] = [step for step in trained if step.version < state.version]

    def forget_lost(self, found: Ledger) -> None:
        """The controllers have died, and their journal has lost what was not on the disk.

        Args:
            found: the ledger that is left.
        """
        lineage, books = self._left_behind
        if found.lineage < lineage:  # that they went back was lost, too
            for name, book in books.items():
                setattr(self, name, copy(book))
        state = found.snapshot()
        assert state.next_id <= len(self.admitted)
        self._lost |= dict(enumerate(self.admitted[state.next_id :], state.next_id))
        del self.admitted[state.next_id :]
        for book in (self.rejected, self.trained_at):
            for group_id in list(book):
                if group_id >= state.next_id or (
                    book is self.rejected and found.get(group_id) is not None
                ):
                    del book[group_id]
        self.undone = {group_id for group_id in self.undone if group_id in self.rejected}

    def before_record(self, record: Record) -> None:
        if isinstance(record, Admit):
            self.before_admission(record.prompt, record.version)
        elif isinstance(record, Reject):
            self.rejected[record.group_id] = record.reason

    def before_admission(self, prompt: PromptReference, version: int) -> None:
        """Eq. 3, counted by this book: floor(N / B) <= i + eta before the new group."""
        settings = self.settings
        assert version == self.rollout.version == self.actor.version
        self.before_announcement(version)
        num_counted = len(self.admitted) - len(self.rejected)
        assert num_counted // settings.batch_groups <= version + settings.bound
        num_unconsumed = len(self.admitted) - len(self.rejected) - len(self.trained_at)
        # of a lost worker's store only that is known of which a reply told, until it is back
        lost = [s for s in self.rollout._workers._states if s.member.failure is not None]
        # and one that has not come up in this start has no room yet, whatever it will adopt
        counted_apart = {state.name for state in lost}
        counted_apart |= {s.name for s in self.rollout._workers._states if not s.life.has_served}
        taken = sum(state.store.num_running + state.store.num_held for state in lost) + sum(
            len({run.group_id for run in worker.running} | set(worker.store.group_of.values()))
            for worker in self.present_workers
            if worker.name not in counted_apart
        )
        staying = [s for s in self.rollout._workers.set.staying if s.life.has_served]
        assert max(num_unconsumed, taken) < settings.store_groups * len(staying)
        self.check_loads()
        self.admitted.append((prompt, version))

    @property
    def present_workers(self) -> list[SimulatedRolloutWorker]:
        """Those that have not left."""
        names = {state.name for state in self.rollout._workers.set.states}
        return [worker for worker in self.cluster.rollout_workers if worker.name in names]

    def before_announcement(self, version: int) -> None:
        """Admission counts from this version."""

    def check_loads(self, num_promised: int | None = None) -> None:
        """What workers are chosen by is the sum of their stores' books, and within all limits."""
        states, loads = self.rollout._workers.set.states, self.rollout._workers.set.loads
        books = {s.number: (s.store.num_running, s.store.num_held) for s in states}
        counts = enumerate(zip(loads._running, loads._held, strict=True))
        assert all(count == books.get(number, (0, 0)) for number, count in counts)
        assert loads.num_stored == sum(running + held for running, held in books.values())
        assert all(loads._version[s.number] in (s.version, NO_VERSION) for s in states)
        taken = loads._running + loads._held + loads._promised
        num_nodes = len(loads._on_node)
        assert loads._on_node.tolist() == np.bincount(loads._node, taken, num_nodes).tolist()
        if not self.has_other_room:  # else stores may hold more than they would take now
            assert (taken <= loads.max_on_worker).all()
            assert (loads._on_node <= loads._max_on_node).all()
        assert num_promised is None or loads._promised.sum() == num_promised

    def before_forgotten(self, shard_id: str, group_id: int) -> None:
        """Its group is rejected, or was trained in a step that is over, or runs once more."""
        version = self.rollout.version
        is_over = group_id in self.rejected or self.trained_at.get(group_id, version) < version
        attempts = [a for group, a in self.cluster.shards_of if group == group_id]
        newest = max(attempts, default=-1)
        is_again = self._attempt(group_id) > newest
        is_lost = is_again or shard_id not in self.cluster.shards_of[group_id, newest]
        is_lost |= self.is_nobodys(shard_id, group_id, newest)
        assert group_id < 0 or is_over or is_lost, f"group {group_id} is needed: {shard_id}"

    def is_nobodys(self, shard_id: str, group_id: int, attempt: int) -> bool:
        """Its worker died, and nobody knows of it, or where it is now: the attempt is repeated."""
        incarnation, _ = parse_shard_id(shard_id)
        addresses = self.cluster.addresses
        living = [w for w in self.cluster.workers.values() if w.exit_status is None]
        if any(worker.incarnation == incarnation for worker in living):
            return False
        is_there = any(worker.address == addresses[incarnation] for worker in living)
        return not (is_there and self.rollout.groups.ledger.needs_rows(group_id, attempt))

    def _attempt(self, group_id: int) -> int:
        """The current one of a group that is not consumed yet."""
        groups = self.rollout.groups.ledger.unconsumed()
        return next((group.attempt for group in groups if group.group_id == group_id), 0)

    def check_batch(self, batch: BatchMetadata) -> None:
        settings, version = self.settings, len(self.batches) - 1
        assert batch.global_step == version
        assert len(batch.group_ids) == settings.batch_groups
        assert list(batch.group_ids) == sorted(batch.group_ids), "the oldest groups come first"
        attempts = {row.group_id: row.attempt for row in batch.rows}
        sealed = [row for key in attempts.items() for row in self.cluster.sealed_rows[key]]
        assert list(batch.rows) == sealed, "batches consist of whole groups"
        for row in batch.rows:
            assert row.admitted_version == self.admitted[row.group_id][1]
            # tokens are of versions that existed, none older than the group's admission
            assert row.admitted_version <= row.version_spans[0][0]
            assert row.version_spans[-1][0] <= version
        for group_id in batch.group_ids:
            assert group_id not in self.trained_at, f"group {group_id} is trained twice"
            assert group_id not in self.rejected, f"rejected group {group_id} is trained"
            self.trained_at[group_id] = version
        if settings.over_bound in (OverBound.wait, OverBound.regenerate):
            assert max(version - row.admitted_version for row in batch.rows) <= (settings.bound)
        is_masked = settings.over_bound is OverBound.mask
        bound = version - settings.bound if is_masked else None
        assert batch.min_token_version == bound
        if bound is not None:
            trainable = {r.group_id for r in batch.rows if r.num_loss_tokens_since(bound)}
            assert trainable == set(batch.group_ids), "a group without a trainable token"

    def check_stores(self, batch: BatchMetadata) -> None:
        """Right after a batch is formed, the stores hold what is still needed, and little else.

        What the step before has trained may still be on its way out; all before that is gone.
        """
        needed = {shard.shard_id for shard in batch.shards}
        for group in self.rollout.groups.ledger.unconsumed():
            if group.batch is not None and self.rollout._workers.are_rows_known(group.worker):
                needed |= {shard.shard_id for shard in group.batch.shards}
        held: dict[str, int] = {}
        for worker in self.cluster.rollout_workers:
            held |= worker.store.group_of
        assert needed <= held.keys()
        if self.settings.behavior.sweep_delay_s or self.rollout.num_restarts:
            return
        for shard_id in held.keys() - needed:
            trained_at = self.trained_at.get(held[shard_id], batch.global_step)
            assert trained_at >= batch.global_step - 1, (
                f"group {held[shard_id]}, trained at {trained_at}, is still held at version "
                f"{batch.global_step}"
            )

    def check_step_was_trained(self, batch: BatchMetadata) -> None:
        step = self.cluster.trained[-1]
        assert step.version == batch.global_step
        assert step.min_token_versions == {batch.min_token_version}
        expected = Counter((row.group_id, row.sequence_length) for row in batch.rows)
        assert Counter((row.group_id, row.sequence_length) for row in step.rows) == expected
        episodes = [{(r.group_id, r.episode) for r in rows} for rows in step.minibatches.values()]
        sizes = [len(of_minibatch) for of_minibatch in episodes]
        assert sum(sizes) == len(batch.episodes), "an episode lies in two minibatches"
        assert len(sizes) == min(self.settings.num_minibatches, len(batch.episodes))
        assert max(sizes) - min(sizes) <= 1
        if self.settings.bound == 0:
            assert {span[0] for row in step.rows for span in row.version_spans} == {step.version}
            assert step.num_running_groups == 0, "generation goes on while a step is trained"

    def check_generation_is_busy(self) -> None:
        """After a publication nothing waits for admission that the lead and the limits allow."""
        settings, account = self.settings, self.rollout.groups.ledger.account()
        num_counted = len(self.admitted) - len(self.rejected)
        lead = self.rollout.groups.admission.lead
        is_eager = settings.admission is AdmissionMode.eager
        assert lead == settings.bound if is_eager else 0 <= lead <= settings.bound
        limit = int((self.actor.version + lead + 1) * settings.batch_groups)
        if settings.ends_at_last_step:
            limit = min(limit, settings.num_steps * settings.batch_groups)
        num_open = account["queued"] + account["running"]
        assert (
            num_counted >= limit
            or num_open >= settings.max_concurrent_groups
            or settings.store_groups < 100
        ), f"{num_counted} groups are admitted, {limit} may be"

    async def check_end(self) -> None:
        """The account is complete, and matches this book and the workers' state."""
        self.check_loads(num_promised=0 if self.settings.ends_at_last_step else None)
        account = self.rollout.groups.ledger.account()
        num_trained = sum(batch.total_batch_size for batch in self.batches)
        assert account["admitted"] == len(self.admitted)
        assert account["consumed"] == len(self.trained_at)
        assert account["consumed"] == self.settings.num_steps * self.settings.batch_groups
        assert account["rejected"] == dict(Counter(self.rejected.values()))
        assert account["rows_consumed"] == account["rows_trained"] == num_trained
        assert account["rows_trained_twice"] == 0
        if self.settings.ends_at_last_step:
            assert account["queued"] + account["running"] + account["finished"] == 0
            await self._check_stores_drain()
        await self._check_prompts()
        for start in self.cluster.starts:
            assert start.worker_version >= start.admitted_version

    async def _check_stores_drain(self) -> None:
        """No rows are needed any more, so none are left, whatever was given up."""
        await asyncio.sleep(SLOWEST_MESSAGES_S)
        for worker in self.present_workers:
            store = worker.store
            assert set(store.sizes) == set(store.copies), f"{worker.name} holds {store.group_of}"
            assert len(store.copies) <= 1, f"{worker.name} holds {store.copies}"

    async def _check_prompts(self) -> None:
        """Every prompt taken from the stream was admitted; a stale group's prompt comes again."""
        state = (await self.rollout.state_async()).training
        waiting = Counter(prompt.index for prompt in state.returned_prompts)
        num_stale = Counter(
            self.admitted[g][0].index
            for g, reason in self.rejected.items()
            if reason == "stale" or g in self.undone
        )
        admitted = Counter(prompt.index for prompt, _ in self.admitted)
        taken = (admitted - num_stale + waiting).total()
        assert taken == state.num_prompts_taken or self.settings.choose_prompts != "all"
        if state.num_prompts_taken <= self.settings.num_prompts:
            assert max((admitted - num_stale + waiting).values()) == 1
