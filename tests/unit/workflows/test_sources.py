"""What is copied to the run folder, and what is only named."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from areal_sc.errors import RunFolderError
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


class Together:
    """Gives its row while another one gives its own."""

    def __init__(self, prompt: str, both: threading.Barrier) -> None:
        self.prompt = prompt
        self.both = both

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.both.wait(20)
        return {"prompt": self.prompt}


async def test_the_event_loop_goes_on_while_a_dataset_is_read(tmp_path: Path) -> None:
    has_turned = threading.Event()
    asyncio.get_running_loop().call_later(0.01, has_turned.set)
    dataset = SlowDisk(has_turned)
    registry = SourceRegistry(tmp_path, "rollout")
    number = await registry.register_prompts_async(dataset)
    assert await registry.register_prompts_async(dataset) == number
    assert SourceReader(tmp_path).prompts(number)[0] == {"prompt": "x"}


async def test_datasets_that_are_registered_at_the_same_time_stay_apart(tmp_path: Path) -> None:
    """Of a batch and an evaluation, say."""
    both = threading.Barrier(2)
    datasets = [Together(prompt, both) for prompt in "ab"]
    registry = SourceRegistry(tmp_path, "rollout")
    numbers = await asyncio.gather(*map(registry.register_prompts_async, datasets))
    reader = SourceReader(tmp_path)
    assert [reader.prompts(number)[0]["prompt"] for number in numbers] == ["a", "b"]


def test_a_source_that_cannot_be_written_is_an_error_of_the_run_folder(tmp_path: Path) -> None:
    (tmp_path / "sources").touch()
    with pytest.raises(RunFolderError, match=r"cannot write .*sources"):
        SourceRegistry(tmp_path, "rollout").register_prompts([{"prompt": "x"}])
