"""Loading a Hugging Face causal language model and sharding it over the ranks with FSDP2."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from areal_sc.algorithms.logprobs import VocabularyPart
from areal_sc.config.schema import ActorConfig
from areal_sc.engines.fsdp.cuts import CutParts
from areal_sc.engines.fsdp.handle import needs_fsdp
from areal_sc.engines.fsdp.optimizer import local_part
from areal_sc.engines.fsdp.packed_model import PackedModel, probe_abilities, probe_hidden
from areal_sc.engines.fsdp.tensor_parallel import cut_model, plan_cuts, vocabulary_start
from areal_sc.engines.rotary import DYNAMIC, rope_limits
from areal_sc.engines.training.causal_lm import build_unfilled, compute_dtype, read_causal_lm
from areal_sc.engines.training.probe import TOLERANCES, require_agreement
from areal_sc.engines.training.process_group import ProcessGroups
from areal_sc.engines.training.sequence_parallel import SequencePart, check_sequence_parallel
from areal_sc.engines.training.whole_tensors import receive_part
from areal_sc.errors import ModelError

# Words in transformers' names of layers that pick the tokens with the highest scores.
_SELECTIVE_ATTENTION = ("indexed", "sparse", "compressed", "lsh")


def load_sharded_model(config: ActorConfig, groups: ProcessGroups) -> tuple[PackedModel, CutParts]:
    """The model of `config.path` with float32 parameters, spread over the ranks, in eval mode.

    Rank 0 alone reads the weights and sends every rank its part. Eval mode keeps dropout off:
    the policy that is trained must be the one that was sampled from, or the ratios mean nothing.

    Raises: ModelError, ConfigError: on every rank, when the folder cannot be used, or not on this
        mesh.
    """
    world = groups.world
    model = error = found = expected = None
    trained: set[str] = set()
    if world.rank == 0:
        try:
            model = PackedModel(read_causal_lm(config), chunk_tokens=config.logprob_chunk_tokens)
            _check_supported(model.causal_lm, config.max_tokens_per_micro_batch)
            found = model.abilities = probe_abilities(model, config.max_tokens_per_micro_batch)
            if groups.is_model_split:
                expected = probe_hidden(model, decoder_layers(model.causal_lm))
            named = model.causal_lm.named_parameters()
            trained = {name for name, p in named if p.requires_grad}
        except Exception as failure:  # the other ranks wait
            error = failure
    message, abilities, expected, trained = world.broadcast(
        (str(error) if error else None, found, expected, trained)
    )
    if message is not None:
        raise error or ModelError(message)
    if model is None:
        model = PackedModel(
            build_unfilled(Path(config.path)), chunk_tokens=config.logprob_chunk_tokens
        )
        for name, parameter in model.causal_lm.named_parameters():
            parameter.requires_grad_(name in trained)  # loading changes it, building does not
    model.abilities = abilities
    cuts = plan_cuts(model.causal_lm, groups.tensor.size, cuts_vocabulary=abilities.has_linear_head)
    check_sequence_parallel(model.causal_lm, config.parallel, packs=model.attends_by_interface)
    if config.activation_checkpointing:
        _checkpoint_layers(model.causal_lm)
    parts = CutParts(cuts, world.rank, groups.rows.size)
    if not needs_fsdp(world.size, config.dtype):
        return model.to(world.device), parts
    layers = decoder_layers(model.causal_lm)  # while they still have their own classes
    _spread(model, layers, parts, config, groups)
    if expected is not None:
        _check_spread(model, layers, expected, compute_dtype(config), groups)
    return model, parts


def _check_supported(causal_lm: Any, max_tokens: int) -> None:
    """Raises: ModelError: the log-probabilities of some rows are not well defined."""
    config, name = causal_lm.config.get_text_config(), type(causal_lm).__name__
    limit = rope_limits(config).get(DYNAMIC, max_tokens)
    if max_tokens > limit:
        raise ModelError(
            f"{name} has dynamic rotary embeddings, which are other ones for every length of a "
            f"row beyond {limit} tokens; expected actor.max_tokens_per_micro_batch of at most "
            f"{limit}, got {max_tokens}"
        )
    lists = [getattr(config, each, None) or () for each in ("layer_types", "attn_layers")]
    for layer_type in sorted({layer_type for each in lists for layer_type in each}):
        if any(word in layer_type for word in _SELECTIVE_ATTENTION):
            raise ModelError(
                f"{name} has layers of type {layer_type}: which tokens they attend to depends "
                "on rounding, so two forward passes do not agree"
            )


def decoder_layers(causal_lm: nn.Module) -> list[nn.Module]:
    """The repeated blocks in forward order, without blocks inside of blocks."""
    names = set(getattr(causal_lm, "_no_split_modules", None) or ())
    blocks = [module for module in causal_lm.modules() if type(module).__name__ in names]
    inner = {id(child) for block in blocks for child in block.modules() if child is not block}
    return [block for block in blocks if id(block) not in inner]


def _checkpoint_layers(causal_lm: nn.Module) -> None:
    """Wraps each layer's forward, inside of FSDP's hooks, to compute activations twice."""
    for layer in decoder_layers(causal_lm):
        layer.forward = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )


def _spread(
    model: PackedModel,
    layers: Sequence[nn.Module],
    parts: CutParts,
    config: ActorConfig,
    groups: ProcessGroups,
) -> None:
    """Leaves each rank its part. Each decoder layer is a unit of FSDP, the rest is the root's."""
    world, causal_lm = groups.world, model.causal_lm
    whole = {name: p.detach() for name, p in causal_lm.named_parameters()}
    buffers = dict(causal_lm.named_buffers())
    cut_model(causal_lm, parts.cuts, groups.tensor)
    if groups.tensor.size > 1:
        start = vocabulary_start(causal_lm, parts.cuts, groups.tensor.rank)
        if start is not None:
            model.vocabulary = VocabularyPart(start, groups.tensor.handle)
    if groups.sequence.size > 1:
        model.sequence = groups.sequence
    if needs_fsdp(groups.rows.size, config.dtype):
        mesh = DeviceMesh.from_group(
            groups.rows.torch_group, world.device.type, mesh_dim_names=("rows",)
        )
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype(config), reduce_dtype=torch.float32)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        # Temperatures, the only fractions among its arguments, are not rounded.
        policy = replace(policy, cast_forward_inputs=False)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    else:
        model.to(world.device)
    for name, parameter in causal_lm.named_parameters():
        source, target = whole.pop(name), local_part(parameter.detach())
        receive_part(target, source if world.rank == 0 else None, name, parts, world)
        del source
    for name, values in buffers.items():
        # Not in the weights file, e.g. rotary frequencies; rank 0's were made by its loading.
        received = world.broadcast(values.cpu() if world.rank == 0 else None)
        causal_lm.get_buffer(name).copy_(received)


def _check_spread(
    model: PackedModel,
    layers: Sequence[nn.Module],
    expected: torch.Tensor,
    dtype: torch.dtype,
    groups: ProcessGroups,
) -> None:
    """Raises: ModelError: on every rank: together they compute something else than rank 0 alone."""

    def measure() -> float:
        part, own_expected = probe_hidden(model, layers), expected
        if groups.sequence.size > 1:
            own = SequencePart(expected.shape[1], groups.sequence).own
            part, own_expected = part[:, : len(own)], expected[:, own.start : own.stop]
        return float((part - own_expected).norm() / expected.norm())

    require_agreement(
        measure,
        TOLERANCES[dtype],
        groups.world,
        quantity="difference of hidden states, relative to their norm",
        subject=f"{type(model.causal_lm).__name__} does not compute on "
        f"tensor={groups.tensor.size}, sequence={groups.sequence.size} ranks what it computes on "
        "one",
        advice="set actor.parallel.tensor=1 and actor.parallel.sequence=1, and more "
        "actor.parallel.data",
    )
    if isinstance(model, FSDPModule):
        model.reshard()  # its root stays whole after a forward without backward
