"""Megatron-core's decoder as a function from packed rows to log-probabilities."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from areal_sc.algorithms.logprobs import VocabularyPart, chunked_logprobs
from areal_sc.config.schema import ActivationCheckpointing, ActorConfig
from areal_sc.engines.megatron.family import ModelSizes
from areal_sc.engines.megatron.layers import ReplayedRoutes, RowsParams, layer_specs, replay_routes
from areal_sc.engines.megatron.mapping import own_vocabulary, padded_vocabulary
from areal_sc.engines.training.causal_lm import compute_dtype
from areal_sc.engines.training.process_group import memory_of
from areal_sc.engines.training.updates.micro_batches import MicroBatch
from areal_sc.engines.training.updates.minibatch_loss import Outputs
from areal_sc.sizing.output_layer import chunk_tokens
from areal_sc.sizing.routed_experts import RoutedExperts

_CUT_LAYERS = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)


class Rotary(NamedTuple):
    """The rotary embeddings of a Hugging Face model.

    Attributes:
        frequencies: [head_dim / 2] float32: by how much each pair of features turns from token to
            token.
        scale: a factor of queries and keys (YaRN's).
    """

    frequencies: torch.Tensor
    scale: float

    @classmethod
    def of(cls, causal_lm: Any) -> Rotary:
        """The rotary embeddings of a model whose frequencies do not depend on lengths; it needs no
        values."""
        rotary = type(causal_lm.base_model.rotary_emb)(causal_lm.config)
        return cls(rotary.inv_freq.clone(), float(rotary.attention_scaling))  # no buffer


def transformer_config(
    config: ActorConfig, sizes: ModelSizes, rotary: Rotary, device: torch.device
) -> TransformerConfig:
    """What Megatron-core is told of the model and its mesh.

    Fusions need kernels of CUDA's; without that of rotary embeddings Megatron-core waits for the
    device and goes through the rows one by one, twice a layer. The loss that the engine gives is
    divided by nothing.
    """
    parallel, dtype, on_gpu = config.parallel, compute_dtype(config), device.type == "cuda"
    further: dict[str, Any] = {}
    if sizes.num_experts:
        further |= {
            "num_moe_experts": sizes.num_experts,
            "moe_layer_freq": [int(layer.has_experts) for layer in sizes.layers],
            "moe_ffn_hidden_size": sizes.expert_width,
            "moe_router_topk": sizes.experts_per_token,
            "moe_router_pre_softmax": not sizes.normalizes_experts,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_token_dispatcher_type": "allgather",
        }
    if sizes.window:
        further |= {
            "window_size": (sizes.window - 1, 0),  # before and behind the token
            "window_attn_skip_freq": [int(layer.has_window) for layer in sizes.layers],
        }
    if config.activation_checkpointing is ActivationCheckpointing.layers:
        further |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden,
        ffn_hidden_size=sizes.feed_forward,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.kv_heads,
        kv_channels=sizes.head_dim,
        softmax_scale=sizes.head_dim**-0.5 * rotary.scale**2,
        normalization="RMSNorm",
        layernorm_epsilon=sizes.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=sizes.family.has_qkv_bias,
        qk_layernorm=sizes.family.normalizes_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.tensor > 1,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=virtual_stages(config),
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        use_cpu_initialization=not on_gpu,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        masked_softmax_fusion=False,
        apply_rope_fusion=on_gpu,
        persist_layer_norm=False,
        batch_p2p_comm=False,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        **further,
    )


def virtual_stages(config: ActorConfig) -> int | None:
    """Stages that each rank of a pipeline has; None: one."""
    return config.parallel.virtual_pipeline if config.parallel.virtual_pipeline > 1 else None


class PackedGPT(GPTModel):  # type: ignore[misc]
    """One stage of the decoder.

    Args:
        config: for Megatron-core.
        actor: settings of the engine.
        chunk: which of this rank's stages; None: it has one.
        device: of this rank.
        experts: of a model that replays routes.
    """

    def __init__(
        self,
        config: TransformerConfig,
        actor: ActorConfig,
        sizes: ModelSizes,
        rotary: Rotary,
        chunk: int | None,
        device: torch.device,
        experts: RoutedExperts | None,
    ) -> None:
        is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk)
        is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk)
        super().__init__(
            config,
            layer_specs(config, chunk, on_gpu=device.type == "cuda"),
            vocab_size=padded_vocabulary(sizes, actor.parallel),
            max_sequence_length=actor.max_tokens_per_micro_batch,
            pre_process=is_first,
            post_process=is_last,
            share_embeddings_and_output_weights=sizes.is_tied,
            position_embedding_type="rope",
            vp_stage=chunk,
        )
        if experts is not None:
            for layer in self.decoder.layers:
                replay_routes(layer, experts)
        # those of the Hugging Face model, which knows more ways to scale them
        self.rotary_pos_emb.inv_freq = rotary.frequencies.to(device)
        self._is_tied = sizes.is_tied
        tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        own = own_vocabulary(sizes, actor.parallel, tensor_rank)
        self._num_own_tokens = len(own)
        self._chunk_tokens = chunk_tokens(
            actor.logprob_chunk_tokens, len(own), device.type, memory_of(device)
        )
        self._vocabulary = None
        if actor.parallel.tensor > 1:
            group = parallel_state.get_tensor_model_parallel_group()
            self._vocabulary = VocabularyPart(own.start, group)

    def forward(
        self,
        batch: MicroBatch,
        temperatures: torch.Tensor | None,
        routes: ReplayedRoutes | None,
    ) -> torch.Tensor | Outputs:
        """Hidden states for the next stage; of the last stage what is asked of the tokens.

        Args:
            batch: of a stage behind the first one, `input_ids` do not count.
            temperatures: [N] > 0, of the asked tokens; None: 1.
            routes: that the tokens go through; None: routers choose.
        Returns: [T, 1, H], with tensor ranks each one's part of T; or `Outputs`.
        """
        hidden: torch.Tensor = super().forward(
            batch.input_ids[None],
            batch.layout.position_ids,
            None,
            packed_seq_params=RowsParams.of(batch.layout, routes),
        )
        if not self.post_process:
            return hidden
        if self._vocabulary is not None:
            # each rank gets the whole gradient of the hidden states by `VocabularyPart`
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        layer = self.shared_embedding_or_output_weight() if self._is_tied else None
        weight = self.output_layer.weight if layer is None else layer
        if self._num_own_tokens < len(weight):  # the rest is padding
            weight = weight[: self._num_own_tokens]
        logprobs, entropy = chunked_logprobs(
            hidden[:, 0][batch.positions],
            weight,
            batch.targets,
            temperatures=temperatures,
            chunk_tokens=self._chunk_tokens,
            vocabulary=self._vocabulary,
        )
        return logprobs, entropy

    def _postprocess(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """In place of Megatron-core's logits of all tokens."""
        return hidden_states


def build_stages(
    config: TransformerConfig,
    actor: ActorConfig,
    sizes: ModelSizes,
    rotary: Rotary,
    device: torch.device,
    experts: RoutedExperts | None,
) -> list[DistributedDataParallel]:
    """This rank's stages, without values, with one buffer for all gradients of a stage."""
    chunks = [None] if virtual_stages(actor) is None else range(actor.parallel.virtual_pipeline)
    of_gradients = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True
    )
    stages = []
    for chunk in chunks:
        model = PackedGPT(config, actor, sizes, rotary, chunk, device, experts).to(device)
        assert math.prod(model.rotary_pos_emb.inv_freq.shape) * 2 == sizes.head_dim
        _mark_cut_parameters(model)
        stages.append(DistributedDataParallel(config, of_gradients, model))
    return stages


def _mark_cut_parameters(model: PackedGPT) -> None:
    """Tells Megatron-core which parameters are no copies of other tensor ranks'.

    It marks them when it draws their values, which nothing here needs, and counts copies once in
    the norm of the gradients.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, _CUT_LAYERS) and weight is not None:
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            if not getattr(weight, "tensor_model_parallel", False):
                set_tensor_model_parallel_attributes(weight, True, dim, 1)
