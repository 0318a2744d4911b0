"""Tiny models that read pictures, of each family that is known, with random weights and all that a
model folder has."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEXT = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1},
}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "image_size": 32, "patch_size": 8}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
FAKE, PLACES = "<fake_token_around_image>", "<image>"
PARTS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]


@dataclass(frozen=True)
class Family:
    """What makes a folder of a model.

    Attributes:
        special: tokens beside those of text.
        marker: the token that stands for a picture in a prompt.
        place: the token at each of its places.
        config: of the model; takes the number of a special token, and how many tokens there are.
        images: makes the image processor.
    """

    special: Sequence[str]
    marker: str
    place: str
    config: Callable[[Callable[[str], int], int], Any]
    images: Callable[[], Any]


def _idefics(config: Any) -> Callable[[Callable[[str], int], int], Any]:
    return lambda number, size: config(
        text_config={**TEXT, "model_type": "llama", "vocab_size": size},
        vision_config={**TOWER, "num_hidden_layers": 2, "num_attention_heads": 2},
        scale_factor=2,
        image_token_id=number(PLACES),
        pad_token_id=0,
    )


def _qwen(config: Any, tower: dict[str, Any], **rope: Any) -> Callable[..., Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "num_heads": 2}
    patches = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return lambda number, size: config(
        text_config={**TEXT, "vocab_size": size, "rope_parameters": {**ROPE, **rope}},
        vision_config={**sizes, **patches, **tower},
        image_token_id=number("<|image_pad|>"),
        video_token_id=number("<|video_pad|>"),
        vision_start_token_id=number("<|vision_start|>"),
        vision_end_token_id=number("<|vision_end|>"),
    )


def _gemma(number: Callable[[str], int], size: int) -> Any:
    return hf.Gemma3Config(
        text_config={**TEXT, "vocab_size": size, "sliding_window": 64},
        vision_config={
            **TOWER,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vision_use_head": False,
        },
        mm_tokens_per_image=4,
        image_token_index=number("<image_soft_token>"),
        image_token_id=number("<image_soft_token>"),
        boi_token_index=number("<start_of_image>"),
        eoi_token_index=number("<end_of_image>"),
    )


_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_GEMMA_TOKENS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
_IDEFICS_TOKENS = (FAKE, PLACES, "<end_of_utterance>", "<global-img>", *PARTS)


def _split(kind: Any) -> Any:
    return kind(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})


def _patches() -> Any:
    return hf.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=1024
    )


FAMILIES = {
    "idefics3": Family(
        _IDEFICS_TOKENS,
        PLACES,
        PLACES,
        _idefics(hf.Idefics3Config),
        lambda: _split(hf.Idefics3ImageProcessorPil),
    ),
    "smolvlm": Family(
        _IDEFICS_TOKENS,
        PLACES,
        PLACES,
        _idefics(hf.SmolVLMConfig),
        lambda: _split(hf.SmolVLMImageProcessorPil),
    ),
    "qwen2_5_vl": Family(
        _QWEN_TOKENS,
        "<|image_pad|>",
        "<|image_pad|>",
        _qwen(hf.Qwen2_5_VLConfig, {"depth": 2, "window_size": 16, "fullatt_block_indexes": [1]}),
        _patches,
    ),
    "qwen3_vl": Family(
        _QWEN_TOKENS,
        "<|image_pad|>",
        "<|image_pad|>",
        _qwen(
            hf.Qwen3VLConfig,
            {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
            mrope_interleaved=True,
        ),
        _patches,
    ),
    "gemma3": Family(
        _GEMMA_TOKENS,
        "<start_of_image>",
        "<image_soft_token>",
        _gemma,
        lambda: hf.Gemma3ImageProcessorPil(size={"height": 32, "width": 32}),
    ),
}

TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}MARKER{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<eos>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def save_picture_model(
    folder: Path, family: str, seed: int = 0, patch: int = 0, **text: Any
) -> Path:
    """Writes the folder of a model; its tokens are characters.

    Args:
        patch: pixels along a side of a patch, where the family is one of Qwen's.
        text: further settings of the decoder.
    """
    its = FAMILIES[family]
    characters = [*map(chr, range(32, 127)), "\n"]
    special = ["<pad>", "<eos>", *its.special]
    numbers = {token: number for number, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    named = {}
    if family == "gemma3":
        names = ("boi_token", "eoi_token", "image_token")
        named = {"extra_special_tokens": dict(zip(names, its.special, strict=True))}
    fast = hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", **named
    )
    marker = f"{its.special[0]}{its.marker}{its.special[1]}" if "qwen" in family else its.marker
    fast.chat_template = TEMPLATE.replace("MARKER", marker)
    fast.save_pretrained(folder)
    images, config = its.images(), its.config(lambda token: numbers[token], len(numbers))
    if patch:
        config.vision_config.patch_size = images.patch_size = patch
        config.vision_config.window_size = 4 * patch
        images.size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": (8 * patch) ** 2}
    images.save_pretrained(folder)
    for name, value in text.items():
        setattr(config.text_config, name, value)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = hf.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return folder


def own_logprobs(model: Any, folder: Path, ids: torch.Tensor, pictures: Sequence[bytes]) -> Any:
    """[T] by the model's own forward of one row, all of whose pictures are processed at once."""
    family = model.config.model_type
    place = hf.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(FAMILIES[family].place)
    inputs: dict[str, Any] = {"input_ids": ids[None]}
    if pictures:
        images = [Image.open(io.BytesIO(it)) for it in pictures]
        process = hf.AutoImageProcessor.from_pretrained(folder, backend="pil")
        is_split = family in ("idefics3", "smolvlm")
        made = process(images=[images] if is_split else images, return_tensors="pt")
        inputs |= {name: it for name, it in made.items() if name != "num_crops"}
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
        kinds = (inputs["input_ids"] == place).int()
        name = {"qwen2_5_vl": "mm_token_type_ids", "qwen3_vl": "mm_token_type_ids"}
        name["gemma3"] = "token_type_ids"
        inputs |= {name[family]: kinds} if family in name else {}
    logprobs = model(**inputs, use_cache=False).logits[0].log_softmax(-1)
    found = logprobs[:-1].gather(1, ids[1:, None])[:, 0]
    return torch.cat([found.new_zeros(1), found])
