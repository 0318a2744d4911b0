"""The generator's model: loading from a folder, what it must be, and replacing its weights."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Container, Iterable, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from areal_sc.algorithms.logprobs import float32_linear
from areal_sc.config.schema import Dtype
from areal_sc.engines.local.adapters import AdaptedLinear, PassAdapters
from areal_sc.engines.local.attention import (
    ATTENTION_NAME,
    CurrentStep,
    SlotAttention,
    attention_forward,
)
from areal_sc.engines.picture_inputs import DEEP_ARGUMENTS, PictureInputs, PictureSpan
from areal_sc.engines.picture_processor import PictureProcessor
from areal_sc.engines.rotary import rope_limits
from areal_sc.engines.routers import Routers
from areal_sc.engines.tokenizer import load_tokenizer
from areal_sc.engines.training.adapters.lora import named_linear
from areal_sc.engines.training.causal_lm import check_all_used
from areal_sc.engines.training.streamed_layers import text_part
from areal_sc.engines.training.value_head import model_class
from areal_sc.errors import ConfigError, ModelError
from areal_sc.sizing.model_folder import check_model_folder
from areal_sc.weights.published import check_shapes


def load_folder(
    path: str, device: torch.device, dtype: Dtype, *, is_drawn: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a causal language model and its tokenizer from a local Hugging Face folder.

    Args: is_drawn: the folder needs no weights; the model has random ones until others arrive.
    Raises: ModelError: something is missing or unreadable; names it and the folder.
    """
    check_model_folder(path, needs_weights=not is_drawn)
    load = _draw if is_drawn else _load
    model: Any = load(Path(path), getattr(torch, dtype))
    return model.to(device), load_tokenizer(path)


