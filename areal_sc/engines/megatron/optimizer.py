"""Megatron-core's distributed optimizer: AdamW of which each share of the rows has a part.

The gradients of a stage lie in one flat buffer, and a rank of `data` updates a range of it. So the
optimizer state of a parameter is one contiguous range of its flat values; several ranks may hold
parts of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from areal_sc.config.optimizer_settings import OptimizerConfig
from areal_sc.engines.loss_scale import LossScale
from areal_sc.engines.megatron.adam_state import MOMENTS, make_state, set_num_updates
from areal_sc.engines.training.learning_rate import check_schedule, learning_rate

PARAMETER = "parameter"
KINDS = (PARAMETER, *MOMENTS)
"""What there is of each parameter: its values in float32, and AdamW's state."""


class _OptimizerShard(NamedTuple):
    """What this rank updates of a parameter: a range of its flat values.

    Attributes:
        values: [stop - start] float32, of each of `KINDS`; live.
    """

    start: int
    stop: int
    values: dict[str, torch.Tensor]


class DistributedAdamW:
    """AdamW over the buffers of some stages; weights decay, norms and biases do not.

    Attributes:
        num_updates: optimizer updates so far.
    Raises: ConfigError: the learning rate falls, and nothing says over how many steps.
    """

    def __init__(
        self,
        stages: Sequence[DistributedDataParallel],
        config: OptimizerConfig,
        dtype: torch.dtype,
    ) -> None:
        check_schedule(config)
        self.config = config
        self._stages = stages
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.max_grad_norm,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        chained = get_megatron_optimizer(settings, list(stages), use_gloo_process_groups=False)
        self._optimizer = chained
        self._parts = [part for part in chained.chained_optimizers if not part.is_stub_optimizer]
        self._shards = {id(p): shard for part in self._parts for p, shard in _shards_of(part)}
        self.num_updates = 0
        self.loss_scale: LossScale | None = None  # the loss is not scaled
        parameters = [parameter for stage in stages for parameter in stage.module.parameters()]
        self._whole = torch.empty(
            max(parameter.numel() for parameter in parameters),
            dtype=torch.float32,
            device=parameters[0].device,
        )

    @property
    def num_updates(self) -> int:
        return self._num_updates

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        self._num_updates = number
        for part in self._parts:
            set_num_updates(part.optimizer, number)

    def clear_gradients(self) -> None:
        for stage in self._stages:
            stage.zero_grad_buffer()
        self._optimizer.zero_grad()

    def update(self, step: int, config: OptimizerConfig) -> float:
        """One step at the learning rate of training step `step`, of gradients that are added up.

        Args: config: of this step.
        Returns: the global gradient norm before clipping. Where it is not finite, no step is
            taken, so that the weights survive; nor where it is 0, so that neither momentum nor
            decay moves them.
        """
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if norm == 0 or not math.isfinite(norm):
            return norm
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
            group["betas"], group["eps"] = (config.beta1, config.beta2), config.eps
        for part in self._parts:
            if config.max_grad_norm > 0 and (held := part.get_parameters()):
                clip_grad_by_total_norm_fp32(held, config.max_grad_norm, norm)
        self._optimizer.step_with_ready_grads()
        self._num_updates += 1
        return norm

    def whole(self, kind: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        """All that the ranks of `data` have of one of `KINDS`, with the parameter's shape.

        All ranks that have the parameter make the call. It needs no new memory, so none of them
        fails alone for lack of it.

        Returns: the live values, or a view of the one buffer for all parameters.
        """
        if kind == PARAMETER and parameter.dtype == torch.float32:
            return parameter.detach()
        whole = self._whole[: parameter.numel()].zero_()
        if (shard := self._shards.get(id(parameter))) is not None:
            whole[shard.start : shard.stop].copy_(shard.values[kind])
        group = _data_group(parameter)
        if dist.get_world_size(group) > 1:
            dist.all_reduce(whole, group=group)
        return whole.view(parameter.shape)

    def change(
        self, kind: str, parameter: torch.nn.Parameter, fill: Callable[[torch.Tensor], None]
    ) -> None:
        """Changes some values of one of `KINDS`, as far as this rank has them.

        Args:
            fill: sets them in a tensor with the parameter's shape.
        """
        if kind == PARAMETER:
            fill(parameter.detach())
        if (shard := self._shards.get(id(parameter))) is not None:
            whole = self._whole[: parameter.numel()]
            own = whole[shard.start : shard.stop]
            own.copy_(shard.values[kind])
            fill(whole.view(parameter.shape))
            shard.values[kind].copy_(own)


def _shards_of(part: Any) -> list[tuple[torch.nn.Parameter, _OptimizerShard]]:
    """Each parameter of which this rank updates something; AdamW's state is made at once."""
    found = []
    pairs = (
        *zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True),
        *zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True),
    )
    for parameters, shards in pairs:
        for parameter, shard in zip(parameters, shards, strict=True):
            state = make_state(part.optimizer, shard)
            own = part._get_model_param_range_map(parameter)["param"]
            values = {PARAMETER: shard.detach(), **{kind: state[kind] for kind in MOMENTS}}
            found.append((parameter, _OptimizerShard(own.start, own.end, values)))
    return found


def _data_group(parameter: torch.nn.Parameter) -> dist.ProcessGroup:
    """Ranks that have the same values of a parameter."""
    if getattr(parameter, "allreduce", True):
        found: dist.ProcessGroup = parallel_state.get_data_parallel_group(
            with_context_parallel=True
        )
    else:
        found = parallel_state.get_expert_data_parallel_group()
    return found
