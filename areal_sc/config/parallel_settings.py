"""Which engine trains, how a model is spread over its ranks, and how many rollout workers come."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from areal_sc.config.fields import setting
from areal_sc.errors import ConfigError


class TrainEngineKind(StrEnum):
    """What trains.

    fsdp: PyTorch's FSDP2, for every family of transformers.
    megatron: Megatron-core, for some families.
    """

    fsdp = "fsdp"
    megatron = "megatron"


class Placement(StrEnum):
    """How training and generation share the GPUs.

    auto: apart or beside, as there are GPUs; in turns where they share some and do not both fit.
    apart: each has GPUs of its own.
    beside: they may use the same GPU at the same time, each a part of its memory.
    turns: they may use the same GPU one after the other, each all of its memory.
    """

    auto = "auto"
    apart = "apart"
    beside = "beside"
    turns = "turns"


@dataclass
class ParallelConfig:
    """How the model and its rows are spread over ranks, one process each."""

    data: int = setting(1, "shares of each minibatch that are computed at one time", ge=1)
    sequence: int = setting(
        1, "parts of each micro-batch's tokens; divides the attention heads", ge=1
    )
    tensor: int = setting(1, "parts of each layer; divides the attention heads", ge=1)
    pipeline: int = setting(1, "stages of consecutive layers; engine megatron alone", ge=1)
    virtual_pipeline: int = setting(
        1, "stages that each rank of a pipeline has; engine megatron alone", ge=1
    )
    expert: int = setting(
        1, "parts of the experts, over ranks that there are; engine megatron alone", ge=1
    )

    @property
    def model_ranks(self) -> int:
        """Processes that compute one share together."""
        return self.sequence * self.tensor * self.pipeline

    @property
    def num_ranks(self) -> int:
        """Processes that train one model."""
        return self.data * self.model_ranks

    def check_heads(self, heads: int, kv_heads: int) -> None:
        """Whether every rank gets whole attention heads of a model, equally many.

        Key-value heads that are fewer than ranks are copied, equally often.

        Raises: ConfigError: they do not come out even.
        """
        for name, size in (("tensor", self.tensor), ("sequence", self.sequence)):
            if heads % size or (kv_heads % size and size % kv_heads):
                within = f" of each tensor rank (tensor={self.tensor})" if name != "tensor" else ""
                raise ConfigError(
                    f"actor.parallel.{name}: expected a divisor of the model's {heads} attention "
                    f"heads{within}, and a divisor or a multiple of its {kv_heads} key-value "
                    f"heads{within}, got {size}"
                )
            heads, kv_heads = heads // size, max(1, kv_heads // size)


@dataclass
class AutoscaleConfig:
    """The run finds the number of rollout workers itself, from `rollout.num_workers` on."""

    min: int = setting(1, "fewest rollout workers", ge=1, idle=("max=0",))
    max: int = setting(0, "most rollout workers; 0: the number stays as it is", ge=0)
