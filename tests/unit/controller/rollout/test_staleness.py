"""Admission and batch forming, one decision at a time."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_sc.config.schema import OverBound
from areal_sc.controller.ledger.group import Group, GroupState
from areal_sc.controller.rollout.staleness import StalenessPolicy, StalenessStats
from areal_sc.metadata import BatchMetadata, PromptReference, RowMetadata

QUEUED, RUNNING, FINISHED = GroupState.queued, GroupState.running, GroupState.finished


def group(
    group_id: int,
    admitted_version: int,
    state: GroupState,
    spans: tuple[tuple[int, int], ...] | None = None,
) -> Group:
    made = Group(group_id, PromptReference(0, group_id, 0), admitted_version, state=state)
    if state is FINISHED:
        spans = spans or ((admitted_version, 4),)
        row = RowMetadata(group_id, 0, 10, 1.0, admitted_version, spans, 0)
        made.batch = BatchMetadata(f"g{group_id}", 0, (), (row,))
    return made


def ids(groups: list[Group] | None) -> list[int] | None:
    return None if groups is None else [group.group_id for group in groups]


@pytest.mark.parametrize("eta", range(4))
@pytest.mark.parametrize("batch_groups", [1, 3, 8])
def test_admission_is_eq_3_of_the_paper(eta: int, batch_groups: int) -> None:
    policy = StalenessPolicy(eta, batch_groups, OverBound.train)
    for version in range(4):
        for n in range((version + eta + 2) * batch_groups):
            # floor((N_r - 1) / B) <= i + eta, where N_r counts the new group too
            may_be_admitted = ((n + 1) - 1) // batch_groups <= version + eta
            num_admissible = policy.num_admissible(version, n)
            assert (num_admissible > 0) == may_be_admitted
            assert policy.num_admissible(version, n + num_admissible) == 0


def test_without_staleness_one_batch_is_admitted_per_version() -> None:
    policy = StalenessPolicy(0, 4, OverBound.train)
    assert policy.num_admissible(0, 0) == 4
    assert policy.num_admissible(0, 4) == 0
    assert policy.num_admissible(1, 4) == 4


def test_train_takes_the_oldest_finished_groups() -> None:
    policy = StalenessPolicy(1, 2, OverBound.train)
    groups = [
        group(0, 0, RUNNING),
        group(1, 0, FINISHED),
        group(2, 5, QUEUED),
        group(3, 5, FINISHED),
        group(4, 5, FINISHED),
    ]
    decision = policy.form_batch(reversed(groups), 9)
    assert (ids(decision.groups), decision.stale) == ([1, 3], [])
    assert decision.num_missing == 0

    decision = policy.form_batch(groups[:3], 9)
    assert (decision.groups, decision.num_missing) == (None, 1)


def test_mask_rejects_only_groups_without_a_trainable_token() -> None:
    policy = StalenessPolicy(2, 2, OverBound.mask)
    groups = [
        group(0, 3, FINISHED, ((3, 5), (7, 9))),
        group(1, 3, FINISHED, ((3, 5), (8, 1))),
        group(2, 3, RUNNING),
        group(3, 9, FINISHED),
    ]
    assert policy.min_token_version(10) == 8
    decision = policy.form_batch(groups, 10)
    assert (ids(decision.stale), ids(decision.groups)) == ([0], [1, 3])
    assert policy.expired(groups, 10) == []

    decision = policy.form_batch(groups[:3], 10)
    assert (ids(decision.stale), decision.groups) == ([0], None)
    assert decision.num_missing == 1


def test_one_row_with_a_trainable_token_keeps_its_group() -> None:
    mixed = group(0, 0, FINISHED)
    rows = tuple(RowMetadata(0, 0, 9, 0.0, 0, ((version, 3),), 0) for version in (0, 5))
    mixed.batch = BatchMetadata("g0", 0, (), rows)
    assert ids(StalenessPolicy(1, 1, OverBound.mask).form_batch([mixed], 6).groups) == [0]


def test_regenerate_rejects_what_is_past_its_deadline_in_every_state() -> None:
    policy = StalenessPolicy(2, 2, OverBound.regenerate)
    groups = [
        group(0, 3, FINISHED),
        group(1, 3, RUNNING),
        group(2, 3, QUEUED),
        group(3, 4, FINISHED),
        group(4, 4, RUNNING),
        group(5, 6, FINISHED),
    ]
    assert ids(policy.expired(groups, 6)) == [0, 1, 2]
    decision = policy.form_batch(groups, 6)
    assert (ids(decision.stale), ids(decision.groups)) == ([0, 1, 2], [3, 5])
    assert policy.min_token_version(6) is None


def test_wait_holds_the_batch_until_the_due_group_is_in_it() -> None:
    policy = StalenessPolicy(1, 2, OverBound.wait)
    groups = [
        group(0, 4, RUNNING),  # deadline 5: due now
        group(1, 5, FINISHED),
        group(2, 5, FINISHED),
        group(3, 5, FINISHED),
    ]
    decision = policy.form_batch(groups, 5)
    assert (decision.groups, decision.num_missing) == (None, 1)
    groups[0] = group(0, 4, FINISHED)
    assert ids(policy.form_batch(groups, 5).groups) == [0, 1]


def test_wait_looks_ahead_of_the_next_deadline() -> None:
    """Three groups due at version 6 and two slots a version: one must be trained at version 5."""
    policy = StalenessPolicy(2, 2, OverBound.wait)
    due_next = [group(0, 4, RUNNING), group(1, 4, RUNNING), group(2, 4, RUNNING)]
    young = [group(3, 5, FINISHED), group(4, 5, FINISHED)]
    decision = policy.form_batch([*due_next, *young], 5)
    assert (decision.groups, decision.num_missing) == (None, 1)
    due_next[1] = group(1, 4, FINISHED)
    assert ids(policy.form_batch([*due_next, *young], 5).groups) == [1, 3]


def test_wait_under_a_bound_tightened_since_admission_sheds_what_is_past_it() -> None:
    policy = StalenessPolicy(1, 1, OverBound.wait)
    decision = policy.form_batch([group(0, 3, RUNNING), group(1, 6, FINISHED)], 6)
    assert (ids(decision.stale), ids(decision.groups)) == ([0], [1])


def test_wait_with_smaller_batches_since_admission_trains_what_fits() -> None:
    policy = StalenessPolicy(1, 1, OverBound.wait)
    groups = [group(group_id, 5, FINISHED) for group_id in range(4)]
    assert ids(policy.form_batch(groups, 5).groups) == [0]
    assert ids(policy.form_batch(groups[1:], 6).groups) == [1]
    assert ids(policy.form_batch(groups[2:], 7).stale) == [2, 3]


@st.composite
def reachable_wait_states(draw: st.DrawFn) -> tuple[int, int, list[Group]]:
    """eta, B and groups with n_k <= (k+1) B at version `eta`: the state that wait keeps."""
    eta, batch_groups = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    num_groups = draw(st.integers(0, min(9, (eta + 1) * batch_groups)))
    # at most B groups of deadline <= version, 2 B of deadline <= version + 1, ...
    slack = sorted(draw(st.integers(rank // batch_groups, eta)) for rank in range(num_groups))
    states = [draw(st.sampled_from([RUNNING, FINISHED, FINISHED])) for _ in slack]
    groups = [group(g, k, state) for g, (k, state) in enumerate(zip(slack, states, strict=True))]
    return eta, batch_groups, groups


@settings(max_examples=400, derandomize=True)
@given(reachable_wait_states(), st.integers(0, 2**32))
def test_wait_waits_only_when_no_choice_of_finished_groups_would_do(
    state: tuple[int, int, list[Group]], seed: int
) -> None:
    """Against trying every choice of B finished groups."""
    eta, size, groups = state
    version = eta  # so that slack k is admission version k
    required = [sum(g.admitted_version <= k for g in groups) - k * size for k in range(eta + 1)]
    finished = [g for g in groups if g.state is FINISHED]

    def would_do(choice: tuple[Group, ...]) -> bool:
        return all(
            sum(g.admitted_version <= k for g in choice) >= required[k] for k in range(eta + 1)
        )

    exists = any(would_do(choice) for choice in itertools.combinations(finished, size))
    policy = StalenessPolicy(eta, size, OverBound.wait)
    random.Random(seed).shuffle(groups)
    decision = policy.form_batch(groups, version)
    assert decision.stale == []
    assert (decision.groups is not None) == exists
    if decision.groups is not None:
        assert len(decision.groups) == size
        assert would_do(tuple(decision.groups))
        assert all(g.state is FINISHED for g in decision.groups)
        return
    assert decision.num_missing > 0
    # as long as any fewer than num_missing of the others finish, nothing changes
    running = [g for g in groups if g.state is RUNNING]
    for names in itertools.combinations(running, decision.num_missing - 1):
        more = [*finished, *names]
        assert not any(would_do(choice) for choice in itertools.combinations(more, size))
    if len(groups) >= size:
        assert decision.num_missing <= len(running)


def test_stats_of_a_batch_by_hand() -> None:
    rows = [
        RowMetadata(0, 0, 30, 1.0, 2, ((2, 10), (4, 6)), 0),
        RowMetadata(0, 0, 20, 0.0, 2, ((3, 4),), 0),
        RowMetadata(1, 0, 20, 0.0, 5, ((5, 20), (6, 0)), 0),
    ]
    stats = StalenessStats.of(rows, 6)
    assert stats.token_mean == pytest.approx((4 * 10 + 2 * 6 + 3 * 4 + 1 * 20) / 40)
    assert (stats.token_max, stats.group_max, stats.group_mean) == (4, 4, 2.5)
    assert (stats.num_tokens_trained, stats.num_tokens_masked) == (40, 0)

    stats = StalenessStats.of(rows, 6, min_token_version=4)
    assert stats.token_mean == pytest.approx((2 * 6 + 1 * 20) / 26)
    assert (stats.token_max, stats.group_max, stats.group_mean) == (2, 4, 2.5)
    assert (stats.num_tokens_trained, stats.num_tokens_masked) == (26, 14)


def test_stats_without_rows_or_tokens_are_zero() -> None:
    assert StalenessStats.of([], 3) == StalenessStats(0.0, 0, 0.0, 0, 0, 0)
    nothing_trained = [RowMetadata(0, 0, 5, 0.0, 1, ((1, 4),), 0)]
    stats = StalenessStats.of(nothing_trained, 3, min_token_version=2)
    assert (stats.token_mean, stats.token_max, stats.num_tokens_masked) == (0.0, 0, 4)
