"""A dataset and a workflow that are only ever named: simulated workers run nothing."""

from __future__ import annotations

from typing import Any

from areal_sc.sources.prompts import Prompts
from areal_sc.workflows.base import EpisodeEngine, Trajectory, Workflow


class NumberedPrompts(Prompts):
    """`size` prompts without content."""

    def __init__(self, size: int = 1000) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": str(index)}


class NamedWorkflow(Workflow):
    """Never run."""

    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> Trajectory | None:
        raise NotImplementedError
