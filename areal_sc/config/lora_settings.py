"""Low-rank adapters (LoRA), trained in place of a model's own parameters."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from areal_sc.config.fields import setting

_NO_RANK = ("rank=0: all parameters are trained",)

ADAPTER_CONFIG: Final = "adapter_config.json"
"""The file of an adapter's folder that has its settings, by peft's names."""

PEFTS_SIZE: Final = 8
"""Rank and alpha of an adapter whose settings do not name them."""


@dataclass
class LoraConfig:
    """A low-rank adapter beside a model that stays as it is: only the adapter is trained."""

    rank: int = setting(0, "rank of the adapter's matrices; 0: all parameters are trained", ge=0)
    alpha: float = setting(
        16.0, "the adapter's product is multiplied by alpha / rank", gt=0, idle=_NO_RANK
    )
    targets: list[str] = setting(
        list,
        "linear layers by the end of their names, q_proj say; empty: all of decoder layers",
        idle=_NO_RANK,
    )
    dropout: float = setting(
        0.0,
        "share of the adapter's inputs that an update leaves out; 0 with PPO",
        ge=0,
        lt=1,
        idle=_NO_RANK,
    )
    path: str = setting(
        "", "adapter to begin from, a folder of peft's format; empty: a new one", idle=_NO_RANK
    )
    places: int = setting(
        1,
        "adapters that are trained beside each other; field `adapter` of a row says which is its",
        ge=1,
        idle=_NO_RANK,
    )
    save_merged: bool = setting(
        True,
        "models are written with the adapter merged; false: the adapter alone",
        idle=_NO_RANK,
    )
    publish_merged: bool = setting(
        True,
        "new weights are whole, with the adapter merged; false: servers get the adapter alone",
        idle=(*_NO_RANK, ".head=value"),
    )

    @property
    def is_published_alone(self) -> bool:
        """Whether generation gets the adapter, and keeps the model that it began with."""
        return self.rank > 0 and not self.publish_merged

    @property
    def is_named(self) -> bool:
        """Whether there are several, so that a request of generation names its own."""
        return self.rank > 0 and self.places > 1


@dataclass
class FrozenAdapterConfig:
    """A low-rank adapter that a model which only computes has beside its parameters."""

    path: str = setting("", "adapter, a folder of peft's format; empty: none")

    def whole(self) -> LoraConfig:
        """The settings of the adapter, which its folder has.

        Where they cannot be read, those of any adapter: whoever reads its weights tells of it.
        """
        if not self.path:
            return LoraConfig()
        try:
            stored = json.loads((Path(self.path) / ADAPTER_CONFIG).read_text(encoding="utf-8"))
            rank, alpha = stored.get("r", PEFTS_SIZE), stored.get("lora_alpha", PEFTS_SIZE)
            targets = stored.get("target_modules") or []
            return LoraConfig(
                rank, alpha, [] if isinstance(targets, str) else targets, path=self.path
            )
        except (OSError, ValueError, AttributeError):
            return LoraConfig(PEFTS_SIZE, path=self.path)
