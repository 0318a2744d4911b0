"""The real controllers over simulated workers, in virtual time, under random schedules.

`TrainingRun` checks at every step what all modes promise: eq. 3 at each admission, each group
trained once and none lost, no needed shard swept and no needless one kept. Here are the settings
that it is played with, and what each mode promises besides.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.behavior import Behavior, Number
from simulation.settings import Settings
from simulation.training_run import TrainingRun, play

from areal_sc.config.schema import AdmissionMode, KeepGroups, OverBound
from areal_sc.controller.rollout.rejections import EQUAL_REWARDS, ONE_EPISODE

MAX_GENERATION_S = 300.0
NOT_STALE = {"reward_error", EQUAL_REWARDS, ONE_EPISODE}


def lognormal(mean: float, sigma: float) -> Number:
    def draw(rng: random.Random) -> float:
        return min(MAX_GENERATION_S, mean * rng.lognormvariate(0.0, sigma))

    return draw


def up_to(limit: float) -> Number:
    return lambda rng: limit * rng.random()


behaviors = st.builds(
    Behavior,
    generation_s=st.builds(
        lognormal, st.sampled_from([0.1, 1.0, 4.0]), st.sampled_from([0.0, 0.6, 1.0, 2.0])
    ),
    completion_tokens=st.sampled_from([60, lambda rng: rng.randint(1, 60)]),
    training_s=st.builds(up_to, st.sampled_from([0.0, 2.0])),
    sealing_s=st.builds(up_to, st.sampled_from([0.0, 1.0])),
    publication_s=st.builds(up_to, st.sampled_from([0.0, 0.1, 1.0, 6.0])),
    evaluation_s=st.builds(up_to, st.sampled_from([0.1, 5.0])),
    latency_s=st.sampled_from([0.0, 0.001, 0.1]),
    reply_delay_s=st.builds(up_to, st.sampled_from([0.0, 1.0, 30.0])),
    sweep_delay_s=st.sampled_from([0.0, up_to(5.0)]),
    give_up_s=st.builds(up_to, st.sampled_from([0.0, 3.0])),
    group_rejection=st.sampled_from([0.0, 0.1, 0.4]),
    episode_rejection=st.sampled_from([0.0, 0.3]),
    episode_rows=st.sampled_from([1, 3, lambda rng: rng.randint(1, 3)]),
)


@st.composite
def runs(draw: st.DrawFn, over_bound: OverBound, max_eta: int = 5) -> Settings:
    workers = draw(st.integers(1, 3))
    batch_groups = draw(st.integers(1, 6))
    least_store = -(-batch_groups // workers)
    eta = draw(st.integers(0, max_eta))
    behavior = draw(behaviors)
    group_size = draw(st.integers(1, 3))
    # smaller groups, of which episodes are rejected, may have no signal for very long
    kept = st.sampled_from(KeepGroups) if group_size == 3 else st.just(KeepGroups.all)
    return Settings(
        num_steps=5 + 2 * eta,
        over_bound=over_bound,
        max_staleness=eta,
        batch_groups=batch_groups,
        group_size=group_size,
        keep_groups=draw(kept),
        num_rollout_workers=workers,
        num_ranks=draw(st.integers(1, 2)),
        num_minibatches=draw(st.integers(1, 3)),
        max_concurrent_groups=draw(st.sampled_from([1, 3, 40])),
        store_groups=draw(st.sampled_from([least_store, least_store + 1, 1000])),
        ends_at_last_step=draw(st.booleans()),
        evaluate_every=draw(st.sampled_from([0, 1, 3])),
        num_prompts=draw(st.sampled_from([1, 5, 1000])),
        seed=draw(st.integers(0, 2**32)),
        max_episode_tokens=0 if behavior.episode_rows == 1 else 3 * 64,
        behavior=behavior,
    )


def max_group_staleness(run: TrainingRun) -> int:
    return max(b.global_step - row.admitted_version for b in run.batches for row in b.rows)


def check_evaluations(run: TrainingRun) -> None:
    """With two workers or more, an evaluation is of one policy version, and a current one."""
    for _, outcome in run.evaluations:
        assert outcome.num_prompts == min(7, run.settings.num_prompts)
        if run.settings.num_rollout_workers > 1:
            assert outcome.versions[0] == outcome.versions[1]


@pytest.mark.slow
@settings(max_examples=25, derandomize=True)
@given(runs(OverBound.train))
def test_train(run_settings: Settings) -> None:
    run = play(run_settings)
    check_evaluations(run)
    assert set(run.rejected.values()) <= NOT_STALE


def test_without_a_bound_generation_runs_ahead_as_far_as_stores_allow() -> None:
    """Training is slow: with a bound of 2 no group is older than the steps that it allows."""
    oldest = []
    for bound in (2, None):
        run = play(
            Settings(
                num_steps=20,
                max_staleness=bound,
                admission=AdmissionMode.eager,
                behavior=Behavior(training_s=lambda _: 50.0),
            )
        )
        oldest.append(max_group_staleness(run))
    assert oldest[0] <= 3
    assert oldest[1] >= 10


@pytest.mark.slow
@settings(max_examples=25, derandomize=True)
@given(runs(OverBound.mask))
def test_mask(run_settings: Settings) -> None:
    run = play(run_settings)
    check_evaluations(run)
    for step in run.cluster.trained:
        assert step.min_token_versions == {step.version - run_settings.max_staleness}


@pytest.mark.slow
@settings(max_examples=25, derandomize=True)
@given(runs(OverBound.wait))
def test_wait(run_settings: Settings) -> None:
    run = play(run_settings)
    check_evaluations(run)
    assert max_group_staleness(run) <= run_settings.max_staleness
    assert set(run.rejected.values()) <= NOT_STALE, "nobody waits and is rejected as well"


@pytest.mark.slow
@settings(max_examples=25, derandomize=True)
@given(runs(OverBound.regenerate))
def test_regenerate(run_settings: Settings) -> None:
    run = play(run_settings)
    check_evaluations(run)
    assert max_group_staleness(run) <= run_settings.max_staleness


@pytest.mark.slow
@settings(max_examples=20, derandomize=True)
@given(st.sampled_from(list(OverBound)).flatmap(lambda mode: runs(mode, max_eta=0)))
def test_without_staleness_generation_and_training_take_turns(run_settings: Settings) -> None:
    """`TrainingRun` checks that each step has tokens of its own version only."""
    run = play(run_settings)
    sealed_at = {0: 0.0}
    for time_s, version in run.cluster.sealed_versions:
        sealed_at[version] = time_s  # the last rank's
    for start in run.cluster.starts:
        assert start.time_s >= sealed_at[start.admitted_version]
        assert start.worker_version == start.admitted_version


@pytest.mark.parametrize("mode", OverBound)
def test_episodes_of_several_rows_are_batched_and_trained_whole(mode: OverBound) -> None:
    """In stores that groups of the longest rows fill; `TrainingRun` checks the rest."""
    behavior = Behavior(
        generation_s=lognormal(4.0, 1.0),
        completion_tokens=60,
        episode_rejection=0.2,
        episode_rows=lambda rng: rng.randint(1, 3),
    )
    run = play(
        Settings(
            num_steps=12,
            over_bound=mode,
            group_size=3,
            num_ranks=2,
            num_minibatches=5,
            store_groups=3,
            max_episode_tokens=3 * 64,
            behavior=behavior,
        )
    )
    num_rows = {len(rows) for batch in run.batches for rows in batch.episodes}
    assert num_rows == {1, 2, 3}
    num_episodes = {len(batch.episodes) for batch in run.batches}
    assert len(num_episodes) > 1, "no episode was rejected"
    assert run.rollout.rejections.episodes["reward_error"] > 0


def slow_tail(mode: OverBound, seed: int) -> Settings:
    """Heavy-tailed lengths at a tight bound."""
    behavior = Behavior(generation_s=lognormal(4.0, 1.0))
    return Settings(num_steps=20, over_bound=mode, max_staleness=1, seed=seed, behavior=behavior)


@pytest.mark.parametrize("seed", range(3))
def test_the_schedules_reach_what_the_modes_are_for(seed: int) -> None:
    """Else the properties above would hold for want of a slow group."""
    runs = {mode: play(slow_tail(mode, seed)) for mode in OverBound}
    assert max_group_staleness(runs[OverBound.train]) > 1
    masked = [
        row.num_loss_tokens - row.num_loss_tokens_since(batch.min_token_version or 0)
        for batch in runs[OverBound.mask].batches
        for row in batch.rows
    ]
    assert sum(masked) > 0
    assert "stale" in runs[OverBound.regenerate].rejected.values()
    assert runs[OverBound.wait].duration_s > runs[OverBound.train].duration_s
