"""Admission, ledger and batch forming together, under random schedules.

A discrete-event run drives the real `Ledger` and `StalenessPolicy`: generation of random length,
rejected groups, results that come late, restarts of the controller, publications that reach workers
late. What must hold is checked against books that the test keeps itself.
"""

from __future__ import annotations

import heapq
import itertools
import random
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_sc.config.schema import OverBound
from areal_sc.controller.ledger.group import Group, GroupState
from areal_sc.controller.ledger.ledger import Ledger
from areal_sc.controller.ledger.ledger_records import LedgerState, Record
from areal_sc.controller.ledger.ledger_replay import replay
from areal_sc.controller.rollout.staleness import StalenessPolicy, StalenessStats
from areal_sc.metadata import BatchMetadata, PromptReference, RowMetadata

MAX_EVENTS = 30_000


@dataclass(frozen=True)
class Scenario:
    over_bound: OverBound
    eta: int
    batch_groups: int
    slots: int
    seed: int
    sigma: float  # of the lognormal generation time
    mean_batches_in_flight: float  # generation time of a group, in training steps
    p_reject: float
    p_restart: float
    publication_lag: int  # versions that a worker may be behind

    @property
    def num_steps(self) -> int:
        return 6 + 2 * self.eta


def scenarios(over_bound: OverBound, max_eta: int = 6) -> st.SearchStrategy[Scenario]:
    return st.builds(
        Scenario,
        over_bound=st.just(over_bound),
        eta=st.integers(0, max_eta),
        batch_groups=st.integers(1, 8),
        slots=st.integers(1, 32),
        seed=st.integers(0, 2**32),
        sigma=st.sampled_from([0.0, 0.6, 1.0, 2.0]),
        mean_batches_in_flight=st.sampled_from([0.1, 1.0, 4.0]),
        p_reject=st.sampled_from([0.0, 0.05, 0.4]),
        p_restart=st.sampled_from([0.0, 0.02]),
        publication_lag=st.integers(0, 2),
    )


