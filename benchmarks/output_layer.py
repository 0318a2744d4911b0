"""What a float32 output layer of generation takes off its difference from the trainer, in bfloat16.

    python benchmarks/output_layer.py [--quick] [--json FILE] [--engine sglang]

A model of Qwen2's architecture learns sequences in which a token mostly tells a later one. Its
folder is read by the trainer in bfloat16, and by generation in bfloat16 with and without
`rollout.float32_output_layer`. Of the tokens that are sampled, at temperature 1, the two have the
log-probabilities t and g: the KL divergence of generation from the trainer is the mean of
exp(t - g) - 1 - (t - g), as `behavior_kl` in a run. The random model is that before it learns.

`top_logit` is the mean of the largest logit: rounding of logits grows with it, rounding of hidden
states with the number of layers.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path

import qwen2_models
import report
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from areal_sc.algorithms.named_loss import CROSS_ENTROPY
from areal_sc.config.schema import (
    ActorConfig,
    Device,
    Dtype,
    GenerationConfig,
    OptimizerConfig,
    RolloutConfig,
)
from areal_sc.config.server_settings import SGLangConfig
from areal_sc.engines.base import Completion
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.engines.local.engine import LocalEngine
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.sglang.handle import SGLangEngine
from areal_sc.transport.packed_rows import PackedRows

ROW_TOKENS = 128
PROMPT_TOKENS = 8
CERTAINTY = 0.8
"""How often a token is the one that an earlier token tells."""

LAG = 3
"""Which one: so many places before it, so that attention, whose results are rounded, finds it."""


class Sequences:
    """Rows over a vocabulary of which few tokens are frequent, as in a text."""

    def __init__(self, vocabulary: int) -> None:
        self._generator = torch.Generator().manual_seed(1)
        self._shares = 1 / torch.arange(1, vocabulary + 1).double() ** 1.3
        self._next = torch.multinomial(self._shares, vocabulary, True, generator=self._generator)

    def rows(self, num_rows: int) -> torch.Tensor:
        """[num_rows, ROW_TOKENS] int64."""
        shape = (num_rows, ROW_TOKENS)
        drawn = torch.multinomial(
            self._shares, num_rows * ROW_TOKENS, True, generator=self._generator
        ).view(shape)
        is_told = torch.rand(shape, generator=self._generator) < CERTAINTY
        for place in range(LAG, ROW_TOKENS):
            told = self._next[drawn[:, place - LAG]]
            drawn[:, place] = torch.where(is_told[:, place], told, drawn[:, place])
        return drawn


def learn(folder: Path, target: Path, sequences: Sequences, steps: int, num_rows: int) -> None:
    """Writes the model in `folder`, after so many updates."""
    settings = OptimizerConfig(lr=2e-3, schedule="linear", total_steps=steps + 1, warmup_steps=5)
    engine = FSDPEngine(ActorConfig(path=str(folder), device=Device.cpu, optimizer=settings))
    engine.initialize(0, 1, "")
    for step in range(steps):
        rows = sequences.rows(num_rows)
        mask = torch.ones_like(rows, dtype=torch.bool)
        fields = {"input_ids": rows.flatten().int(), "loss_mask": mask.flatten()}
        packed = PackedRows(fields, (ROW_TOKENS,) * num_rows)
        metrics = engine.update([packed], CROSS_ENTROPY, step=step)
        report.say(f"update {step + 1}: loss {metrics['loss']:.2f}")
    engine.begin_save_hf(target).result()
    engine.close()


def sample(config: RolloutConfig, prompts: list[list[int]], logs: Path) -> list[Completion]:
    async def run() -> list[Completion]:
        engine: LocalEngine | ServerEngine
        if config.engine == "sglang":
            engine = ServerEngine(SGLangEngine(config), log_folder=logs, name="server")
        else:
            engine = LocalEngine(config)
        await engine.start()
        sampling = GenerationConfig(max_new_tokens=ROW_TOKENS - PROMPT_TOKENS)
        try:
            return await asyncio.gather(*(engine.generate(p, sampling) for p in prompts))
        finally:
            await engine.close()

    return asyncio.run(run())


def divergence(folder: Path, prompts: list[list[int]], answers: list[Completion]) -> float:
    engine = FSDPEngine(ActorConfig(path=str(folder), device=Device.cpu, dtype=Dtype.bfloat16))
    engine.initialize(0, 1, "")
    rows = [[*p, *answer.token_ids] for p, answer in zip(prompts, answers, strict=True)]
    fields = {
        "input_ids": torch.tensor([token for row in rows for token in row], dtype=torch.int32),
        "loss_mask": torch.cat([torch.arange(len(row)) >= PROMPT_TOKENS for row in rows]),
    }
    found = engine.forward(PackedRows(fields, tuple(map(len, rows))), "logprobs")
    engine.close()
    generated = torch.tensor([logprob for answer in answers for logprob in answer.logprobs])
    gaps = (found[fields["loss_mask"]] - generated).double()
    return float((gaps.exp() - 1 - gaps).mean())


def top_logit(folder: Path, prompts: list[list[int]]) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return float(model(torch.tensor(prompts), use_cache=False).logits.amax(-1).mean())


def measure(
    folder: Path, prompts: list[list[int]], arguments: argparse.Namespace
) -> report.Metrics:
    found: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(arguments.repeats):
        for is_float32 in (False, True):
            config = RolloutConfig(
                path=str(folder),
                engine=arguments.engine,
                device=Device.cpu,
                dtype=Dtype.bfloat16,
                seed=seed,
                max_context_tokens=ROW_TOKENS,
                float32_output_layer=is_float32,
                sglang=SGLangConfig(python=str(arguments.sglang_python)),
            )
            answers = sample(config, prompts, folder.parent)
            found[is_float32].append(divergence(folder, prompts, answers))
            report.say(f"float32_output_layer={is_float32} kl={found[is_float32][-1]:.2e}")
    rounded, exact = (statistics.fmean(found[is_float32]) for is_float32 in (False, True))
    return {
        "kl_rounded": rounded,
        "kl_float32": exact,
        "kl_float32_over_rounded": exact / rounded,
        "top_logit": top_logit(folder, prompts),
    }


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--engine", choices=("local", "sglang"), default="local")
    parser.add_argument("--sglang-python", type=Path, default=Path(".venv-sglang/bin/python"))
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=150, help="updates before it is measured")
    parser.add_argument("--rows", type=int, default=16, help="of an update, and prompts")
    parser.add_argument("--repeats", type=int, default=3)
    quick = {"hidden": 64, "layers": 1, "vocabulary": 256, "steps": 20, "repeats": 1}
    arguments = report.parse(parser, **quick)
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    heads = arguments.hidden // 32
    shape = qwen2_models.Shape(
        *(arguments.hidden, 4 * arguments.hidden, arguments.layers),
        *(heads, heads // 2, arguments.vocabulary),
    )
    sequences = Sequences(arguments.vocabulary)
    with tempfile.TemporaryDirectory() as name:
        folders = {kind: Path(name) / kind for kind in ("random", "trained")}
        qwen2_models.write_folder(folders["random"], shape, torch.float32)
        learn(folders["random"], folders["trained"], sequences, arguments.steps, arguments.rows)
        prompts = sequences.rows(arguments.rows)[:, :PROMPT_TOKENS].tolist()
        records = {(k,): measure(folder, prompts, arguments) for k, folder in folders.items()}
    settings = {n: getattr(arguments, n) for n in ("engine", *quick)}
    report.print_records("Float32 output layer", settings, ("model",), records)
    report.write(report.flat(records), arguments.json)


if __name__ == "__main__":
    main()
