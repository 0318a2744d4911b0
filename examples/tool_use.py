"""A model learns to use a tool, in a conversation of two turns: it asks, and then it answers.

    python examples/tool_use.py --config configs/tool_use.yaml

The user names a key, the tool `look_up` knows the digit that belongs to it, and the answer must be
that digit. The small model that is made first has seen demonstrations that mostly ask for another
key, or answer with another digit: about one of five is right. Reinforcement learning does the rest.
"""

from __future__ import annotations

import json
import random
import shutil
import string
import sys
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from areal_sc import (
    Conversation,
    GRPOConfig,
    PPOTrainer,
    Prompts,
    TrainController,
    Trajectory,
    Workflow,
    load_config,
    make_actor,
    run_script,
    start,
)
from areal_sc.config.schema import ActorConfig, LrSchedule, OptimizerConfig
from areal_sc.demonstrations.turns import TurnEncoder
from areal_sc.schedulers.base import Scheduler
from areal_sc.workflows.base import EpisodeEngine

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Gives the digit that belongs to a key.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
TEMPLATE = """\
{% for tool in tools or [] %}<|tool|>{{ tool.function.name }}<|end|>{% endfor %}\
{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}\
{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>\
{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

KEYS = string.ascii_lowercase[:8]
SPECIAL = ("<|tool|>", "<|user|>", "<|assistant|>", "<|end|>", "<pad>")
WORDS = ("<tool_call>", "</tool_call>", "look_up", "name", "arguments", "key", "none")
VOCABULARY = (*SPECIAL, *WORDS, *KEYS, *string.digits, *' {}":,')

WARM_UP_ROWS = 32
SHARE_RIGHT_KEY, SHARE_RIGHT_ANSWER = 0.45, 0.4


class Keys(Prompts):
    """Questions, each with a table of its own, made from (seed, index).

    Args:
        seed: another seed gives other questions.
        size: number of questions; the default is never used up.
    """

    def __init__(self, seed: int, size: int = 1 << 31) -> None:
        self.seed = seed
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = random.Random(f"{self.seed}/{index}")
        table = {letter: rng.choice(string.digits) for letter in KEYS}
        key = rng.choice(KEYS)
        return {"question": f"key {key}", "key": key, "table": table}


class Demonstrations(Keys):
    """Whole conversations as tokens; most of them are wrong.

    Args:
        folder: with the tokenizer.
    """

    def __init__(self, seed: int, folder: str) -> None:
        super().__init__(seed)
        self.folder = folder

    @cached_property
    def encoder(self) -> TurnEncoder:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        return TurnEncoder(tokenizer, [tokenizer.eos_token_id])

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        rng = random.Random(f"demonstration/{self.seed}/{index}")
        is_right = rng.random() < SHARE_RIGHT_KEY
        key = row["key"] if is_right else rng.choice(KEYS)
        found = row["table"][key]
        answer = found if rng.random() < SHARE_RIGHT_ANSWER else rng.choice(string.digits)
        call = {"function": {"name": "look_up", "arguments": {"key": key}}}
        messages = [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": found},
            {"role": "assistant", "content": answer},
        ]
        return self.encoder.conversation(messages, tools=[TOOL])


class LookUp(Workflow):
    """One call of the tool, and the answer; 1 for the right digit, else 0."""

    async def run_episode(
        self, prompt: dict[str, Any], engine: EpisodeEngine
    ) -> list[Trajectory] | None:
        conversation = Conversation(prompt["question"])
        turn = await engine.chat(conversation, tools=[TOOL])
        has_called = bool(turn.tool_calls)
        if has_called:
            for call in turn.tool_calls:
                found = prompt["table"].get(call.arguments.get("key"), "none")
                conversation.add(call.answer(found))
            turn = await engine.chat(conversation, tools=[TOOL])
        reward = float(has_called and turn.content == prompt["table"][prompt["key"]])
        return conversation.trajectories(reward, {"accuracy": reward, "called": float(has_called)})


def write_untrained_folder(folder: Path) -> None:
    """A Hugging Face folder without weights: a decoder of about 210,000 parameters."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[a-z_]+|."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(SPECIAL))
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in WORDS[:2]])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<pad>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2))
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(VOCABULARY),
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": VOCABULARY.index("<|end|>"),
        "pad_token_id": VOCABULARY.index("<pad>"),
    }
    (folder / "config.json").write_text(json.dumps(model, indent=2))


def warm_up(config: ActorConfig, num_steps: int, seed: int, scheduler: Scheduler) -> None:
    """Imitates the demonstrations, and writes the model to `actor.path`."""
    untrained = Path(scheduler.config.run_dir) / "untrained"
    write_untrained_folder(untrained)
    optimizer = OptimizerConfig(
        lr=2e-3,
        beta2=0.98,
        schedule=LrSchedule.cosine,
        warmup_steps=num_steps // 20,
        total_steps=num_steps,
    )
    imitation = replace(config, path=str(untrained), random_init=True, optimizer=optimizer)
    actor = TrainController(make_actor(imitation), scheduler)
    demonstrations = Demonstrations(seed, str(untrained.resolve()))
    with start(actor):
        for step in range(num_steps):
            first = step * WARM_UP_ROWS
            actor.sft_update(demonstrations, range(first, first + WARM_UP_ROWS))
        actor.save_hf(config.path)
    shutil.rmtree(untrained)


def train(argv: list[str], workflow: Workflow, evaluation_workflow: Workflow | None = None) -> None:
    """Makes the model that is trained, if it is not there, and trains it on the task."""
    config = load_config(argv, GRPOConfig, makes_model=True)
    with PPOTrainer(config) as trainer:
        if not Path(config.actor.path, "config.json").is_file():
            with trainer.display.phase("warm-up"):
                warm_up(config.actor, config.task["warm_up_steps"], config.seed, trainer.scheduler)
        trainer.fit(
            workflow,
            Keys(config.seed),
            evaluation_prompts=Keys(config.seed + 1_000_003, size=256),
            evaluation_workflow=evaluation_workflow,
        )


def main(argv: list[str]) -> None:
    train(argv, LookUp())


if __name__ == "__main__":
    sys.exit(run_script(main))
