"""What a Hugging Face model folder says about its model, read without torch or transformers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from areal_sc.config.lora_settings import ADAPTER_CONFIG
from areal_sc.errors import CheckpointError, ModelError
from areal_sc.sizing.adapter_folder import is_adapter_folder
from areal_sc.sizing.model_formula import HEADS, LayerSizes, first_int, numbers_of_parameters

_OTHER_THAN_TEXT = (
    *("vision", "visual", "vlm", "image", "video", "vq", "audio", "speech", "codec"),
    *("thinker", "protein"),
)
"""How sections of `config.json` begin that set up encoders of something else."""

PICTURE_FAMILIES = ("gemma3", "idefics3", "qwen2_5_vl", "qwen3_vl", "smolvlm")
"""By `model_type`, the models that read pictures and are trained and generated with them."""

VALUE_HEAD = "score.weight"
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_EXPERTS = ".experts."
_LAYER = re.compile(r"(?:\w+\.)*?\d+(?=\.)")
"""How the name of a tensor of a decoder layer begins: `model.layers.0`."""
_TOWER = re.compile(
    r"(?:^|\.)(?:visual|vision_tower|vision_model|connector|multi_modal_projector)\."
)
"""What the name of a tensor has that makes features of pictures."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder that memory depends on; None where the folder does not tell.

    Attributes:
        num_parameters: of the whole model.
        num_tower_parameters: those among them of what the model sees pictures by; the following
            numbers are without it.
        num_expert_parameters: those among them that belong to one of several experts.
        num_layer_parameters: of the largest decoder layer.
        num_other_parameters: outside of decoder layers.
        num_vocabulary_parameters: of the largest tensor there, embeddings or output layer.
        max_context_tokens: longest sequence that its positions cover.
        kv_values_per_token: numbers that the KV cache keeps of one token, over all layers.
        heads, kv_heads: of attention, in each layer.
        vocabulary: number of tokens.
        layer: sizes of a decoder layer.
        tower: sizes of a layer of what the model sees pictures by.
        patches_per_token: parts of a picture that the tower computes for each of its tokens.
        has_weights: the folder has them; else parameters are counted by formula, as far as the
            family is known.
    """

    num_parameters: int | None = None
    num_tower_parameters: int | None = None
    num_expert_parameters: int | None = None
    num_layer_parameters: int | None = None
    num_other_parameters: int | None = None
    num_vocabulary_parameters: int | None = None
    max_context_tokens: int | None = None
    kv_values_per_token: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    vocabulary: int | None = None
    layer: LayerSizes | None = None
    tower: LayerSizes | None = None
    patches_per_token: int = 0
    has_weights: bool = True


def is_model_folder(path: str | Path) -> bool:
    """Whether a folder is, or is becoming, a model's; `check_model_folder` says if it is whole."""
    return (Path(path) / "config.json").is_file()


def reads_pictures(folder: str | Path) -> bool:
    """Whether the model of a folder is one of `PICTURE_FAMILIES`, with what it sees pictures by.

    Raises: ModelError: `config.json` is broken.
    """
    config = read_whole_config(Path(folder)) or {}
    return config.get("model_type") in PICTURE_FAMILIES and "vision_config" in config


def check_model_folder(path: str | Path, *, needs_weights: bool = True) -> None:
    """Checks, in milliseconds, that a folder holds a model: to be called before workers start.

    Args:
        needs_weights: False: `config.json` alone describes a model whose weights are drawn.
    Raises: ModelError: no folder, no config.json, no weights, or weights that are truncated or
        lack a file; names what is missing. Or a model of more than text and pictures, with an
        encoder, or with an adapter beside it.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"model folder {path}: there is no such folder")
    if is_adapter_folder(folder):
        raise ModelError(
            f"model folder {path}: it holds an adapter ({ADAPTER_CONFIG}), and whole models are "
            "trained and served: begin from it with actor.lora.path and its model with actor.path, "
            "or save the merged model in a folder of its own (peft: merge_and_unload, "
            "save_pretrained), or remove the adapter's files to use the model without it"
        )
    config = read_whole_config(folder)
    if config is None:
        raise ModelError(f"model folder {path}: it has no config.json")
    for name, value in config.items():
        is_known = name == "vision_config" and reads_pictures(folder)
        if isinstance(value, dict) and name.startswith(_OTHER_THAN_TEXT) and not is_known:
            raise ModelError(
                f"model folder {path}: the model is multimodal (its config.json has {name}), and "
                f"pictures are those of {', '.join(PICTURE_FAMILIES)}; others are trained and "
                "served with text alone: save its language model in a folder of its own, as "
                "docs/models.md shows"
            )
    if config.get("is_encoder_decoder"):
        raise ModelError(
            f"model folder {path}: the model has an encoder (its config.json says "
            "is_encoder_decoder); expected a decoder alone"
        )
    if not needs_weights:
        return
    if not any(file for pattern in WEIGHT_PATTERNS for file in folder.glob(pattern)):
        raise ModelError(
            f"model folder {path}: it has no weights; "
            f"expected files named {' or '.join(WEIGHT_PATTERNS)}"
        )
    _check_index(folder)
    read_stored_shapes(folder)


def check_replaceable(path: str | Path) -> Path:
    """The absolute path of a folder that a model may be written to, in place of what is there.

    Raises: CheckpointError: what is there is neither a model folder nor an empty one.
    """
    folder = Path(path).expanduser().absolute()
    try:
        is_model = is_model_folder(folder) or is_adapter_folder(folder)
        is_free = not folder.exists() or is_model or not any(folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"cannot write the model to {folder}: {error}") from error
    if not is_free:
        raise CheckpointError(
            f"cannot write the model to {folder}: it has other files in it and is not a model's "
            "folder, so it is left alone; choose another folder"
        )
    return folder


def _check_index(folder: Path) -> None:
    """Raises: ModelError: a file that the index of a split model names is not there."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: cannot be read: {error!r}; copy the model again") from error
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise ModelError(
            f"model folder {folder}: {len(missing)} of the {len(names)} files that "
            f"{index.name} names are missing, e.g. {missing[0]}; copy them, too"
        )