def _draw(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Raises: ModelError: transformers cannot build such a model."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        build: Any = model_class(folder).from_config
        model = build(config, dtype=dtype)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(
                folder, local_files_only=True
            )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot build the model of {folder}: {error}") from error
    return model.eval()  # type: ignore[no-any-return]


def _load(folder: Path, dtype: torch.dtype | str) -> PreTrainedModel:
    """Raises: ModelError: weights are damaged, missing, or of another shape."""
    load: Any = model_class(folder).from_pretrained
    try:
        model, loading = load(folder, dtype=dtype, local_files_only=True, output_loading_info=True)
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
    check_all_used(folder, model, loading["unexpected_keys"])
    return model  # type: ignore[no-any-return]


def read_weights(folder: Path, names: Container[str]) -> list[tuple[str, torch.Tensor]]:
    """The weights of a model folder, under the names that they have in memory.

    They are views of the mapped files. Where the files name them otherwise, as with experts that
    loading fuses, transformers loads the model a second time.

    Args:
        names: of the model's weights in memory.
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
    if all(name in names for name in tensors):
        return list(tensors.items())
    return list(_load(folder, "auto").state_dict().items())


class LocalModel:
    """A causal language model whose attention runs over a slot cache.

    It shares the weights of the model that it is made from, whose attention and mode stay as they
    are.

    Args:
        has_float32_logits: the output layer sums in float32 and does not round, whatever the dtype.
        records_routes: it is told which experts each token goes through.
        processor: of a model that reads pictures.

    Attributes:
        pictures: of such a model.
        routers: of the model; None: nothing is recorded.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        has_float32_logits: bool = False,
        records_routes: bool = False,
        processor: PictureProcessor | None = None,
    ) -> None:
        _check_supported(model)
        AttentionInterface.register(ATTENTION_NAME, attention_forward)
        weights = {id(tensor): tensor for tensor in model.parameters()}
        self._model: Any = copy.deepcopy(model, weights)
        self._model.eval()  # type: ignore[no-untyped-call]
        self._step = CurrentStep()
        for module in self._model.modules():
            vars(module)["current_step"] = self._step
        decoder = text_part(self._model)
        decoder.set_attn_implementation(ATTENTION_NAME)
        self._deep: dict[str, Any] = {}
        self.pictures = None if processor is None else PictureInputs(self._model, processor)
        if self.pictures is not None:
            if self.pictures.see_each_other:
                raise ModelError(
                    f"{type(model).__name__}: tokens of a picture attend to later ones, which "
                    "embedded generation does not know: train it by SFT or DPO"
                )
            decoder.register_forward_pre_hook(
                lambda _, args, named: (args, {**named, **self._deep}), with_kwargs=True
            )
        if decoder.config._attn_implementation != ATTENTION_NAME:
            raise ModelError(
                f"{type(model).__name__} does not use transformers' attention interface, by which "
                "embedded generation gives a model its cache: use SGLang"
            )
        if has_float32_logits:
            head: Any = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
            head.forward = functools.partial(float32_linear, head)
        self.routers = Routers(self._model) if records_routes else None
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._dropped: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self.device = model.device
        self.dtype = model.dtype
        embeddings: Any = model.get_input_embeddings()
        self.vocab_size: int = embeddings.num_embeddings

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: SlotAttention,
        num_last: int,
        asked: torch.Tensor | None = None,
        adapters: PassAdapters | None = None,
        spans: Sequence[tuple[int, Any, int, int]] = (),
    ) -> torch.Tensor:
        """[A + num_last, V] logits of some tokens of a packed pass, and behind them of its last.

        Args:
            token_ids, positions: [T] int64.
            asked: [A] int64, indices of those tokens; None: there are none.
            adapters: of the tokens; None: they have none.
            spans: tokens of rows with pictures; see `PictureSpan`.
        """
        kept: int | torch.Tensor = num_last
        if asked is not None:
            last = torch.arange(len(token_ids) - num_last, len(token_ids), device=self.device)
            kept = torch.cat((asked, last))
        keep = {"logits_to_keep": kept} if self._keeps_logits else {}
        self._step.attention, self._step.adapters = attention, adapters
        given = {"input_ids": token_ids[None], "position_ids": positions[None]}
        if spans:
            assert self.pictures is not None, "such requests are refused"
            given = self.pictures.arguments(
                token_ids,
                list(starmap(PictureSpan, spans)),
                self._model.get_input_embeddings(),
                positions,
                lambda values: values[None],
            )
        self._deep = {name: given.pop(name) for name in DEEP_ARGUMENTS if name in given}
        output = self._model(use_cache=False, **given, **keep)
        logits: torch.Tensor = output.logits[0]
        if keep:
            return logits
        return logits[kept] if asked is not None else logits[-num_last:]

    @functools.cached_property
    def adaptable(self) -> dict[str, nn.Linear]:
        """The layers that an adapter may have a part beside, by their names.

        Those of single experts are none: not all tokens of a pass go through one.
        """
        return {
            name: module
            for name, module in named_linear(self._model).items()
            if ".experts." not in name
        }

    def adapt(self, names: Iterable[str]) -> None:
        """These layers add what the adapters of a pass make of their inputs, from now on."""
        targets = self.adaptable
        for name in names:
            module = targets[name]
            vars(module)["layer_name"] = name
            module.__class__ = AdaptedLinear

    @property
    def weight_names(self) -> Container[str]:
        """Names of parameters and stored buffers, every name of tied ones."""
        return self._model.state_dict().keys()  # type: ignore[no-any-return]

    @property
    def is_dropped(self) -> bool:
        """The parameters have no memory."""
        return bool(self._dropped)

    def drop_weights(self) -> None:
        """The memory of all parameters is free until `take_memory`."""
        self._dropped = [(parameter, parameter.data) for parameter in self._model.parameters()]
        for number, (parameter, values) in enumerate(self._dropped):
            self._dropped[number] = parameter, values.to("meta")
            parameter.data = values.new_empty(0)

    def take_memory(self) -> None:
        """Parameters that were dropped have their memory again, without values."""
        for parameter, shape in self._dropped:
            parameter.data = torch.empty_like(shape, device=self.device)
        self._dropped = []

    @torch.no_grad()
    def replace_weights(self, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copies new values into the parameters; tied ones may be given under any of their names.

        Args:
            named_tensors: every parameter, of its shape or flat.
        Raises: ModelError: a name is unknown, a parameter is missing or a shape differs; nothing
            has been changed then.
        """
        targets = self._model.state_dict(keep_vars=True)
        given = dict(named_tensors)
        first = {id(target): name for name, target in reversed(targets.items())}  # of tied ones
        shapes = {
            first[id(targets[name])] if name in targets else name: tuple(tensor.shape)
            for name, tensor in given.items()
        }
        expected = {
            name: tuple(targets[name].shape)
            for name in first.values()
            if name in shapes or isinstance(targets[name], torch.nn.Parameter)
        }  # buffers may be left out
        check_shapes(shapes, expected, "the weights")
        for name, tensor in given.items():
            targets[name].copy_(tensor.reshape(targets[name].shape))
        if self.pictures is not None:
            self.pictures.forget()


def check_context(model: PreTrainedModel, max_context_tokens: int) -> None:
    """Checks that a context of this length is one that embedded generation gets right.

    Raises: ConfigError: the model has fewer positions. ModelError: its rotary embeddings are others
        for longer sequences, so that the keys in the cache would be wrong.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and max_context_tokens > limit:
        raise ConfigError(
            f"rollout.max_context_tokens is {max_context_tokens}, but the model has "
            f"max_position_embeddings {limit}"
        )
    for kind, limit in rope_limits(model.config).items():
        if max_context_tokens > limit:
            raise ModelError(
                f"{type(model).__name__} has {kind} rotary embeddings: beyond {limit} tokens they "
                "turn the keys of all tokens otherwise, also of those that were sampled before; "
                f"expected rollout.max_context_tokens of at most {limit}, got {max_context_tokens}"
            )


def _check_supported(model: PreTrainedModel) -> None:
    """Raises: ModelError: layers know the past by something else than keys and values."""
    config, name = model.config.get_text_config(), type(model).__name__
    known = {"full_attention", "sliding_attention"}
    other = set(getattr(config, "layer_types", None) or ()) - known
    if other:
        raise ModelError(
            f"{name} has layers of type {', '.join(sorted(other))}; embedded generation caches "
            "keys and values of attention, full or in windows: use SGLang"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder model; embedded generation needs a decoder")
