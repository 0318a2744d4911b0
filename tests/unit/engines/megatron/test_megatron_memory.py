"""The dry run's estimate of a rank of Megatron-core against numbers worked out by hand."""

from __future__ import annotations

from areal_sc.config.parallel_settings import ParallelConfig, TrainEngineKind
from areal_sc.config.schema import ActorConfig
from areal_sc.engines.handles import MegatronPPOActor
from areal_sc.sizing.machine import Machine
from areal_sc.sizing.model_folder import ModelShape
from areal_sc.sizing.worker_plan import WorkerPlan

# Qwen3-30B-A3B: 48 layers of 128 experts, each three matrices of 768 x 2048
EXPERTS = 48 * 128 * 3 * 768 * 2048
ATTENTION = 2 * 4096 * 2048 + 2 * 512 * 2048
VOCABULARY = 151936 * 2048
OTHERS = 2 * VOCABULARY + 48 * (ATTENTION + 2 * 2048 + 2 * 128 + 128 * 2048) + 2048


def planned(shape: ModelShape, dtype: str, index: int = 0, **parallel: int) -> WorkerPlan:
    config = ActorConfig(
        engine=TrainEngineKind.megatron,
        path="model",
        dtype=dtype,
        parallel=ParallelConfig(**parallel),
    )
    (rank,) = MegatronPPOActor(config).plan_worker(index, shape, ["cuda:0"], Machine(None, (None,)))
    return rank


def test_experts_are_spread_over_their_own_ranks() -> None:
    assert EXPERTS + OTHERS == 30_532_122_624
    shape = ModelShape(
        num_parameters=EXPERTS + OTHERS,
        num_expert_parameters=EXPERTS,
        num_other_parameters=2 * VOCABULARY + 2048,
        num_vocabulary_parameters=VOCABULARY,
    )
    rank = planned(shape, "bfloat16", data=2, tensor=4, expert=8)
    assert rank.parameter_bytes == 6 * (OTHERS // 4 + EXPERTS // 8)
    largest_bytes = 4 * VOCABULARY // 4
    assert rank.optimizer_bytes == 12 * (EXPERTS + OTHERS) // 8 + largest_bytes
    assert rank.gathered_bytes == 2 * largest_bytes
    rank = planned(shape, "bfloat16", data=8, pipeline=2, expert=4)
    of_a_stage = (OTHERS - 2048) // 2  # with embeddings or output layer
    assert rank.parameter_bytes == 6 * (of_a_stage + EXPERTS // 4 // 2)
    states = 12 * (EXPERTS // 2 + of_a_stage) // 8
    assert rank.optimizer_bytes == states + 4 * VOCABULARY


def test_a_model_without_experts() -> None:
    rank = planned(ModelShape(num_parameters=1001), "float32", data=2, tensor=2, pipeline=2)
    assert rank.parameter_bytes == 8 * 250
    assert rank.optimizer_bytes == 8 * 125


def test_tied_embeddings_are_in_the_first_and_in_the_last_stage() -> None:
    shape = ModelShape(
        num_parameters=6000 + 101,
        num_other_parameters=101,
        num_vocabulary_parameters=100,
    )
    ranks = [planned(shape, "float32", rank, data=2, pipeline=3) for rank in range(6)]
    largest = [100, 100, 0, 0, 100, 100]
    assert [rank.parameter_bytes for rank in ranks] == [8 * (2000 + n) for n in largest]
    assert [rank.optimizer_bytes for rank in ranks] == [4 * (2000 + n) + 4 * n for n in largest]
    assert [rank.gathered_bytes for rank in ranks] == [8 * n for n in largest]
    assert planned(shape, "float32", tensor=2).gathered_bytes == 16 * 50  # two gradients
