"""Loading a Hugging Face causal language model and sharding it over the ranks with FSDP2."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from areal_sc.algorithms.logprobs import VocabularyPart
from areal_sc.config.schema import ActivationCheckpointing, ActorConfig, Dtype, ModelHead
from areal_sc.engines.fsdp.ability_probe import ModelTrial, probe_abilities, probe_model
from areal_sc.engines.fsdp.cuts import CutParts
from areal_sc.engines.fsdp.gradient_reduction import InPlaceReduceScatter
from areal_sc.engines.fsdp.handle import check_pictures, needs_fsdp, rounds_copies
from areal_sc.engines.fsdp.launches import host_is_limit
from areal_sc.engines.fsdp.optimizer import local_part
from areal_sc.engines.fsdp.packed_model import PackedModel
from areal_sc.engines.fsdp.rounded_copies import RoundedCopies
from areal_sc.engines.fsdp.tensor_parallel import cut_model, plan_cuts, vocabulary_start
from areal_sc.engines.fsdp.units import check_units
from areal_sc.engines.fsdp.vocabulary import look_up_whole, spread_vocabulary
from areal_sc.engines.picture_inputs import freeze_tower, pictures_of_folder
from areal_sc.engines.rotary import DYNAMIC, rope_limits
from areal_sc.engines.rounding import Expected
from areal_sc.engines.training.adapters.lora import (
    add_adapters,
    is_of_adapter,
    targeted,
    without_adapters,
)
from areal_sc.engines.training.causal_lm import (
    build_without_parameters,
    compute_dtype,
    read_causal_lm,
)
from areal_sc.engines.training.loading import SharedWeights
from areal_sc.engines.training.probe import require_agreement
from areal_sc.engines.training.process_group import ProcessGroup, ProcessGroups, memory_of
from areal_sc.engines.training.sequence_parallel import SequencePart, check_sequence_parallel
from areal_sc.engines.training.stored_weights import ModelWeights
from areal_sc.engines.training.streamed_layers import decoder_layers, stream_layers
from areal_sc.errors import ModelError
from areal_sc.sizing.output_layer import chunk_tokens, kept_tokens

logger = logging.getLogger(__name__)

_KEPT_OPERATIONS = frozenset(
    [
        *("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm"),
        *("aten::_flash_attention_forward", "aten::_scaled_dot_product_flash_attention"),
        *("aten::_scaled_dot_product_efficient_attention", "torch_attn::_varlen_attn"),
        *("aten::_scaled_dot_product_flash_attention_for_cpu", "areal_sc::packed_attention"),
    ]
)
"""Products, and attention by a kernel."""

# Words in transformers' names of layers that pick the tokens with the highest scores.
_SELECTIVE_ATTENTION = ("indexed", "sparse", "compressed", "lsh")


def load_sharded_model(
    config: ActorConfig, groups: ProcessGroups
) -> tuple[PackedModel, CutParts, ModelTrial]:
    """The model of `config.path` with float32 parameters, spread over the ranks, in eval mode.

    Its adapters have no values yet.

    Rank 0 alone reads the weights, some at a time, and sends every rank its part. Eval mode keeps
    dropout off: the policy that is trained must be the one that was sampled from, or the ratios
    mean nothing.

    Raises: ModelError, ConfigError: on every rank, when the folder cannot be used, or not on this
        mesh.
    """
    check_pictures(Path(config.path), config.parallel)
    world = groups.world
    if not needs_fsdp(world.size, config):
        model = _packed(read_causal_lm(config), config, world.device, 1)
        _check_supported(model.causal_lm, config)
        trial = probe_abilities(
            model, config.max_tokens_per_micro_batch, dtype=compute_dtype(config)
        )
        model.abilities = trial.abilities
        _freeze(model.causal_lm, config)
        _wrap_layers(model, config, world.device)
        _add_gradients_at_once(model)
        parts = CutParts.of_one_rank(model.causal_lm)
        return model.to(world.device), parts, trial
    weights = SharedWeights(config, world)
    trial = weights.open(lambda opened: _try_model(opened, config, world))
    model = _packed(weights.build(), config, world.device, groups.tensor.size)
    causal_lm = model.causal_lm
    model.abilities = trial.abilities
    _freeze(causal_lm, config)
    cuts = plan_cuts(causal_lm, groups.tensor.size, cuts_vocabulary=model.abilities.has_linear_head)
    check_sequence_parallel(causal_lm, config.parallel, packs=model.attends_by_interface)
    _wrap_layers(model, config, world.device)
    parts = CutParts(cuts, world.rank, groups.rows.size)
    layers = decoder_layers(causal_lm)  # while they still have their own classes
    _spread(model, layers, parts, config, groups)
    _fill(model, weights, parts)
    if groups.is_model_split or config.dtype == Dtype.float16:
        _check_spread(model, trial, groups)
    return model, parts, trial


def _packed(
    causal_lm: Any, config: ActorConfig, device: torch.device, num_tensor_ranks: int
) -> PackedModel:
    vocabulary = int(causal_lm.config.get_text_config().vocab_size) // num_tensor_ranks
    chunk = chunk_tokens(config.logprob_chunk_tokens, vocabulary, device.type, memory_of(device))
    return PackedModel(
        causal_lm,
        chunk_tokens=chunk,
        kept_tokens=kept_tokens(chunk, device.type),
        head=config.head,
        replays_routes=config.routing_replay,
        pictures=pictures_of_folder(causal_lm, config.path, config.train_vision_tower),
    )


def _try_model(weights: ModelWeights, config: ActorConfig, world: ProcessGroup) -> ModelTrial:
    """What rank 0 finds out with the whole model, layer by layer."""
    causal_lm = build_without_parameters(Path(config.path), config.head)
    model = _packed(causal_lm, config, torch.device("cpu"), 1)
    _check_supported(causal_lm, config)

    fill = functools.partial(stream_layers, read=weights.read, num_ranks=world.size)
    fill(causal_lm)
    return probe_abilities(model, config.max_tokens_per_micro_batch, fill, compute_dtype(config))


def _check_supported(causal_lm: Any, settings: ActorConfig) -> None:
    """Raises: ModelError: the log-probabilities of some rows are not well defined, or an adapter is
    to go where none can."""
    config, name = causal_lm.config.get_text_config(), type(causal_lm).__name__
    max_tokens = settings.max_tokens_per_micro_batch
    if settings.has_adapter:
        targeted(causal_lm, settings.lora.targets)
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


def _wrap_layers(model: PackedModel, config: ActorConfig, device: torch.device) -> None:
    """Compiles each layer's forward, and computes activations twice, inside of FSDP's hooks.

    What is kept for the second time, the inputs of layers, may lie in host memory. Where products
    are kept, too, what computes the rest again is a part of what is compiled.

    Raises: ModelError: see `compile_layers`.
    """
    layers = decoder_layers(model.causal_lm)
    compiles = config.compile_layers
    if config.has_adapter and config.lora.places > 1:
        compiles = False  # which tokens are of which place is known to no graph
    if compiles is None:
        is_whole = config.parallel.tensor * config.parallel.sequence == 1  # others are not tried
        compiles = is_whole and model.attends_by_interface and model.routers is None
        compiles &= host_is_limit(layers, config.max_tokens_per_micro_batch, device)
    kind = config.activation_checkpointing
    recomputing = functools.partial(
        _recomputing, preserve_rng_state=config.has_adapter and config.lora.dropout > 0
    )
    if kind is ActivationCheckpointing.selective:
        for layer in layers:
            layer.forward = recomputing(layer.forward, context_fn=_keeping_products)
    if compiles:
        model.compile_layers(layers)
    if kind is ActivationCheckpointing.none:
        return
    if not layers:
        logger.warning(
            "actor.activation_checkpointing has no effect: model=%s does not name its decoder "
            "layers",
            type(model.causal_lm).__name__,
        )
    if config.activation_offload and device.type == "cpu":
        logger.warning("actor.activation_offload has no effect on a CPU: all is in host memory")
    if kind is not ActivationCheckpointing.layers:
        return
    for layer in layers:
        layer.forward = recomputing(layer.forward)
        if config.activation_offload and device.type != "cpu":
            layer.forward = _saving_on_host(layer.forward, device)


def _recomputing(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A forward whose activations are computed again in the backward pass."""

    def recomputing(*arguments: Any, **named: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, **options, **named)

    return recomputing


