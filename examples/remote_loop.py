"""A training loop on a laptop: `python -m areal_sc serve` computes, over the Tinker API.

    python examples/letter_sort.py --config configs/letter_sort.yaml total_steps=1  # its model
    python -m areal_sc serve --config configs/letter_sort.yaml run_dir=runs/served
    python examples/remote_loop.py http://127.0.0.1:8321 runs/served/serving/keys/default

The model learns to sort letters by importance sampling, from 16 prompts with 8 answers a step. The
server may be killed and started again meanwhile. Needs `pip install 'areal-sc[serve]'`.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import tinker
from tinker import types
from transformers import AutoTokenizer

STEPS, PROMPTS, ANSWERS = 60, 16, 8
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ADAM = types.AdamParams(learning_rate=4e-4, beta2=0.999, eps=1e-8)


def main(url: str, key_file: str) -> None:
    client = tinker.ServiceClient(base_url=url, api_key=Path(key_file).read_text())
    (served,) = (
        tinker.RestClient(base_url=url, api_key=Path(key_file).read_text())
        .get_server_capabilities()
        .result()
        .supported_models
    )
    model = client.create_lora_training_client(base_model=served.model_name, rank=0).result()
    tokenizer = AutoTokenizer.from_pretrained(model.get_info().model_data.tokenizer_id)
    draw = random.Random(0)
    for step in range(STEPS):
        sampler = model.save_weights_and_get_sampling_client().result()
        words = ["".join(draw.sample(LETTERS, draw.randint(4, 10))) for _ in range(PROMPTS)]
        prompts = [tokenizer.encode(f"{word}=", add_special_tokens=False) for word in words]
        asked = types.SamplingParams(max_tokens=32)
        answers = [
            sampler.sample(types.ModelInput.from_ints(prompt), ANSWERS, asked) for prompt in prompts
        ]
        rows, rewards = list[types.Datum](), list[float]()
        for word, prompt, answer in zip(words, prompts, answers, strict=True):
            right = "".join(sorted(word)) + "$"
            found = answer.result().sequences
            paid = [float(tokenizer.decode(it.tokens) == right) for it in found]
            rewards += paid
            for it, reward in zip(found, paid, strict=True):
                advantage = reward - sum(paid) / len(paid)
                if advantage:
                    rows.append(row_of(prompt, it, advantage))
        if rows:
            model.forward_backward(rows, "importance_sampling")
            model.optim_step(ADAM).result()
        print(f"step={step} accuracy={sum(rewards) / len(rewards):.3f}", flush=True)
    print(model.save_state("sorted").result().path)


def row_of(prompt: list[int], answer: types.SampledSequence, advantage: float) -> types.Datum:
    """Position i of each list is about token i + 1 of prompt and answer."""
    tokens = [*prompt, *answer.tokens]
    before = [0.0] * (len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": before + list(answer.logprobs or ()),
            "advantages": before + [advantage] * len(answer.tokens),
        },
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
