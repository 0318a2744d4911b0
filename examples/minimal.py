"""A whole training run on one screen: a task, a model and a loop of one's own. Copy it.

    python examples/minimal.py --config configs/minimal.yaml

A small model that knows nothing learns to name the larger of two digits (`3,8>` -> `8`), on two
CPU cores, in about a minute: accuracy 0.1 -> 0.97. For a model that can read, leave `make_model`
out, and set `actor.path: Qwen/Qwen2.5-0.5B-Instruct`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from areal_sc import (
    GRPOConfig,
    RolloutController,
    SingleTurnWorkflow,
    TrainController,
    load_config,
    make_actor,
    make_generator,
    make_scheduler,
    run_script,
    start,
)

MODEL = "runs/minimal_model"
DIGITS = range(10)
PROMPTS = [{"prompt": f"{a},{b}>", "answer": str(max(a, b))} for a in DIGITS for b in DIGITS]


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
    if not Path(MODEL, "model.safetensors").exists():  # the last file of it
        make_model(MODEL)
    config = load_config(argv, GRPOConfig)  # --config x.yaml key=value ...
    scheduler = make_scheduler(config.scheduler)
    actor = TrainController(make_actor(config.actor), scheduler)
    rollout = RolloutController(make_generator(config.rollout), scheduler)
    workflow = SingleTurnWorkflow(reward)
    with start(actor, rollout):  # worker processes come up, and go at the end
        for step in range(actor.version, config.total_steps):
            batch = rollout.prepare_batch(PROMPTS, workflow)
            batch = actor.compute_advantages(batch)
            batch = actor.compute_proximal_logprobs(batch)
            stats = actor.ppo_update(batch)
            actor.publish_weights(rollout)  # version += 1; generation goes on
            accuracy = rollout.batch_metrics["accuracy"]
            print(f"step={step + 1} accuracy={accuracy:.3f} loss={stats['loss']:.4f}")
        actor.save_hf(f"{config.run_dir}/model")  # `transformers` loads it


if __name__ == "__main__":
    sys.exit(run_script(main))
