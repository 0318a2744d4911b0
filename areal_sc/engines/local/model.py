"""The generator's model: loading from a folder, what it must be, and replacing its weights."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from areal_sc.config.model_folder import check_model_folder
from areal_sc.config.schema import Dtype
from areal_sc.engines.local.attention import ATTENTION_NAME, SlotAttention, attention_forward
from areal_sc.engines.rotary import length_dependent_rope
from areal_sc.engines.tokenizer import load_tokenizer
from areal_sc.errors import ConfigError, ModelError


def load_folder(
    path: str, device: torch.device, dtype: Dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a causal language model and its tokenizer from a local Hugging Face folder.

    Raises: ModelError: something is missing or unreadable; names it and the folder.
    """
    check_model_folder(path)
    folder = Path(path)
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        model, loading = load(
            folder,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            output_loading_info=True,
        )
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"model folder {folder}: weights cannot be read: {error}") from error
    wrong = sorted(
        str(name) for kind in ("missing_keys", "mismatched_keys") for name in loading[kind]
    )
    if wrong:
        raise ModelError(
            f"model folder {folder}: {len(wrong)} weights are missing or of another shape, "
            f"the first is {wrong[0]}"
        )
    return model.to(device), load_tokenizer(folder)


def read_weights(folder: Path) -> list[tuple[str, torch.Tensor]]:
    """Every tensor of the safetensors files of a model folder; views of the mapped files.

    Raises: ModelError: a file is damaged, or there is none.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            tensors |= load_file(path)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: not a complete safetensors file: {error}") from error
    if not tensors:
        raise ModelError(f"{folder}: it has no safetensors files")
    return list(tensors.items())


class LocalModel:
    """A causal language model whose attention runs over a slot cache.

    It shares the weights of the model that it is made from, whose attention and mode stay as they
    are.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        _check_supported(model)
        AttentionInterface.register(ATTENTION_NAME, attention_forward)
        weights = {id(tensor): tensor for tensor in model.parameters()}
        self._model: Any = copy.deepcopy(model, weights)
        self._model.eval()  # type: ignore[no-untyped-call]
        self._model.set_attn_implementation(ATTENTION_NAME)
        if self._model.config._attn_implementation != ATTENTION_NAME:
            raise ModelError(
                f"{type(model).__name__} does not use transformers' attention interface"
            )
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.device = model.device
        self.dtype = model.dtype
        embeddings: Any = model.get_input_embeddings()
        self.vocab_size: int = embeddings.num_embeddings
        self.num_layers: int = model.config.num_hidden_layers

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: SlotAttention,
        num_last: int,
    ) -> torch.Tensor:
        """[num_last, V] logits of the last tokens of a packed pass.

        Args:
            token_ids, positions: [T] int64.
        """
        keep = {"logits_to_keep": num_last} if self._keeps_logits else {}
        output = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            slot_attention=attention,
            **keep,
        )
        logits: torch.Tensor = output.logits[0, -num_last:]
        return logits

    @torch.no_grad()
    def replace_weights(self, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copies new values into the parameters; tied ones may be given under any of their names.

        Args:
            named_tensors: every parameter, of its shape or flat.
        Raises: ModelError: a name is unknown, a parameter is missing or a size differs; nothing
            has been changed then.
        """
        targets = self._model.state_dict(keep_vars=True)  # buffers may be left out
        parameters = {n: p for n, p in targets.items() if isinstance(p, torch.nn.Parameter)}
        given = dict(named_tensors)
        unknown = sorted(set(given) - set(targets))
        if unknown:
            raise ModelError(
                f"weight update refused: the model has no parameter {unknown[0]} "
                f"({len(unknown)} unknown of {len(given)} given)"
            )
        covered = {id(targets[name]) for name in given}
        missing = sorted(name for name, p in parameters.items() if id(p) not in covered)
        if missing:
            raise ModelError(
                f"weight update refused: {len(missing)} of {len(parameters)} parameters are "
                f"missing, the first is {missing[0]}"
            )
        for name, tensor in given.items():
            shape = targets[name].shape
            if tensor.shape not in (shape, torch.Size([shape.numel()])):
                raise ModelError(
                    f"weight update refused: {name} has shape {list(shape)}, "
                    f"got {list(tensor.shape)}"
                )
            if tensor.is_floating_point() != targets[name].is_floating_point():
                raise ModelError(
                    f"weight update refused: {name} is {targets[name].dtype}, got {tensor.dtype}"
                )
        for name, tensor in given.items():
            targets[name].copy_(tensor.reshape(targets[name].shape))


def check_context(config: Any, max_context_tokens: int) -> None:
    """Raises: ConfigError: the model has fewer positions than the context limit asks for."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and max_context_tokens > limit:
        raise ConfigError(
            f"rollout.max_context_tokens is {max_context_tokens}, but the model has "
            f"max_position_embeddings {limit}"
        )


def _check_supported(model: PreTrainedModel) -> None:
    """Raises: ModelError: the model's attention is not plain causal attention in every layer."""
    config, name = model.config, type(model).__name__
    other = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if other:
        raise ModelError(
            f"{name} has layers of type {', '.join(sorted(other))}; embedded generation caches "
            "full attention only"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder model; embedded generation needs a decoder")
    if rope := length_dependent_rope(config):
        raise ModelError(
            f"{name} has {', '.join(rope)} rotary embeddings: they change with a sequence's "
            "length, so cached keys would not agree with a plain forward pass"
        )
