"""Demonstrations and pairs with pictures, as tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import picture
from picture_models import save_picture_model

from areal_sc.demonstrations.rows import encode_demonstrations, encode_pairs
from areal_sc.demonstrations.turns import TurnEncoder
from areal_sc.engines.picture_processor import picture_processor
from areal_sc.engines.tokenizer import load_tokenizer
from areal_sc.errors import WorkflowError
from areal_sc.sources.pictures import unpacked

FIRST, SECOND = picture(0), picture(1, 24, 48)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_picture_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


def encoder_of(folder: Path, **options: Any) -> TurnEncoder:
    tokenizer = load_tokenizer(folder)
    return TurnEncoder(tokenizer, [1], processor=picture_processor(folder, tokenizer), **options)


def told(folder: Path, item: dict[str, Any]) -> tuple[str, str]:
    """A row as text, with one mark for each place of a picture, and what is trained of it."""
    tokenizer = load_tokenizer(folder)
    pairs = zip(item["input_ids"], item["loss_mask"], strict=True)
    trained = tokenizer.decode([token for token, is_trained in pairs if is_trained])
    whole = tokenizer.decode(item["input_ids"]).replace("<|image_pad|>", "#")
    return whole.replace("<|vision_start|>", "[").replace("<|vision_end|>", "]"), trained


def shown(shown: bytes, text: str) -> dict[str, Any]:
    parts = [{"type": "image", "image": shown}, {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


def test_a_conversation_with_pictures_in_two_turns(folder: Path) -> None:
    says = [{"role": "assistant", "content": it} for it in ("one", "two")]
    messages = [shown(FIRST, "a"), says[0], shown(SECOND, "b"), says[1]]
    (item,) = encode_demonstrations([{"messages": messages}], encoder_of(folder), 200).items
    whole, trained = told(folder, item)
    assert whole == f"u:[{'#' * 8}]a<eos>a:one<eos>u:[{'#' * 10}]b<eos>a:two<eos>"
    assert trained == "one<eos>two<eos>"
    assert unpacked(item["pictures"]) == (FIRST, SECOND)


def test_a_prompt_with_pictures_and_one_without(folder: Path) -> None:
    rows = [
        {"prompt": "what", "completion": "it", "images": [FIRST]},
        {"prompt": "what", "completion": "it"},
    ]
    with_one, without = encode_demonstrations(rows, encoder_of(folder), 200).items
    assert told(folder, with_one) == (f"u:[{'#' * 8}]what<eos>a:it<eos>", "it<eos>")
    assert told(folder, without) == ("u:what<eos>a:it<eos>", "it<eos>")
    assert "pictures" not in without


def test_plain_text_has_a_marker(folder: Path) -> None:
    row = {"prompt": "see <image>: ", "completion": "it", "images": FIRST}
    encoder = encoder_of(folder, use_chat_template=False)
    (item,) = encode_demonstrations([row], encoder, 200).items
    assert told(folder, item) == (f"see [{'#' * 8}]: it<eos>", "it<eos>")
    with pytest.raises(WorkflowError, match=r"row 0 .* has 0 markers .* there are 1 pictures"):
        encode_demonstrations([{**row, "prompt": "see"}], encoder, 200)


def test_a_pair_has_its_picture_in_both_rows(folder: Path) -> None:
    row = {"prompt": "what", "chosen": "a", "rejected": "b", "images": [FIRST]}
    (pair,) = encode_pairs([row], encoder_of(folder), 200).items
    for name in ("chosen", "rejected"):
        assert unpacked(pair[name]["pictures"]) == (FIRST,)


def test_what_cannot_be_trained_names_its_row(folder: Path, tiny_model_folder: Path) -> None:
    row = {"prompt": "what", "completion": "it", "images": [FIRST[:200]]}
    with pytest.raises(WorkflowError, match=r"row 1 of the dataset: .* is damaged"):
        encode_demonstrations([{**row, "images": FIRST}, row], encoder_of(folder), 200)
    tokenizer = load_tokenizer(tiny_model_folder)
    encoder = TurnEncoder(tokenizer, [1], use_chat_template=False)
    with pytest.raises(WorkflowError, match="has pictures, and the model reads none"):
        encode_demonstrations([{**row, "images": FIRST}], encoder, 200)
