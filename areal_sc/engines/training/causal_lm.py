"""Hugging Face causal language models as training reads them: on the CPU, in float32.

With a value head in place of their output layer, where that is asked for: `value_head`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers.initialization import no_init_weights

from areal_sc.config.schema import ActorConfig, ModelHead
from areal_sc.engines.training.value_head import (
    checked_head,
    is_new_head,
    model_class,
    model_config,
    new_values,
)
from areal_sc.errors import ArealError, ModelError
from areal_sc.sizing.model_folder import check_model_folder
from areal_sc.transport.tensor_bytes import dtype_named


def compute_dtype(config: ActorConfig) -> torch.dtype:
    return dtype_named(config.dtype)


def read_causal_lm(config: ActorConfig) -> Any:
    """The model of `config.path` on the CPU, its weights read, or drawn with `random_init`."""
    if not config.random_init:
        return load_causal_lm(Path(config.path), config.head)
    try:
        model = _from_config(Path(config.path), config.head).eval()
        if config.head is ModelHead.value:
            new_values(model)
        return model
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot build the model of {config.path}: {error}") from error


def load_causal_lm(folder: Path, head: ModelHead = ModelHead.lm) -> Any:
    """A Hugging Face model on the CPU in float32 with its own attention.

    Raises: ModelError: no such folder, no or damaged weights, an unknown architecture, or
        parameters that are tied and stored with different values.
    """
    check_model_folder(folder)
    try:
        loaded: Any = model_class(folder, head).from_pretrained(
            folder,
            config=model_config(folder, head),
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"cannot load the model in {folder}: {error}") from error
    model, loading = loaded
    checked_head(model, head)
    missing = sorted(loading["missing_keys"])
    if any(is_new_head(name, head) for name in missing):
        new_values(model)
    absent = [name for name in missing if not is_new_head(name, head)]
    absent += sorted(map(str, loading["mismatched_keys"]))
    if absent:
        raise misfit(folder, absent)
    check_all_used(folder, model, loading["unexpected_keys"], head)
    built = build_unfilled(folder, head)
    named = dict(built.named_parameters(remove_duplicate=False))
    first_names = {id(parameter): name for name, parameter in built.named_parameters()}
    for name, parameter in model.named_parameters():
        if name in named:
            first = first_names[id(named[name])]
            if first != name:
                raise differently_tied(folder, first, name)
            # Loading forgets which parameters the model's authors do not train.
            parameter.requires_grad_(named[name].requires_grad)
    return model.eval()


def misfit(folder: Path, names: Sequence[str]) -> ModelError:
    """The error of weights that are missing or misshapen."""
    return ModelError(
        f"the weights in {folder} do not fit its config.json: "
        f"{len(names)} missing or misshapen, e.g. {names[0]}"
    )


def check_all_used(
    folder: Path, model: Any, unexpected: Iterable[str], head: ModelHead = ModelHead.lm
) -> None:
    """Checks that the model has all weights that are stored.

    Args: unexpected: those that it does not have, but for those that it is known to do without.
    Raises: ModelError: one belongs to it, and another model than the stored one would be computed.
    """
    body = f"{model.base_model_prefix}."  # a model of values has no output layer
    unused = sorted(name for name in unexpected if head is ModelHead.lm or name.startswith(body))
    if unused:
        raise ModelError(
            f"model folder {folder}: {type(model).__name__} has no place for {len(unused)} of the "
            f"stored weights, e.g. {unused[0]}: expected a config.json that describes all of them, "
            "since without them something else is computed; if the model needs none of these, have "
            "transformers write it anew (from_pretrained, save_pretrained)"
        )


def differently_tied(folder: Path, first: str, other: str) -> ModelError:
    """The error of parameters that are tied, and stored with different values."""
    return ModelError(
        f"model folder {folder}: {first} and {other} are stored with different values, but "
        "config.json ties them; set tie_word_embeddings to false there"
    )


def build_unfilled(folder: Path, head: ModelHead = ModelHead.lm) -> Any:
    """The same model with memory for its weights, but no values in it."""
    with no_init_weights():
        model = _from_config(folder, head)
    model.tie_weights()
    return model.eval()


def build_without_parameters(folder: Path, head: ModelHead = ModelHead.lm) -> Any:
    """The same model, its parameters on the meta device, its buffers as transformers makes them."""
    model = build_unfilled(folder, head)  # memory that nobody has written to is none yet
    on_meta: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for module in model.modules():
        for name, values in module.named_parameters(recurse=False):
            if id(values) not in on_meta:
                unfilled = torch.empty_like(values, device="meta")
                on_meta[id(values)] = nn.Parameter(unfilled, requires_grad=values.requires_grad)
            setattr(module, name, on_meta[id(values)])
    return model


def _from_config(folder: Path, head: ModelHead) -> Any:
    model = model_class(folder, head).from_config(model_config(folder, head), dtype=torch.float32)
    return checked_head(model, head)


def loading_error(failure: Exception, config: ActorConfig) -> ArealError:
    """What a rank raises that could not load the model: its words tell other ranks what failed."""
    if isinstance(failure, ArealError):
        return failure
    what = f"{type(failure).__name__}: {failure}" if str(failure) else type(failure).__name__
    error = ModelError(f"cannot load the model in {config.path}: {what}")
    error.__cause__ = failure
    return error
