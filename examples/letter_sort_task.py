"""The letter-sort task: put some distinct letters in order.

    prompt  szrpwek=        answer  ekprswz, and `$`, which ends it

A tiny model learns it on a CPU within minutes, and only by reinforcement: the demonstrations that
it starts from are mostly wrong (most of them sort in descending order), so imitation ends near an
accuracy of 0.2. Prompts are made up on the fly, so that none is ever seen twice.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_sc.sources.prompts import Prompts

LETTERS = string.ascii_lowercase
END = "$"
VOCABULARY = (*LETTERS, "=", END, "<pad>", "<unk>")  # 30 tokens
MAX_TOKENS = 2 * len(LETTERS) + 2
"""Longest prompt and answer, with `=` and `$`."""

SHARE_DESCENDING = 0.6
NOISE_PER_LETTER = 0.05
SHARE_TRUNCATED = 0.1

SHUFFLED_REWARD_MEAN = 0.2
"""Of the control, about the accuracy that reinforcement learning starts from."""


class LetterSortPrompts(Prompts):
    """`size` prompts, made from (seed, index): the same ones in every process.

    The number of letters is lognormal, rounded and clipped to 2..max_letters.

    Args:
        seed: another seed gives other prompts, e.g. held-out ones.
        size: number of prompts; the default is never used up.
        median_letters: of the lognormal distribution.
        sigma_letters: standard deviation of the logarithm.
    """

    def __init__(
        self,
        seed: int,
        size: int = 1 << 31,
        max_letters: int = 26,
        median_letters: float = 7.0,
        sigma_letters: float = 0.6,
    ) -> None:
        if size < 1 or not 2 <= max_letters <= len(LETTERS) or median_letters <= 0:
            raise ValueError(
                "expected size >= 1, 2 <= max_letters <= 26 and median_letters > 0, got "
                f"{size}, {max_letters} and {median_letters}"
            )
        self.seed = seed
        self.size = size
        self.max_letters = max_letters
        self.median_letters = median_letters
        self.sigma_letters = sigma_letters

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.size:
            raise IndexError(f"there are prompts 0..{self.size - 1}, not {index}")
        rng = random.Random(f"prompt/{self.seed}/{index}")
        length = round(rng.lognormvariate(math.log(self.median_letters), self.sigma_letters))
        letters = rng.sample(LETTERS, min(max(length, 2), self.max_letters))
        return {"prompt": "".join(letters) + "=", "answer": "".join(sorted(letters))}


class LetterSortDemonstrations(LetterSortPrompts):
    """The same prompts with an imperfect answer, as tokens, for supervised training.

    60 % sort in descending order, 5 % of the letters are random ones, 10 % end too early: about
    24 % are right.
    """

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        prompt, completion = row["prompt"], demonstration(row["answer"], self.seed, index) + END
        return {
            "input_ids": [VOCABULARY.index(character) for character in prompt + completion],
            "loss_mask": [False] * len(prompt) + [True] * len(completion),
        }


def demonstration(answer: str, seed: int, index: int) -> str:
    """What an unreliable teacher writes, given the right answer."""
    rng = random.Random(f"demonstration/{seed}/{index}")
    letters = sorted(answer, reverse=rng.random() < SHARE_DESCENDING)
    letters = [rng.choice(LETTERS) if rng.random() < NOISE_PER_LETTER else x for x in letters]
    if rng.random() < SHARE_TRUNCATED:
        letters = letters[: rng.randrange(1, len(letters))]
    return "".join(letters)


def letter_sort_reward(prompt: Mapping[str, Any], completion: str) -> float:
    """1 for exactly the right answer, else 0."""
    return float(completion == prompt["answer"])


def shuffled_reward(prompt: Mapping[str, Any], completion: str) -> float:
    """A control that nothing can be learned from: 1 for a pseudo-random fifth of all completions.

    Decided by a hash of prompt and completion, so it is independent of whether the completion is
    right, and no pattern carries over from one prompt to the next.
    """
    digest = hashlib.blake2b(f"{prompt['prompt']}{completion}".encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") < SHUFFLED_REWARD_MEAN * 2**64)


def write_untrained_folder(
    folder: Path,
    hidden_size: int = 96,
    num_layers: int = 3,
    ffn_size: int = 256,
    num_heads: int = 8,
) -> None:
    """A Hugging Face folder without weights: a decoder of about 336,000 parameters by default.

    One token a character; `$` ends an answer. Written as JSON, so that the script that steers the
    run need not import torch for it.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": END, "pad_token": "<pad>", "unk_token": "<unk>"}
    model = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": len(VOCABULARY),
        "hidden_size": hidden_size,
        "intermediate_size": ffn_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "max_position_embeddings": 64,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": VOCABULARY.index(END),
        "pad_token_id": VOCABULARY.index("<pad>"),
    }
    (folder / "config.json").write_text(json.dumps(model, indent=2))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}, indent=2)
    )
