"""The Ray cluster that lends the nodes of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from areal_sc.config.fields import setting


@dataclass
class RayConfig:
    """What the ray scheduler asks its cluster for."""

    address: str = setting("auto", "host:6379, ray://host:10001; auto: this machine's cluster")
    nodes: int = setting(0, "Ray nodes, each gets one agent; 0: all that have the resources", ge=0)
    resources: dict[str, float] = setting(
        dict, "of each node: {GPU: 8, CPU: 64}; empty: all CPUs and GPUs that it has"
    )
    runtime_env: dict[str, Any] = setting(dict, "of the actors, as ray.init takes it")