class Run:
    """One run of a scenario; `trained` lists (version, groups' metadata) in order."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.random = random.Random(scenario.seed)
        self.policy = StalenessPolicy(scenario.eta, scenario.batch_groups, scenario.over_bound)
        self.ledger = Ledger()
        self.begin_journal()
        self.version = 0
        self.published = [0.0]  # when each version became current
        self.now = 0.0
        self.events: list[tuple[float, int, str, int, int, float]] = []
        self.order = itertools.count()
        self.training: list[RowMetadata] | None = None
        # the test's own books
        self.admitted_at: dict[int, int] = {}
        self.consumed_at: dict[int, int] = {}
        self.rejected: Counter[str] = Counter()
        self.rejected_ids: set[int] = set()
        self.num_rows = 0
        self.num_ignored = 0
        self.trained: list[tuple[int, list[RowMetadata]]] = []

    def play(self) -> Run:
        for _ in range(MAX_EVENTS):
            if self.version == self.scenario.num_steps:
                return self
            self.train()
            self.check_account()
            self.admit()
            self.start()
            self.check_account()
            assert self.events, f"nothing more happens at version {self.version}: a deadlock"
            self.happen(*heapq.heappop(self.events))
            if self.random.random() < self.scenario.p_restart:
                self.restart()
        raise AssertionError(f"version {self.version} after {MAX_EVENTS} events: a livelock")

    def admit(self) -> None:
        while self.policy.num_admissible(self.version, self.ledger.num_admitted_not_rejected) and (
            self.ledger.num(GroupState.queued) + self.ledger.num(GroupState.running)
            < self.scenario.slots
        ):
            n = len(self.admitted_at) - len(self.rejected_ids)
            assert n // self.scenario.batch_groups <= self.version + self.scenario.eta
            prompt = PromptReference(0, len(self.admitted_at), self.scenario.seed)
            group = self.ledger.admit(prompt, self.version)
            assert group.group_id not in self.admitted_at
            self.admitted_at[group.group_id] = self.version
        at_limit = self.scenario.batch_groups * (self.version + self.scenario.eta + 1)
        n = len(self.admitted_at) - len(self.rejected_ids)
        busy = self.ledger.num(GroupState.queued) + self.ledger.num(GroupState.running)
        assert n == at_limit or busy >= self.scenario.slots, "a group that may be admitted is not"

    def start(self) -> None:
        free = self.scenario.slots - self.ledger.num(GroupState.running)
        queued = [g for g in self.ledger.unconsumed() if g.state is GroupState.queued]
        for group in queued[:free]:
            attempt = self.ledger.start(group.group_id, f"rollout/{self.random.randrange(4)}")
            step_time = self.scenario.mean_batches_in_flight
            duration = step_time * self.random.lognormvariate(0.0, self.scenario.sigma)
            self.schedule(duration, "finish", group.group_id, attempt, self.now)

    def schedule(self, delay: float, kind: str, group_id: int, attempt: int, since: float) -> None:
        event = (self.now + delay, next(self.order), kind, group_id, attempt, since)
        heapq.heappush(self.events, event)

    def happen(
        self, time: float, order: int, kind: str, group_id: int, attempt: int, since: float
    ) -> None:
        self.now = time
        if kind == "trained":
            assert self.training is not None
            self.ledger.record_trained(self.training)
            self.trained.append((self.version, self.training))
            self.training = None
            self.version += 1
            self.ledger.publish(self.version)
            self.ledger.release(self.version - 1)
            self.published.append(self.now)
            return
        current = self.is_current(group_id, attempt)
        if current and self.random.random() < self.scenario.p_reject:
            self.reject(group_id, "reward_error")
        else:
            accepted = self.ledger.finish(group_id, attempt, self.rows(group_id, attempt, since))
            assert accepted == current
            self.num_ignored += not accepted

    def is_current(self, group_id: int, attempt: int) -> bool:
        if group_id in self.consumed_at or group_id in self.rejected_ids:
            return False
        group = self.ledger._unconsumed[group_id]
        return group.state is GroupState.running and group.attempt == attempt

    def rows(self, group_id: int, attempt: int, since: float) -> BatchMetadata:
        """One to three rows; each token by the version that its worker had at its time."""
        admitted = self.admitted_at[group_id]
        rows = []
        for episode in range(self.random.randint(1, 3)):
            num_tokens = self.random.randint(1, 20)
            end = since + (self.now - since) * self.random.random()
            lag = self.random.randint(0, self.scenario.publication_lag)
            versions: Counter[int] = Counter()
            for t in range(num_tokens):
                time = since + (end - since) * (t + 1) / num_tokens
                versions[max(admitted, bisect_right(self.published, time) - 1 - lag)] += 1
            spans = tuple(sorted(versions.items()))
            rows.append(
                RowMetadata(group_id, attempt, num_tokens + 4, 1.0, admitted, spans, episode)
            )
        return BatchMetadata(f"g{group_id}.{attempt}", 0, (), tuple(rows))

    def reject(self, group_id: int, reason: str) -> None:
        self.ledger.reject(group_id, reason)
        self.rejected_ids.add(group_id)
        self.rejected[reason] += 1

    def train(self) -> None:
        """What the controller does while the trainer waits for a batch."""
        if self.training is not None:
            return
        unconsumed = list(self.ledger.unconsumed())
        decision = self.policy.form_batch(unconsumed, self.version)
        for group in decision.stale:
            self.check_stale(group)
            self.reject(group.group_id, "stale")
        if decision.groups is None:
            assert decision.num_missing > 0
            return
        assert len(decision.groups) == self.scenario.batch_groups
        ids = [group.group_id for group in decision.groups]
        self.check_oldest_first(ids, unconsumed)
        batches = self.ledger.consume(ids, self.version)
        self.training = [row for batch in batches for row in batch.rows]
        assert [i for i, _ in itertools.groupby(r.group_id for r in self.training)] == ids
        for group_id in ids:
            assert group_id not in self.consumed_at, "a group is trained twice"
            assert group_id not in self.rejected_ids, "a rejected group is trained"
            self.consumed_at[group_id] = self.version
        self.num_rows += len(self.training)
        self.schedule(self.random.uniform(0.5, 1.5), "trained", -1, -1, 0.0)

    def check_stale(self, group: Group) -> None:
        bound = self.version - self.scenario.eta
        if self.scenario.over_bound is OverBound.mask:
            assert group.state is GroupState.finished
            assert group.batch is not None
            spans = [span for row in group.batch.rows for span in row.version_spans]
            assert all(version < bound for version, _ in spans)
        else:
            assert self.scenario.over_bound is OverBound.regenerate, "nothing is ever stale here"
            assert self.admitted_at[group.group_id] < bound

    def check_oldest_first(self, ids: list[int], unconsumed: list[Group]) -> None:
        finished = [g.group_id for g in unconsumed if g.state is GroupState.finished]
        assert ids == finished[: len(ids)], "an older finished group was passed over"

    def check_account(self) -> None:
        account = self.ledger.account()
        in_flight = account["queued"] + account["running"] + account["finished"]
        assert account["admitted"] == len(self.admitted_at)
        assert account["consumed"] == len(self.consumed_at)
        assert account["rejected"] == dict(self.rejected)
        assert in_flight == len(self.admitted_at) - len(self.consumed_at) - len(self.rejected_ids)
        expected = self.admitted_at.keys() - self.consumed_at.keys() - self.rejected_ids
        assert [g.group_id for g in self.ledger.unconsumed()] == sorted(expected)
        num_trained = sum(len(rows) for _, rows in self.trained)
        assert (account["rows_consumed"], account["rows_trained"]) == (self.num_rows, num_trained)
        assert account["rows_trained_twice"] == 0

    def begin_journal(self) -> None:
        """The state of the ledger, and all changes from here on, as they would lie on the disk."""
        self.base = msgspec.msgpack.encode(self.ledger.snapshot())
        self.records: list[bytes] = []
        self.ledger.journal = lambda record: self.records.append(msgspec.msgpack.encode(record))

    def restart(self) -> None:
        """The controller dies with all workers; a new one has the journal."""
        again = Ledger.restore(msgspec.msgpack.decode(self.base, type=LedgerState))
        replay(again, [msgspec.msgpack.decode(record, type=Record) for record in self.records])
        assert again.snapshot() == self.ledger.snapshot()
        self.ledger = again
        self.begin_journal()
        for group in self.ledger.unconsumed():
            self.ledger.requeue(group.group_id, "restart")
        # the running step is finished by the trainer; some workers were only thought to be dead
        self.events = [e for e in self.events if e[2] == "trained" or self.random.random() < 0.5]
        heapq.heapify(self.events)

    def check_nothing_left(self) -> None:
        """Without further admission, every group still in flight comes to an end."""
        self.restart()
        for group in list(self.ledger.unconsumed()):
            self.ledger.reject(group.group_id, "end")
        account = self.ledger.account()
        assert account["admitted"] == account["consumed"] + sum(account["rejected"].values())


def check_batches(run: Run) -> None:
    """What every mode promises."""
    scenario = run.scenario
    assert [version for version, _ in run.trained] == list(range(scenario.num_steps))
    for version, rows in run.trained:
        assert len({row.group_id for row in rows}) == scenario.batch_groups
        if scenario.eta == 0:
            assert {row.admitted_version for row in rows} == {version}
    trained = Counter(g for _, rows in run.trained for g in {row.group_id for row in rows})
    assert set(trained.values()) == {1}
    assert trained.keys() == run.consumed_at.keys()
    run.check_nothing_left()


def max_group_staleness(run: Run) -> int:
    return max(version - row.admitted_version for version, rows in run.trained for row in rows)


@pytest.mark.slow
@settings(max_examples=250, derandomize=True)
@given(scenarios(OverBound.train))
def test_train_holds_eq_3_and_trains_everything(scenario: Scenario) -> None:
    run = Run(scenario).play()
    check_batches(run)
    assert run.policy.min_token_version(run.version) is None
    assert run.rejected["stale"] == 0


@pytest.mark.slow
@settings(max_examples=250, derandomize=True)
@given(scenarios(OverBound.mask))
def test_mask_never_trains_a_token_over_the_bound(scenario: Scenario) -> None:
    run = Run(scenario).play()
    check_batches(run)
    for version, rows in run.trained:
        bound = run.policy.min_token_version(version)
        assert bound == version - scenario.eta
        stats = StalenessStats.of(rows, version, bound)
        assert stats.token_max <= scenario.eta
        for group_id in {row.group_id for row in rows}:
            group_rows = [row for row in rows if row.group_id == group_id]
            assert sum(row.num_loss_tokens_since(bound) for row in group_rows) > 0


@pytest.mark.slow
@settings(max_examples=500, derandomize=True)
@given(scenarios(OverBound.wait))
def test_wait_never_trains_a_group_over_the_bound_and_goes_on(scenario: Scenario) -> None:
    run = Run(scenario).play()
    check_batches(run)
    assert max_group_staleness(run) <= scenario.eta
    assert run.rejected["stale"] == 0


@pytest.mark.slow
@settings(max_examples=250, derandomize=True)
@given(scenarios(OverBound.regenerate))
def test_regenerate_never_trains_a_group_over_the_bound(scenario: Scenario) -> None:
    run = Run(scenario).play()
    check_batches(run)
    assert max_group_staleness(run) <= scenario.eta


def heavy_tail(over_bound: OverBound, seed: int) -> Scenario:
    """Slow groups among fast ones, so that the bound is reached in every mode."""
    return Scenario(
        over_bound=over_bound,
        eta=1,
        batch_groups=4,
        slots=8,
        seed=seed,
        sigma=2.0,
        mean_batches_in_flight=2.0,
        p_reject=0.1,
        p_restart=0.0,
        publication_lag=0,
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_schedules_reach_what_the_modes_are_for(seed: int) -> None:
    """Else the properties above would hold for want of a slow group."""
    runs = {mode: Run(heavy_tail(mode, seed)).play() for mode in OverBound}
    assert max_group_staleness(runs[OverBound.train]) > 1
    assert any(
        StalenessStats.of(rows, version, version - 1).num_tokens_masked
        for version, rows in runs[OverBound.mask].trained
    )
    assert runs[OverBound.regenerate].rejected["stale"] > 0
    assert runs[OverBound.wait].now > runs[OverBound.train].now
    assert sum(run.num_ignored for run in runs.values()) > 0
