"""Models of values: transformers' class that classifies sequences, with one label.

    a causal language model    layers, output layer     <Family>ForCausalLM
    a model of values          layers, `score`: one value    <Family>ForSequenceClassification

A folder of a causal language model has no `score`. A new one is zero, so that all values begin at
0. What is trained is written with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

from areal_sc.config.schema import ModelHead
from areal_sc.errors import ModelError
from areal_sc.sizing.model_folder import VALUE_HEAD, reads_pictures


def model_config(folder: Path, head: ModelHead) -> Any:
    """The settings of the model in a folder, with this head.

    Raises: ModelError: a value head is to read pictures.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if head is ModelHead.value:
        if reads_pictures(folder):
            raise ModelError(f"model folder {folder}: no values are trained with pictures")
        config.num_labels = 1
    return config


def model_class(folder: Path, head: ModelHead = ModelHead.lm) -> Any:
    """Transformers' factory of models with this head, as the folder's is."""
    if head is ModelHead.value:
        return AutoModelForSequenceClassification
    return AutoModelForImageTextToText if reads_pictures(folder) else AutoModelForCausalLM


def checked_head(model: Any, head: ModelHead) -> Any:
    """The model itself.

    Raises: ModelError: it has no value head where one is asked for.
    """
    score = getattr(model, "score", None)
    is_value = isinstance(score, nn.Linear) and score.out_features == 1 and score.bias is None
    if head is ModelHead.value and not is_value:
        raise ModelError(
            f"{type(model).__name__} has no linear layer `score` without bias: no values can be "
            "trained with it; choose a model of another family for critic.path"
        )
    return model


def new_values(model: Any) -> None:
    """Sets a value head that no file has: to zero."""
    nn.init.zeros_(model.score.weight)


def is_new_head(name: str, head: ModelHead) -> bool:
    """Whether a folder may lack this parameter."""
    return head is ModelHead.value and name == VALUE_HEAD


def values_of(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """[N] float32 of final hidden states [N, H]; a sum in float32, whatever these are."""
    values: torch.Tensor = (hidden.float() * model.score.weight.float()[0]).sum(-1)
    return values