def read_model_config(folder: Path) -> dict[str, Any] | None:
    """The decoder's part of `config.json`, or None when there is no such file.

    Raises: ModelError: the file is not a JSON object.
    """
    content = read_whole_config(folder)
    # multimodal models keep the decoder's settings in a section of their own
    decoder = None if content is None else content.get("text_config", content)
    return decoder if isinstance(decoder, dict) else content


def read_whole_config(folder: Path) -> dict[str, Any] | None:
    """`config.json`, or None when there is no such file.

    Raises: ModelError: it is not a JSON object.
    """
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object, got a {type(content).__name__}")
    return content


def read_model_shape(path: str | Path) -> ModelShape | None:
    """The sizes that a model folder tells, or None when there is no model yet.

    Raises: ModelError: `config.json` or a weight file is broken.
    """
    folder = Path(path)
    config = read_model_config(folder)
    if config is None:
        return None
    sizes = {name: prod(shape) for name, shape in read_stored_shapes(folder).items()}
    layer = LayerSizes.of(config)
    tower, patches_per_token = _sizes_of_tower(read_whole_config(folder) or {})
    return ModelShape(
        **(_numbers_of_parameters(sizes) if sizes else numbers_of_parameters(config)),
        max_context_tokens=first_int(config, "max_position_embeddings", "n_positions"),
        kv_values_per_token=None if layer is None else 2 * layer.num_layers * layer.keys,
        heads=first_int(config, *HEADS),
        kv_heads=first_int(config, "num_key_value_heads", *HEADS),
        vocabulary=first_int(config, "vocab_size"),
        layer=layer,
        tower=tower,
        patches_per_token=patches_per_token,
        has_weights=bool(sizes),
    )


def _sizes_of_tower(config: Mapping[str, Any]) -> tuple[LayerSizes | None, int]:
    """`tower` and `patches_per_token` of a whole `config.json`, as far as it tells them."""
    vision = config.get("vision_config")
    if config.get("model_type") not in PICTURE_FAMILIES or not isinstance(vision, dict):
        return None, 0
    own = {"num_hidden_layers": vision.get("depth"), "num_attention_heads": vision.get("num_heads")}
    merged = first_int(config, "scale_factor") or first_int(vision, "spatial_merge_size") or 1
    patches = merged**2
    if tokens := first_int(config, "mm_tokens_per_image"):
        side = (first_int(vision, "image_size") or 0) // (first_int(vision, "patch_size") or 1)
        patches = -(-(side**2) // tokens)
    named = {name: value for name, value in own.items() if value}
    return LayerSizes.of({**vision, **named}), patches


def read_stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in the folder's safetensors files; {} when there are none.

    Raises: ModelError: a file is damaged, or not as long as its header says.
    """
    shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118  # it is no dict
                    shapes[name] = tuple(file.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{path}: not a whole safetensors file: {error}; "
                "it is truncated or damaged: copy or download it again"
            ) from error
    return shapes


def _numbers_of_parameters(sizes: dict[str, int]) -> dict[str, int]:
    """The numbers of parameters in `ModelShape`, from the size of every tensor."""
    layers, others, of_tower = Counter[str](), [0], 0
    for name, size in sizes.items():
        if _TOWER.search(name):
            of_tower += size
        elif found := _LAYER.match(name):
            layers[found[0]] += size
        else:
            others.append(size)
    return {
        "num_parameters": sum(sizes.values()),
        "num_tower_parameters": of_tower,
        "num_expert_parameters": sum(size for name, size in sizes.items() if _EXPERTS in name),
        "num_layer_parameters": max(layers.values(), default=0),
        "num_other_parameters": sum(others),
        "num_vocabulary_parameters": max(others),
    }


def tokens_of(folder: Path) -> dict[str, int] | None:
    """Token -> number, of `tokenizer.json`; None where that is not there, or has none."""
    try:
        content: Any = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # with a score each
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in content.get("added_tokens", ())}
        return {**vocabulary, **added}
    except (OSError, ValueError, KeyError, TypeError):
        return None
