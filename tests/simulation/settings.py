"""What a simulated run is made of, and the configurations that follow."""

from __future__ import annotations

from dataclasses import dataclass, field

from simulation.behavior import Behavior

from areal_sc.config.parallel_settings import AutoscaleConfig, ParallelConfig, Placement
from areal_sc.config.ppo_settings import PPOConfig
from areal_sc.config.schema import (
    ENDLESS_VERSIONS,
    ActorConfig,
    AdmissionMode,
    Dtype,
    GenerationConfig,
    KeepGroups,
    OptimizerConfig,
    OverBound,
    RolloutConfig,
    WeightUpdateConfig,
    WeightUpdateMethod,
)
from areal_sc.sizing.store_room import trajectory_bytes


@dataclass
class Settings:
    """What a run is made of; `store_groups` is each rollout store's limit in worst-case groups."""

    num_steps: int = 8
    over_bound: OverBound = OverBound.train
    max_staleness: int | None = 2
    admission: AdmissionMode = AdmissionMode.just_in_time
    keep_groups: KeepGroups = KeepGroups.all
    choose_prompts: str = "all"
    batch_groups: int = 4
    group_size: int = 2
    num_rollout_workers: int = 2
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    num_ranks: int = 1
    model_size: int = 1
    num_minibatches: int = 2
    max_concurrent_groups: int = 64
    store_groups: int = 1000
    max_context_tokens: int = 64
    max_episode_tokens: int = 0
    max_rejection_rate: float = 1.0
    rejection_window: int = 20
    group_timeout_s: float = 50_000.0
    ends_at_last_step: bool = True
    evaluate_every: int = 0
    weight_update: WeightUpdateMethod = WeightUpdateMethod.pull
    placement: Placement = Placement.auto
    weight_step_timeout_s: float = 600.0
    num_prompts: int = 1000
    memory_snapshots: bool = True
    max_deaths: int = 5
    has_reference: bool = False
    is_reference_frozen: bool = True
    seed: int = 0
    behavior: Behavior = field(default_factory=Behavior)

    @property
    def bound(self) -> int:
        return ENDLESS_VERSIONS if self.max_staleness is None else self.max_staleness

    @property
    def group_bytes(self) -> int:
        episode_tokens = self.max_episode_tokens or self.max_context_tokens
        return self.group_size * trajectory_bytes(episode_tokens)


def configs(settings: Settings) -> tuple[ActorConfig, RolloutConfig]:
    """The sections of a configuration, their `${...}` replaced."""
    weight_update = WeightUpdateConfig(
        settings.weight_update, folder="weights", step_timeout_s=settings.weight_step_timeout_s
    )
    actor = ActorConfig(
        path="/no/model",
        parallel=ParallelConfig(
            data=settings.num_ranks // settings.model_size, tensor=settings.model_size
        ),
        seed=settings.seed,
        optimizer=OptimizerConfig(total_steps=settings.num_steps),
        ppo=PPOConfig(num_minibatches=settings.num_minibatches),
        memory_snapshots=settings.memory_snapshots,
        weight_update=weight_update,
    )
    rollout = RolloutConfig(
        path="/no/model",
        generation=GenerationConfig(),
        dtype=Dtype.float32,
        num_workers=settings.num_rollout_workers,
        autoscale=settings.autoscale,
        seed=settings.seed,
        train_batch_groups=settings.batch_groups,
        group_size=settings.group_size,
        max_staleness=settings.max_staleness,
        over_bound=settings.over_bound,
        admission=settings.admission,
        keep_groups=settings.keep_groups,
        choose_prompts=settings.choose_prompts,
        max_concurrent_groups=settings.max_concurrent_groups,
        max_context_tokens=settings.max_context_tokens,
        max_episode_tokens=settings.max_episode_tokens,
        store_bytes=settings.store_groups * settings.group_bytes,
        group_timeout_s=settings.group_timeout_s,
        max_rejection_rate=settings.max_rejection_rate,
        rejection_window=settings.rejection_window,
        weight_update=weight_update,
        placement=settings.placement,
    )
    return actor, rollout
