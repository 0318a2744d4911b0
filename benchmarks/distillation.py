"""Tokens that a student samples until it is near its teacher: by these alone, or by its top k.

    python benchmarks/distillation.py [--quick] [--json FILE] [--seeds 3] [--top-k 16]
        [--lrs 2.5e-4 5e-4 1e-3]

Both are one tiny random model, the student with noise on its weights. In each step it samples
answers of its own, the teacher says what a preset reads of them, and one update follows. What is
told is the KL(student || teacher) over the whole vocabulary, in float64, at the tokens of a step's
answers before they are trained, and after how many sampled tokens the mean of three steps is at
most 0.02 nats. Each way has the learning rate with which it comes nearest in the fewest.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Final

import report
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.config.optimizer_settings import OptimizerConfig
from areal_sc.config.schema import ActorConfig, Device
from areal_sc.engines.handles import make_actor
from areal_sc.token_fields import TOP_LOGPROBS, TOP_TOKENS
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.transport.shards.layout import ShardLayout

VOCAB_SIZE, ROWS, ROW_TOKENS = 64, 32, 17
NOISE: Final = 0.01
SHARPNESS: Final = 3.0
NEAR_NATS: Final = 0.02
WINDOW: Final = 3
SAMPLED: Final = "sampled_token"


def random_model(seed: int) -> Any:
    """Far from uniform: it gives its likeliest token 0.3 or so."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
        model.lm_head.weight.mul_(SHARPNESS)
    return model


@torch.no_grad()
def answers(model: Any, generator: torch.Generator) -> PackedRows:
    """One token each, and what the model samples behind it."""
    ids = torch.randint(VOCAB_SIZE, (ROWS, 1), generator=generator)
    cache, last, sampled = None, ids, []
    for _ in range(ROW_TOKENS - 1):
        output = model(last, past_key_values=cache, use_cache=True)
        cache, logprobs = output.past_key_values, output.logits[:, -1].float().log_softmax(-1)
        last = torch.multinomial(logprobs.exp(), 1, generator=generator)
        ids = torch.cat([ids, last], 1)
        sampled.append(logprobs.gather(1, last))
    is_trained = torch.ones(ROWS, ROW_TOKENS, dtype=torch.bool)
    is_trained[:, 0] = False
    fields = {
        "input_ids": ids.int().flatten(),
        "loss_mask": is_trained.flatten(),
        "behavior_logprobs": torch.cat([torch.zeros(ROWS, 1), *sampled], 1).flatten(),
    }
    return PackedRows(fields, (ROW_TOKENS,) * ROWS)


@torch.no_grad()
def divergence(student: Any, teacher: Any, rows: PackedRows) -> float:
    """KL(student || teacher), the mean over sampled tokens; nats."""
    ids = rows.fields["input_ids"].view(ROWS, ROW_TOKENS).long()
    p, q = (model(ids).logits[:, :-1].double().log_softmax(-1) for model in (student, teacher))
    return float((p.exp() * (p - q)).sum(-1).mean())


def tokens_until_near(
    loss: NamedLoss, seed: int, lr: float, steps: int, folder: Path
) -> report.Metrics:
    """Sampled tokens until the student is near, and its divergence at the beginning and the end."""
    model = random_model(seed)
    model.save_pretrained(folder / "teacher")
    student = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(torch.randn_like(parameter) * NOISE)
    student.save_pretrained(folder / "student")
    optimizer = OptimizerConfig(lr=lr, total_steps=steps)
    config = ActorConfig(path=str(folder / "student"), device=Device.cpu, optimizer=optimizer)
    trained = make_actor(config).build()
    teacher = make_actor(replace(config, path=str(folder / "teacher")), is_frozen=True).build()
    for engine in (trained, teacher):
        engine.initialize(0, 1, "")
    generator, found, bytes_per_row = torch.Generator().manual_seed(seed), list[float](), 0.0
    for step in range(steps):
        rows = answers(student, generator)
        found.append(divergence(student, model, rows))
        if len(found) >= WINDOW and fmean(found[-WINDOW:]) <= NEAR_NATS:
            break
        read: Mapping[str, torch.Tensor]
        if loss.top_k:
            values = teacher.top_logprobs(rows, loss.top_k)
            read = dict(zip((TOP_LOGPROBS, TOP_TOKENS), values, strict=True))
        else:
            read = {"teacher_logprobs": teacher.forward(rows, "logprobs")}
        bytes_per_row = ShardLayout.of(read, rows.lengths).num_bytes / ROWS
        trained.update([replace(rows, fields={**rows.fields, **read})], loss, step=step)
        with torch.no_grad():
            for bucket in trained.gather_weights(1 << 24):
                for name, weights in bucket:
                    parameter = student.get_parameter(name)
                    parameter.copy_(weights.view_as(parameter))
    for engine in (trained, teacher):
        engine.close()
    last = fmean(found[-WINDOW:])
    near = {"near_after_tokens": float(len(found) * ROWS * (ROW_TOKENS - 1))}
    return {
        **(near if last <= NEAR_NATS else {}),
        "first_kl_nats": found[0],
        "last_kl_nats": last,
        "bytes_per_row": bytes_per_row,
    }


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="at most")
    parser.add_argument("--top-k", type=int, default=16)
    parser.add_argument("--lrs", type=float, nargs="+", default=[2.5e-4, 5e-4, 1e-3])
    arguments = report.parse(parser, seeds=1, steps=3, lrs=[1e-3])
    torch.set_num_threads(1)
    ways = {SAMPLED: NamedLoss("reverse_kl")} | {
        f"top_{arguments.top_k}_{direction}": NamedLoss(
            "top_k_kl", {"top_k": arguments.top_k, "direction": direction}
        )
        for direction in ("forward", "reverse")
    }
    records: dict[tuple[str | int, ...], report.Metrics] = {}
    for seed in range(arguments.seeds):
        for way, loss in ways.items():
            tried = {}
            for lr in arguments.lrs:
                with TemporaryDirectory(prefix="areal-sc-benchmark-") as name:
                    tried[lr] = tokens_until_near(loss, seed, lr, arguments.steps, Path(name))
                report.say(f"{way} seed={seed} lr={lr:g} {tried[lr]}")
            most = float(arguments.steps * ROWS * ROW_TOKENS)
            best, found = min(
                tried.items(),
                key=lambda it: (it[1].get("near_after_tokens", most), it[1]["last_kl_nats"]),
            )
            records[way, seed] = {**found, "lr": best}
            report.write(report.flat(records), arguments.json)
    settings = {"top_k": arguments.top_k, "near": f"{NEAR_NATS} nats", "lrs": arguments.lrs}
    report.print_records("Distillation", settings, ("way", "seed"), records)


if __name__ == "__main__":
    main()
