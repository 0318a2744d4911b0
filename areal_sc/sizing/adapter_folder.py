"""A folder with a low-rank adapter, in peft's format: what its settings say.

    adapter_config.json          rank, alpha, names of the layers, the model that it belongs to
    adapter_model.safetensors    A and B of each layer

No torch is imported here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from areal_sc.config.lora_settings import ADAPTER_CONFIG, PEFTS_SIZE, LoraConfig
from areal_sc.errors import ModelError

ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"

_PLAIN: Final[dict[str, tuple[Any, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # others take a part off the model's own weights, which the file does not hold
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva", "mica"),
}
"""Settings of peft that can change what an adapter computes -> values of a plain one."""

_WITHOUT_EFFECT: Final = frozenset(
    [
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
        *("task_type", "megatron_core", "eva_config", "lora_dropout", "qalora_group_size"),
        # which layers have an adapter, which its tensors show
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("r", "lora_alpha"),  # compared with the run's own
    ]
)
"""Settings of peft that may have any value."""

_OFF: Final[tuple[Any, ...]] = (None, False, {}, [])
"""Values with which any other setting, of a later peft too, leaves an adapter as it is."""


def is_adapter_folder(path: str | Path) -> bool:
    """Whether a folder is an adapter's."""
    return (Path(path) / ADAPTER_CONFIG).is_file()


def adapter_config(lora: LoraConfig, base: str, layers: Iterable[str]) -> str:
    """The content of `adapter_config.json`.

    Args:
        base: path or name of the model.
        layers: names of those that have an adapter.
    """
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(lora.targets or {name.rpartition(".")[2] for name in layers}),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "use_rslora": False,
        "inference_mode": True,
    }
    return json.dumps(settings, indent=2, sort_keys=True) + "\n"


def stored_rank(folder: Path) -> int:
    """The rank of the adapter in a folder. Raises: ModelError: see `rank_and_alpha`."""
    return rank_and_alpha(folder, str(folder))[0]


def check_adapter(lora: LoraConfig) -> None:
    """Checks that the adapter in `lora.path` is one that training can begin from.

    Raises: ModelError: there is none, it is of another kind, or of another rank or alpha.
    """
    folder = Path(lora.path)
    for stored, own, key in zip(
        rank_and_alpha(folder, f"actor.lora.path={folder}"),
        (lora.rank, lora.alpha),
        ("rank", "alpha"),
        strict=True,
    ):
        if stored != own:
            raise ModelError(
                f"actor.lora.{key}: expected {stored}, which the adapter in {folder} has, got "
                f"{own:g}"
            )


def rank_and_alpha(folder: Path, name: str) -> tuple[int, float]:
    """The size of an adapter, and what its product is multiplied by, before it is divided by that.

    Args:
        name: of the adapter, for messages.
    Raises: ModelError: there is no adapter, or it is of another kind than is trained here.
    """
    settings = _read(folder, name)
    for key, value in ({"peft_type": None} | settings).items():
        if key not in _WITHOUT_EFFECT and value not in _PLAIN.get(key, _OFF):
            plain = f"with {key}={_PLAIN[key][0]}" if key in _PLAIN else f"without {key}"
            raise ModelError(
                f"{name}: expected an adapter {plain}, got {value!r}: merge it "
                "into the model with peft, and train a new one"
            )
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ModelError(f"{name}: it has no {ADAPTER_WEIGHTS}")
    rank, alpha = settings.get("r", PEFTS_SIZE), settings.get("lora_alpha", PEFTS_SIZE)
    if type(rank) is not int or rank < 1:
        raise ModelError(f"{name}: expected r to be a count above 0, got {rank!r}")
    if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise ModelError(f"{name}: expected lora_alpha to be a number above 0, got {alpha!r}")
    return rank, alpha


def _read(folder: Path, name: str = "adapter") -> dict[str, Any]:
    path = folder / ADAPTER_CONFIG
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: cannot read {path.name}: {error}") from error
    if not isinstance(settings, dict):
        raise ModelError(f"{name}: {path.name} is no JSON object")
    return settings
