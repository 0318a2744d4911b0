"""A task of one's own with all that a run has around it. `python -m areal_sc new` copies it.

    python examples/first_project.py --config configs/first_project.yaml

A small model that knows nothing learns to name the larger of two digits (`3,8>` -> `8`), on two
CPU cores, in about a minute. It is evaluated on prompts that are held out, the curve is drawn, and
after Ctrl-C or a crash the same command goes on. For a model that can read, leave `make_model` out,
and set `actor.path: Qwen/Qwen2.5-0.5B-Instruct`.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from areal_sc import PPOTrainer, SingleTurnWorkflow, load_config, run_script

MODEL = "runs/first_project_model"
DIGITS = range(10)
PROMPTS = [{"prompt": f"{a},{b}>", "answer": str(max(a, b))} for a in DIGITS for b in DIGITS]
NUM_HELD_OUT = 20


def reward(prompt: dict[str, str], completion: str) -> float:
    return float(completion == prompt["answer"])


def make_model(folder: str) -> None:
    """A tokenizer of single characters, and a small model with random weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    characters = ["$", *"0123456789,>"]  # `$` ends an answer
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="$"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()  # no spaces between the characters
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="$").save_pretrained(folder)
    sizes = LlamaConfig(
        vocab_size=len(characters),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(sizes).save_pretrained(folder)


def main(argv: list[str]) -> None:
    if not Path(MODEL).exists():
        make_model(MODEL)
    config = load_config(argv)  # --config x.yaml key=value ...
    prompts = random.Random(0).sample(PROMPTS, len(PROMPTS))
    PPOTrainer(config).fit(
        SingleTurnWorkflow(reward),
        prompts[NUM_HELD_OUT:],
        evaluation_prompts=prompts[:NUM_HELD_OUT],
    )


if __name__ == "__main__":
    sys.exit(run_script(main))
