"""What many test modules need in nearly the same form: models, engines, rows, steps, processes.

Torch and transformers are imported where they are used: many tests do without them.
"""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from areal_sc.config.schema import ActorConfig, Device, GRPOConfig, OptimizerConfig
from areal_sc.preflight.load import load_config
from areal_sc.records.metrics import EvaluationResult, StepMetrics
from areal_sc.transport.packed_rows import PackedRows

if TYPE_CHECKING:
    from areal_sc.engines.fsdp.engine import FSDPEngine

SMALL: dict[str, Any] = {
    **{"vocab_size": 30, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}
"""Sizes of a model that trains in a fraction of a second."""


def save_qwen2(folder: Path, **changes: Any) -> Path:
    """Writes a Qwen2 of `SMALL` sizes with random weights, always the same ones."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(**{**SMALL, "tie_word_embeddings": True, **changes})
    Qwen2ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def load(*overrides: str, num_devices: int = 0) -> GRPOConfig:
    """Settings that have all that a run needs, with overrides, on a machine without CUDA devices.

    Args: num_devices: so many it has.
    """
    needed = {"run_dir": "runs/test", "total_steps": 10, "actor.path": "no_such_model"}
    return load_config(needed, GRPOConfig, *overrides, count_devices=lambda: num_devices)


@contextmanager
def engines_on(model: Path) -> Iterator[Callable[..., FSDPEngine]]:
    """Makes engines of one rank; those that are left are closed at the end.

    They are on the CPU, and of the model, unless the settings of `ActorConfig` say otherwise.
    """
    from areal_sc.engines.fsdp.engine import FSDPEngine

    engines: list[FSDPEngine] = []

    def build(path: Path = model, **settings: Any) -> FSDPEngine:
        optimizer = OptimizerConfig(lr=1e-2, total_steps=10)
        defaults = {"device": Device.cpu, "seed": 0, "optimizer": optimizer}
        engine = FSDPEngine(ActorConfig(path=str(path), **defaults | settings))
        engines.append(engine)
        engine.initialize(0, 1, "")
        return engine

    yield build
    for engine in engines:
        engine.close()


def packed_rows(lengths: Sequence[int], seed: int = 0, **further: Any) -> PackedRows:
    """Rows of random tokens below 20, all of which are trained.

    Args:
        further: the rows' other fields, and `advantages`.
    """
    import torch

    num_tokens, advantages = sum(lengths), further.pop("advantages", None)
    generator = torch.Generator().manual_seed(seed)
    fields = {
        "input_ids": torch.randint(0, 20, (num_tokens,), generator=generator).int(),
        "loss_mask": torch.ones(num_tokens, dtype=torch.bool),
    }
    return PackedRows(fields | further, tuple(lengths), advantages)


def _with_workflow(changes: dict[str, Any]) -> dict[str, Any]:
    """`accuracy` stands for the workflow's metric of that name; None: it reports none."""
    if "accuracy" in changes:
        accuracy = changes.pop("accuracy")
        changes["workflow"] = {} if accuracy is None else {"accuracy": accuracy}
    return changes


def make_step(step: int = 1, **changes: Any) -> StepMetrics:
    """What a step may report, unless the changes say otherwise."""
    values: dict[str, Any] = {
        "step": step,
        "reward": 0.25,
        "workflow": {"accuracy": 0.2},
        "train": {
            "loss": 0.0123,
            "entropy": 1.25,
            "grad_norm": 0.61,
            "proximal_kl": 1.5e-4,
            "behavior_kl": 0.02,
        },
        "group_staleness_mean": 1.3,
        "group_staleness_max": 9,
        "signal_share": 0.4,
        "lead": 1.5,
        "slack": 0.3,
        "token_staleness_mean": 0.9,
        "token_staleness_max": 4,
        "num_rows": 256,
        "num_generated_tokens": 6000,
        "num_trained_tokens": 4000,
        "step_time_s": 0.5,
        "wait_s": 0.05,
        "train_s": 0.4,
        "sync_s": 0.02,
    }
    return StepMetrics(**values | _with_workflow(changes))


def make_evaluation(name: str = "before", **changes: Any) -> EvaluationResult:
    """What an evaluation may give, likewise."""
    values: dict[str, Any] = {
        "name": name,
        "step": 0,
        "reward": 0.2,
        "workflow": {"accuracy": 0.2},
        "num_prompts": 64,
        "version_min": 0,
        "version_max": 0,
        "temperature": 1.0,
    }
    return EvaluationResult(**values | _with_workflow(changes))


class NumberTokenizer:
    """As much of a tokenizer as generation and stop strings need: token 12 is `12,`."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def __init__(self, eos_token_id: int | None = None) -> None:
        self.eos_token_id = eos_token_id

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return "".join(f"{token}," for token in token_ids)


class Clock:
    """Attributes: now_s: what it shows."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


OPENS_RUN = """
import sys, time
from areal_sc.run.run_folder import RunFolder
folder = RunFolder(sys.argv[1])
folder.open(config_text="seed: 0\\n")
print("open", flush=True)
time.sleep(600)
"""
"""Source text, for `running_python`: it has the run folder that is its argument."""


@contextmanager
def running_python(
    source: str, *arguments: str | Path, says: str
) -> Iterator[subprocess.Popen[str]]:
    """A process that has said a line; it is killed at the end, if it lives.

    Args:
        source: its text; it gets the arguments.
        says: the line.
    """
    command = [sys.executable, "-c", source, *map(str, arguments)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            assert process.stdout.readline() == f"{says}\n"
            yield process
        finally:
            process.kill()


def picture(seed: int = 0, width: int = 30, height: int = 20, kind: str = "PNG") -> bytes:
    """A picture of random colours."""
    import numpy as np
    from PIL import Image

    colours = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(colours).save(content, kind)
    return content.getvalue()
