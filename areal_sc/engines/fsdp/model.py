"""Loading a Hugging Face causal language model and sharding it over the ranks with FSDP2."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from areal_sc.config.model_folder import check_model_folder
from areal_sc.config.schema import ActorConfig
from areal_sc.engines.fsdp.packed_model import PackedModel, probe_abilities
from areal_sc.engines.fsdp.process_group import ProcessGroup
from areal_sc.engines.rotary import DYNAMIC, length_dependent_rope
from areal_sc.engines.weight_group import NamedTensor, split_into_buckets
from areal_sc.errors import ModelError

GATHERED_BYTES = 4 << 20
"""Small parameters are gathered together, up to this size: each collective costs a round trip."""

# Words in transformers' names of layers that pick the tokens with the highest scores.
_SELECTIVE_ATTENTION = ("indexed", "sparse", "compressed")


def compute_dtype(config: ActorConfig) -> torch.dtype:
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def needs_sharding(config: ActorConfig, world_size: int) -> bool:
    """One rank in float32 is the plain model; FSDP also keeps float32 copies for bfloat16."""
    return world_size > 1 or compute_dtype(config) != torch.float32


def load_sharded_model(config: ActorConfig, group: ProcessGroup) -> PackedModel:
    """The model of `config.path` with float32 parameters, sharded over the group, in eval mode.

    Rank 0 alone reads the weights and sends every rank its part. Eval mode keeps dropout off:
    the policy that is trained must be the one that was sampled from, or the ratios mean nothing.

    Raises: ModelError: on every rank, when the folder cannot be used.
    """
    model = error = abilities = None
    if group.rank == 0:
        try:
            model = PackedModel(read_causal_lm(config), chunk_tokens=config.logprob_chunk_tokens)
            _check_supported(model.causal_lm, config.max_tokens_per_micro_batch)
            abilities = probe_abilities(model)
        except ModelError as failure:
            error = failure
    message, abilities = group.broadcast((str(error) if error else None, abilities))
    if message is not None:
        raise error or ModelError(message)
    if model is None:
        model = PackedModel(
            build_unfilled(Path(config.path)), chunk_tokens=config.logprob_chunk_tokens
        )
    model.abilities = abilities
    if config.activation_checkpointing:
        _checkpoint_layers(model.causal_lm)
    if not needs_sharding(config, group.size):
        return model.to(group.device)
    return _shard(model, compute_dtype(config), group)


def read_causal_lm(config: ActorConfig) -> Any:
    """The model of `config.path` on the CPU, its weights read, or drawn with `random_init`."""
    if not config.random_init:
        return load_causal_lm(Path(config.path))
    try:
        return _from_config(Path(config.path)).eval()
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot build the model of {config.path}: {error}") from error


def load_causal_lm(folder: Path) -> Any:
    """A Hugging Face model on the CPU in float32 with its own attention.

    Raises: ModelError: no such folder, no or damaged weights, an unknown architecture.
    """
    check_model_folder(folder)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"cannot load the model in {folder}: {error}") from error
    model, loading = loaded
    absent = sorted(loading["missing_keys"]) + sorted(map(str, loading["mismatched_keys"]))
    if absent:
        raise ModelError(
            f"the weights in {folder} do not fit its config.json: "
            f"{len(absent)} missing or misshapen, e.g. {absent[0]}"
        )
    return model.eval()


def build_unfilled(folder: Path) -> Any:
    """The same model with memory for its weights, but no values in it."""
    with no_init_weights():
        model = _from_config(folder)
    model.tie_weights()
    return model.eval()


def _from_config(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32
    )


def _check_supported(causal_lm: Any, max_tokens: int) -> None:
    """Raises: ModelError: the log-probabilities of some rows are not well defined."""
    config, name = causal_lm.config.get_text_config(), type(causal_lm).__name__
    limit = getattr(config, "max_position_embeddings", max_tokens)
    if DYNAMIC in length_dependent_rope(config) and max_tokens > limit:
        raise ModelError(
            f"{name} has dynamic rotary embeddings, which are other ones for every length of a "
            f"row beyond {limit} tokens; expected actor.max_tokens_per_micro_batch of at most "
            f"{limit}, got {max_tokens}"
        )
    for layer_type in sorted(set(getattr(config, "layer_types", None) or ())):
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


def _shard(model: PackedModel, dtype: torch.dtype, group: ProcessGroup) -> PackedModel:
    """Each decoder layer is a unit of FSDP; embeddings, norms and output layer are the root's."""
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
    buffers = dict(model.named_buffers())
    mesh = init_device_mesh(group.device.type, (group.size,), mesh_dim_names=("data",))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in decoder_layers(model.causal_lm):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        source = whole.pop(name).to(group.device)
        part = distribute_tensor(source, mesh, parameter.placements)  # from rank 0
        parameter.to_local().detach().copy_(part.to_local())
    for name, values in buffers.items():
        # Not in the weights file, e.g. rotary frequencies; rank 0's were made by its loading.
        received = group.broadcast(values.cpu() if group.rank == 0 else None)
        model.get_buffer(name).copy_(received)
    return model


def gather_whole(parameters: Iterable[NamedTensor], dtype: torch.dtype) -> list[NamedTensor]:
    """Whole tensors in `dtype`, on this rank's device, of parameters that may be sharded.

    One that is whole already, and has this dtype, is itself returned. All ranks make the call.
    """
    whole: list[NamedTensor] = []
    for few in split_into_buckets(parameters, GATHERED_BYTES):
        names, tensors = zip(*few, strict=True)
        if isinstance(tensors[0], DTensor):
            whole += zip(names, _gather_together(tensors, dtype), strict=True)
        else:
            whole += [(name, tensor.to(dtype)) for name, tensor in few]
    return whole


def _gather_together(parameters: Sequence[DTensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Each rank holds as many rows of a parameter as the ranks before it, or what is left."""
    mesh = parameters[0].device_mesh
    shares = [-(-len(p) // mesh.size()) * p.shape[1:].numel() for p in parameters]
    own = torch.empty(sum(shares), dtype=dtype, device=parameters[0].device)
    for parameter, room in zip(parameters, torch.split(own, shares), strict=True):
        values = parameter.to_local().flatten()
        room[: len(values)] = values
    gathered = DTensor.from_local(own, mesh, [Shard(0)], run_check=False).full_tensor()
    of_ranks = torch.split(gathered.view(mesh.size(), -1), shares, dim=1)
    return [
        parts.flatten()[: parameter.numel()].view(parameter.shape)
        for parameter, parts in zip(parameters, of_ranks, strict=True)
    ]
