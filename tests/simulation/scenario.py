"""What follows from a seed: the settings of a run, and its faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from simulation.behavior import Behavior
from simulation.faults import Fault, FaultKind, draw_faults, draw_scalings
from simulation.settings import Settings

from areal_sc.config.schema import AdmissionMode, KeepGroups, OverBound, WeightUpdateMethod

ALL_KINDS = tuple(FaultKind)
DRAWN_KINDS = tuple(kind for kind in FaultKind if kind is not FaultKind.scale)


@dataclass(frozen=True)
class Scenario:
    """All that one seed decides.

    Attributes:
        later_stores: `Settings.store_groups` of later starts of the script, in turn.
    """

    settings: Settings
    faults: list[Fault]
    duplication: float
    jitter_s: float
    snapshot_every: int
    segment_bytes: int
    restart_s: float
    later_stores: tuple[int, ...] = ()


def draw_scenario(seed: int, kinds: tuple[FaultKind, ...] = ALL_KINDS) -> Scenario:
    """Small settings, and some faults."""
    rng = random.Random(seed)
    num_workers, batch_groups = rng.randint(1, 3), rng.randint(1, 3)
    num_ranks = rng.randint(1, 2)
    is_on_one_node = num_ranks == 1 or num_workers < 3
    has_snapshots = is_on_one_node and rng.choice((False, True, True, True))
    least_store = -(-batch_groups // num_workers)
    generation_s, training_s = rng.choice((0.5, 2.0, 6.0)), rng.choice((0.5, 2.0, 4.0))
    behavior = Behavior(
        generation_s=lambda draw: generation_s * draw.choice((0.25, 0.5, 1.0, 2.0)),
        completion_tokens=lambda draw: draw.randint(1, 60),
        training_s=lambda draw: training_s * draw.choice((0.25, 0.5)),
        sealing_s=rng.choice((0.0, 0.25)),
        publication_s=rng.choice((0.0, 0.25, 1.0)),
        latency_s=rng.choice((0.0, 0.01, 0.25)),
        group_rejection=rng.choice((0.0, 0.0, 0.1, 0.3)),
        episode_rejection=rng.choice((0.0, 0.3)),
        evaluation_s=1.0,
        give_up_s=rng.choice((0.0, 0.5)),
    )
    settings = Settings(
        num_steps=rng.randint(4, 6),
        over_bound=rng.choice(list(OverBound)),
        max_staleness=rng.randint(0, 2),
        batch_groups=batch_groups,
        group_size=rng.randint(1, 2),
        num_rollout_workers=num_workers,
        num_ranks=num_ranks,
        num_minibatches=rng.randint(1, 2),
        max_concurrent_groups=rng.choice((2, 40)),
        store_groups=rng.choice((least_store, least_store + 1, 1000)),
        evaluate_every=rng.choice((0, 0, 2)),
        group_timeout_s=60.0,
        weight_update=rng.choice(list(WeightUpdateMethod)),
        weight_step_timeout_s=20.0,
        max_deaths=1000,
        memory_snapshots=has_snapshots,
        seed=rng.randrange(2**32),
        behavior=behavior,
    )
    horizon_s = 5.0 * settings.num_steps
    scenario = Scenario(
        settings=settings,
        faults=draw_faults(rng, tuple(kind for kind in kinds if kind in DRAWN_KINDS), horizon_s),
        duplication=rng.choice((0.0, 0.2)),
        jitter_s=rng.choice((0.0, 0.5, 1.0)),
        snapshot_every=rng.choice((0, 1, 2)),
        segment_bytes=rng.choice((500, 4 << 20)),
        restart_s=rng.choice((0.0, 1.0, 5.0, 60.0)),
    )
    settings.admission = rng.choice(list(AdmissionMode))
    settings.has_reference = random.Random(f"reference {seed}").random() < 0.25
    if random.Random(f"episodes {seed}").random() < 0.5:
        settings.group_size = 4  # some have ended when their worker dies
    if settings.group_size > 1 and random.Random(f"signal {seed}").random() < 0.25:
        settings.keep_groups = KeepGroups.with_signal
        settings.rejection_window = 1000  # chance alone has many in a row without signal
    if FaultKind.scale in kinds and seed % 2:
        # drawn apart, so that other seeds are what they were
        scenario.faults.extend(draw_scalings(random.Random(f"scale {seed}"), horizon_s))
    if seed % 3 == 0:
        room = random.Random(f"room {seed}")
        # a start may begin with the one worker that was scaled to, and is refused without a batch
        least = (
            batch_groups if any(f.kind is FaultKind.scale for f in scenario.faults) else least_store
        )
        stores = (least, least, least + 1, 1000)
        scenario = replace(scenario, later_stores=tuple(room.choices(stores, k=3)))
    return scenario
