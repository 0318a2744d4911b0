"""A model that sees: it learns to count shapes in drawn pictures, by demonstrations and then by RL.

    python examples/count_shapes.py --config configs/count_shapes.yaml

A picture is a board of 4 x 4 cells with circles and squares, and the model is asked how many there
are of one kind. It is made here, of 90 thousand random weights in the form of Idefics3; its vision
tower stays random. Demonstrations end before it counts well. Reinforcement learning, whose reward
is 1 for the right number, does the rest. docs/pictures.md says more.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_sc import GRPOConfig, PPOTrainer, SFTTrainer, SingleTurnWorkflow, load_config, run_script
from areal_sc.config.fields import setting

CELLS, CELL = 4, 8
"""The board's width in cells, and a cell's in pixels."""

KINDS = ("circles", "squares")
SPECIAL = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% if message.role == 'assistant' %}${% endif %}{% endfor %}"
)


@dataclass
class Task:
    """The script's own settings."""

    most_shapes: int = setting(4, "of a kind, in a picture", ge=1, le=8)
    num_rows: int = setting(2000, "pictures to train on", ge=1)
    num_held_out: int = setting(128, "pictures of evaluations", ge=1)
    sft_steps: int = setting(70, "training steps on demonstrations", ge=1)
    sft_batch_size: int = setting(64, "demonstrations a step", ge=1)
    sft_lr: float = setting(3e-3, "learning rate on demonstrations", gt=0)


@dataclass
class Config(GRPOConfig):
    task: Task = setting(Task)  # type: ignore[assignment]  # in place of a dict


def drawn(counts: dict[str, int], chance: random.Random) -> Any:
    """A picture with so many shapes of each kind, in cells that are drawn by lot."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (CELLS * CELL, CELLS * CELL), "white")
    pen = ImageDraw.Draw(picture)
    cells = chance.sample(range(CELLS**2), sum(counts.values()))
    for kind in (it for it in KINDS for _ in range(counts[it])):
        row, column = divmod(cells.pop(), CELLS)
        x, y = column * CELL + 1, row * CELL + 1
        draw = pen.ellipse if kind == "circles" else pen.rectangle
        draw((x, y, x + CELL - 3, y + CELL - 3), fill="red" if kind == "circles" else "blue")
    return picture


def boards(task: Task, seed: int) -> list[dict[str, Any]]:
    """Rows, always the same ones of a seed."""
    chance, rows = random.Random(seed), []
    for _ in range(task.num_rows + task.num_held_out):
        counts = {kind: chance.randint(0, task.most_shapes) for kind in KINDS}
        kind = chance.choice(KINDS)
        answer = str(counts[kind])
        picture = drawn(counts, chance)
        rows.append({"prompt": f"{kind}?", "images": [picture], "answer": answer})
    return rows


def is_right(prompt: dict[str, Any], completion: str) -> float:
    return float(completion == prompt["answer"])


def make_model(folder: Path) -> None:
    """Writes a model with random weights, its tokenizer and its image processor."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        PreTrainedTokenizerFast,
    )

    characters = sorted({*"0123456789?", *"".join(KINDS)})
    tokens = {token: number for number, token in enumerate(["$", *SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["$", *SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="$")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    side = {"longest_edge": CELLS * CELL}
    kind = {"image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": False}
    images = json.dumps({**kind, "size": side, "max_image_size": side})
    (folder / "preprocessor_config.json").write_text(images)
    torch.manual_seed(0)
    config = Idefics3Config(
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokens),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "bos_token_id": None,
            "eos_token_id": 0,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": CELLS * CELL,
            "patch_size": CELL,
        },
        scale_factor=1,
        image_token_id=tokens["<image>"],
    )
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)


def main(argv: list[str]) -> None:
    config = load_config(argv, Config)
    task = config.task
    rows = boards(task, config.seed)
    training, held_out = rows[: task.num_rows], rows[task.num_rows :]
    shown = Path(f"{config.run_dir}-shown")  # the run of the demonstrations
    if not (shown / "model" / "config.json").is_file():
        make_model(Path(config.actor.path))
        own = [f"run_dir={shown}", f"total_steps={task.sft_steps}"]
        own.append(f"actor.optimizer.lr={task.sft_lr}")
        SFTTrainer(load_config([*argv, *own], Config, generates=False)).fit(
            [{**row, "completion": row["answer"]} for row in training],
            batch_size=task.sft_batch_size,
        )
    PPOTrainer(load_config([*argv, f"actor.path={shown / 'model'}"], Config)).fit(
        SingleTurnWorkflow(is_right, use_chat_template=True),
        training,
        evaluation_prompts=held_out,
    )


if __name__ == "__main__":
    sys.exit(run_script(main))
