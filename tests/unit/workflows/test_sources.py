"""What is copied to the run folder, and what is only named."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

from areal_sc.workflows.sources import SourceReader, SourceRegistry


class SlowDisk:
    """Its row is there once the event loop has taken a turn meanwhile."""

    def __init__(self, has_turned: threading.Event) -> None:
        self.has_turned = has_turned

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert self.has_turned.wait(20), "the event loop is blocked"
        return {"prompt": "x"}


async def test_the_event_loop_goes_on_while_a_dataset_is_copied(tmp_path: Path) -> None:
    has_turned = threading.Event()
    asyncio.get_running_loop().call_later(0.01, has_turned.set)
    dataset = SlowDisk(has_turned)
    registry = SourceRegistry(tmp_path)
    number = await registry.register_prompts_async(dataset)  # type: ignore[arg-type]
    assert await registry.register_prompts_async(dataset) == number  # type: ignore[arg-type]
    assert SourceReader(tmp_path).prompts(number)[0] == {"prompt": "x"}
