"""The decoder's layers: Megatron-core's own on a CPU, TransformerEngine's on a GPU.

Megatron-core's own attention refuses packed rows, and its norms sequence parallelism, so both are
this module's. **The specification for GPUs has never been run.**
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import nn

from areal_sc.engines.plain_attention import AttentionRule
from areal_sc.engines.routers import ExpertChoice, count_other_experts
from areal_sc.engines.training.packed_attention import PackedLayout, attend_rows
from areal_sc.errors import ModelError
from areal_sc.sizing.routed_experts import RoutedExperts


@dataclass
class ReplayedRoutes:
    """The experts of the tokens that this rank routes, of one micro-batch.

    Attributes:
        experts: [T, L, k], see `Routers.given`.
        is_counted: [T] bool, tokens of which it counts whether routers would choose otherwise.
        others: by layer, see `count_other_experts`.
    """

    experts: torch.Tensor
    is_counted: torch.Tensor
    others: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class RowsParams(PackedSeqParams):  # type: ignore[misc]
    """What Megatron-core hands to each layer, the layout of the same rows, and their routes."""

    layout: PackedLayout | None = None
    routes: ReplayedRoutes | None = None

    @classmethod
    def of(cls, layout: PackedLayout, routes: ReplayedRoutes | None) -> RowsParams:
        longest = max(layout.lengths)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=layout.row_starts,
            cu_seqlens_kv=layout.row_starts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            layout=layout,
            routes=routes,
        )


class RowAttention(nn.Module):
    """Causal attention within each packed row, of this rank's heads."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, softmax_scale: float, **_: Any
    ) -> None:
        super().__init__()
        window = None
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            window = config.window_size[0] + 1  # Megatron-core does not count the token itself
        self.rule = AttentionRule(softmax_scale, window)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: RowsParams,
        **_: Any,
    ) -> torch.Tensor:
        """[T, H * D] of `query` [T, H, D], and `key` and `value` [T, H_kv, D]."""
        assert attention_mask is None
        assert packed_seq_params.layout is not None
        return attend_rows(query, key, value, self.rule, packed_seq_params.layout).flatten(1)


class RMSNorm(nn.Module):
    """The norm of the families of `family`: divides by the root mean square, in float32.

    With sequence parallelism each tensor rank normalises some tokens; the mark on the weight lets
    Megatron-core add up the ranks' gradients.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        exact = hidden.float()
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (exact * scale).to(hidden.dtype)


def layer_specs(
    config: TransformerConfig, chunk: int | None, *, on_gpu: bool
) -> TransformerBlockSubmodules:
    """The layers of one stage of a pipeline, and the norm behind the last one.

    Args:
        chunk: which of this rank's stages; None: it has one.
        on_gpu: TransformerEngine's layers, whose norms belong to the linear layers behind them.
    """
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=on_gpu, normalization="RMSNorm", vp_stage=chunk
    )
    if on_gpu:
        return block
    for spec in block.layer_specs:  # layers of a kind are one object
        layer, attention = spec.submodules, spec.submodules.self_attention.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
        attention.core_attention = RowAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    block.layer_norm = RMSNorm
    return block


def replay_routes(layer: Any, experts: RoutedExperts) -> None:
    """Lets tokens go through the experts that the layer gets in `RowsParams.routes`.

    The layer gets them anew when its forward is computed again, whichever micro-batch was the last
    one to go forward.

    Raises: in a forward: ModelError: the router does not make its choice where it can be replaced.
    """
    router = getattr(layer.mlp, "router", None)
    if router is None:
        return
    choose, number = router.forward, layer.layer_number - 1
    last = list[ReplayedRoutes | None]()

    def take(_: Any, args: Any, settings: dict[str, Any]) -> None:
        last[:] = [settings["packed_seq_params"].routes]

    def route(*args: Any, **settings: Any) -> Any:
        (routes,) = last
        given = None if routes is None else routes.experts[:, number].long()
        with ExpertChoice(experts, given) as choice:
            outputs = choose(*args, **settings)
        if len(choice.own) != 1:
            raise ModelError(
                "actor.routing_replay: this Megatron-core does not choose experts by one "
                "torch.topk; take actor.engine=fsdp"
            )
        if routes is not None and given is not None and number not in routes.others:
            its = count_other_experts(given, choice.own[0], routes.is_counted)
            routes.others[number] = its  # where it is computed again, it has counted
        return outputs

    layer.register_forward_pre_hook(take, with_kwargs=True)
    router.forward = route