def _keeping_products() -> Any:
    """Contexts of a forward and of its repetition, which repeats neither products nor attention.

    Source: the selective activation checkpointing of torchtitan, which keeps every other product.
    """
    return create_selective_checkpoint_contexts(_chosen)  # type: ignore[no-untyped-call]


def _chosen(_context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    is_kept = operation.name().partition(".")[0] in _KEPT_OPERATIONS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _saving_on_host(forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A forward under a checkpoint, whose inputs, all that is saved, lie in pinned memory."""

    def saving_on_host(*arguments: Any, **named: Any) -> Any:
        with save_on_cpu(pin_memory=True, device_type=device.type):
            return forward(*arguments, **named)

    return saving_on_host


def _spread(
    model: PackedModel,
    layers: Sequence[nn.Module],
    parts: CutParts,
    config: ActorConfig,
    groups: ProcessGroups,
) -> None:
    """Leaves each rank its part, without values.

    Each decoder layer is a unit of FSDP, the rest is the root's, which is whole on every rank while
    it computes, with its gradients. Where that is possible, embeddings and output layer are not.
    With `cpu_offload` the part lies in host memory, and buffers on the device.

    A rank that computes all rows, on its device, has nothing to gather, and does without FSDP.
    """
    world, causal_lm = groups.world, model.causal_lm
    buffers = dict(causal_lm.named_buffers(remove_duplicate=False))
    cut_model(causal_lm, parts.cuts, groups.tensor)
    if groups.tensor.size > 1 and config.head is ModelHead.lm:
        start = vocabulary_start(causal_lm, parts.cuts, groups.tensor.rank)
        if start is not None:
            model.vocabulary = VocabularyPart(start, groups.tensor.handle)
    if groups.sequence.size > 1:
        model.sequence = groups.sequence
    own_rows = set[nn.Parameter]()
    is_whole, is_rounded = groups.rows.size == 1, rounds_copies(groups.rows.size, config)
    if needs_fsdp(groups.rows.size, config):
        # One rank would compute with all rows where they lie; FSDP brings them to the device.
        if model.abilities.has_linear_head and not (is_whole and config.cpu_offload):
            most_tokens = -(-config.max_tokens_per_micro_batch // groups.sequence.size)
            own_rows, model.spread_rows = spread_vocabulary(
                causal_lm, groups.rows, compute_dtype(config), most_tokens
            )
            head = causal_lm.get_output_embeddings()
            model.adds_head_gradient = not model.spread_rows and head.weight in own_rows
        if not is_rounded:
            _shard(model, layers, own_rows, config, groups)
    else:
        _add_gradients_at_once(model)
    own_names = [name for name, p in causal_lm.named_parameters() if p in own_rows]
    take_memory(model, torch.device("cpu") if config.cpu_offload else world.device)
    for name, values in buffers.items():
        module, _, own_name = name.rpartition(".")
        setattr(causal_lm.get_submodule(module), own_name, values.to(world.device))
    if is_rounded:
        others = [causal_lm.get_parameter(name) for name in own_names]
        model.copies = RoundedCopies(causal_lm, layers, others, compute_dtype(config))


def _shard(
    model: PackedModel,
    layers: Sequence[nn.Module],
    own_rows: set[nn.Parameter],
    config: ActorConfig,
    groups: ProcessGroups,
) -> None:
    """Makes each layer, and the rest, a unit of FSDP; not the rows of the vocabulary."""
    device = groups.world.device
    mesh = DeviceMesh.from_group(groups.rows.torch_group, device.type, mesh_dim_names=("rows",))
    check_units(model.causal_lm, layers)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype(config), reduce_dtype=torch.float32)
    offload = _offload_policy(config, device)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
    # Temperatures, the only fractions among its arguments, are not rounded.
    policy = replace(policy, cast_forward_inputs=False)
    fully_shard(
        model,
        mesh=mesh,
        mp_policy=policy,
        offload_policy=offload,
        reshard_after_forward=False,
        ignored_params=own_rows,
    )
    if device.type == "cpu":
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.set_custom_reduce_scatter(InPlaceReduceScatter())


def _add_gradients_at_once(model: PackedModel) -> None:
    """Lets embeddings and output layer add their gradients at once: this rank has all rows of them
    that its tensor rank has."""
    look_up_whole(model.causal_lm)
    model.adds_head_gradient = True


def _offload_policy(config: ActorConfig, device: torch.device) -> OffloadPolicy:
    if not config.cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device.type == "cuda")


def take_memory(model: PackedModel, device: torch.device) -> None:
    """Memory for parameters and buffers, whose values are lost; tied parameters stay tied."""
    causal_lm, names_of = model.causal_lm, dict[int, list[str]]()
    for name, parameter in causal_lm.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    model.to_empty(device=device)
    for first, *others in names_of.values():
        for path, _, own_name in (name.rpartition(".") for name in others):
            setattr(causal_lm.get_submodule(path), own_name, causal_lm.get_parameter(first))


def _fill(model: PackedModel, weights: SharedWeights, parts: CutParts) -> None:
    """Every rank gets the values of its part, one tensor after the other.

    Raises: ModelError: on every rank.
    """
    for name, parameter in model.causal_lm.named_parameters():
        if not is_of_adapter(name):
            weights.receive(name, parts, local_part(parameter.detach()))
    weights.fill_buffers(model.causal_lm)
    weights.check()


def _freeze(causal_lm: Any, config: ActorConfig) -> None:
    """Leaves to be trained what the settings say: all, an adapter, or nothing.

    What is never changed is kept in the type that it is computed in.
    """
    if not config.train_vision_tower:
        freeze_tower(causal_lm)
    if config.has_adapter:
        add_adapters(causal_lm, config.lora, config.head)
    if config.is_frozen:
        causal_lm.requires_grad_(False)
    if config.has_adapter or config.is_frozen:
        for parameter in causal_lm.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(compute_dtype(config))


def _check_spread(model: PackedModel, trial: ModelTrial, groups: ProcessGroups) -> None:
    """Raises: ModelError: on every rank: they compute something else than rank 0 in float32."""
    expected = trial.expected

    def measure() -> float:
        with model.computing(), without_adapters(model.causal_lm):
            found = probe_model(model, [row.to(groups.world.device) for row in trial.rows])
        own = range(len(expected.values))
        if groups.sequence.size > 1:
            own = SequencePart(len(own), groups.sequence).own
        values, noise = expected.values[None, own], expected.noise[None, own]
        # all together: rounding may send some tokens to other experts
        return Expected(values, noise, expected.dtype).distance(found[: len(own)].cpu()[None])

    advice = "set actor.dtype=bfloat16"
    if groups.is_model_split:
        advice = "set actor.parallel.tensor=1, actor.parallel.sequence=1, more actor.parallel.data"
    require_agreement(
        measure,
        expected.limit,
        groups.world,
        subject=f"{type(model.causal_lm).__name__} does not compute on "
        f"tensor={groups.tensor.size}, sequence={groups.sequence.size} ranks in {expected.dtype} "
        "what it computes on one in float32",
        advice=advice,
    )
