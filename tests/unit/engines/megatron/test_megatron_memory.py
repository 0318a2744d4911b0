"""The dry run's estimate of a rank of Megatron-core against numbers worked out by hand."""

from __future__ import annotations

from areal_sc.config.machine import Machine
from areal_sc.config.model_folder import ModelShape
from areal_sc.config.parallel_settings import ParallelConfig, TrainEngineKind
from areal_sc.config.schema import ActorConfig
from areal_sc.config.worker_plan import WorkerPlan
from areal_sc.engines.handles import MegatronPPOActor

# Qwen3-30B-A3B: 48 layers of 128 experts, each three matrices of 768 x 2048
EXPERTS = 48 * 128 * 3 * 768 * 2048
ATTENTION = 2 * 4096 * 2048 + 2 * 512 * 2048
OTHERS = 2 * 151936 * 2048 + 48 * (ATTENTION + 2 * 2048 + 2 * 128 + 128 * 2048) + 2048


def planned(shape: ModelShape, dtype: str, **parallel: int) -> WorkerPlan:
    config = ActorConfig(
        engine=TrainEngineKind.megatron,
        path="model",
        dtype=dtype,
        parallel=ParallelConfig(**parallel),
    )
    (rank,) = MegatronPPOActor(config).plan_worker(0, shape, ["cuda:0"], Machine())
    return rank


def test_experts_are_spread_over_their_own_ranks() -> None:
    assert EXPERTS + OTHERS == 30_532_122_624
    shape = ModelShape(num_parameters=EXPERTS + OTHERS, num_expert_parameters=EXPERTS)
    rank = planned(shape, "bfloat16", data=2, tensor=4, expert=8)
    assert rank.parameter_bytes == 6 * (OTHERS // 4 + EXPERTS // 8)
    assert rank.optimizer_bytes == 12 * (EXPERTS + OTHERS) // 8
    rank = planned(shape, "bfloat16", data=8, pipeline=2, expert=4)
    assert rank.parameter_bytes == 6 * (OTHERS // 2 + EXPERTS // 4 // 2)
    assert rank.optimizer_bytes == 12 * (EXPERTS + OTHERS) // 16


def test_a_model_without_experts() -> None:
    rank = planned(ModelShape(num_parameters=1001), "float32", data=2, tensor=2, pipeline=2)
    assert rank.parameter_bytes == 8 * 251  # rounded up
    assert rank.optimizer_bytes == 8 * 126
