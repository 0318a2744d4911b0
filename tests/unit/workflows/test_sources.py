"""What is copied to the run folder, and what is only named."""

from __future__ import annotations

import asyncio
import importlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from areal_sc import JsonlPrompts, Prompts, SingleTurnWorkflow, Workflow
from areal_sc.errors import RunFolderError
from areal_sc.workflows.registry import SourceReader, SourceRegistry


class SlowDisk:
    """Its row is there once the event loop has taken a turn meanwhile."""

    def __init__(self, has_turned: threading.Event) -> None:
        self.has_turned = has_turned

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert self.has_turned.wait(60), "the event loop is blocked"
        return {"prompt": "x"}


class Together:
    """Gives its row while another one gives its own."""

    def __init__(self, prompt: str, both: threading.Barrier) -> None:
        self.prompt = prompt
        self.both = both

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.both.wait(60)
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


class Scaled(Prompts):
    def __init__(self, path: Path | str, scale: int) -> None:
        self.path = Path(path)
        self.scale = scale

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": self.path.read_text(), "scale": self.scale}


def changes(
    run_dir: Path, caplog: pytest.LogCaptureFixture, *sources: Any, owner: str = "rollout"
) -> list[str]:
    """What a start with these sources is told."""
    caplog.clear()
    run_dir.mkdir(exist_ok=True)
    registry = SourceRegistry(run_dir, owner)
    for source in sources:
        is_workflow = isinstance(source, Workflow)
        (registry.register_workflow if is_workflow else registry.register_prompts)(source)
    registry.close()
    return [record.getMessage() for record in caplog.records]


def test_other_prompts_than_the_run_began_with_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n')
    rows = [{"prompt": "a", "key": (1, 2)}] * 3

    def begun(**changed: Any) -> list[str]:
        sources = {"list": rows, "file": JsonlPrompts(file), "own": Scaled(str(file), 1)} | changed
        return changes(tmp_path / "run", caplog, *sources.values())

    assert begun() == begun() == []
    assert begun(list=[{"prompt": "a", "key": [1, 2]}] * 3)[0].startswith(
        "dataset 0 of rollout changed since the run began: content "
    )
    assert "number of rows 3 -> 2" in begun(list=rows[:2])[0]
    assert "number of rows 3 -> 2" in begun(list=rows[:2])[0], "with the begin, not the last start"
    (told,) = begun(own=Scaled(file, 2))
    assert told.startswith("dataset 2 of rollout changed since the run began: arguments ")
    file.write_text('{"prompt": "b"}\n')
    of_file, of_own = begun()
    assert of_file.startswith("dataset 1 of rollout changed since the run began: rows.jsonl ")
    assert of_own.startswith("dataset 2 of rollout changed since the run began: rows.jsonl ")
    file.write_text('{"prompt": "a"}\n')
    assert begun() == []
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "part").write_text("1")
    assert begun(folder=Scaled(str(folder), 3)) == []
    (folder / "part").write_text("2")
    (told,) = begun(folder=Scaled(str(folder), 3))
    assert "changed since the run began: part " in told
    (tmp_path / "run").rename(tmp_path / "moved")
    assert changes(tmp_path / "moved", caplog, rows) == []


def test_another_reward_than_the_run_began_with_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "begun_rewards.py"
    code.write_text("import begun_helper\ndef right(prompt, completion): return 1.0\n")
    helper = tmp_path / "begun_helper.py"
    helper.write_text("scale = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("begun_rewards")
    workflow, other = SingleTurnWorkflow(module.right), SingleTurnWorkflow({"right": module.right})
    run_dir = tmp_path / "run"
    assert changes(run_dir, caplog, workflow, SingleTurnWorkflow(module.right)) == []
    (told,) = changes(run_dir, caplog, other)
    assert told.startswith("workflow 0 of rollout changed since the run began: arguments ")
    code.write_text("def right(prompt, completion): return 0.5\n")
    (told,) = changes(run_dir, caplog, workflow)
    assert told.startswith(f"code {code} changed since the run began: begun_rewards.py ")
    helper.write_text("scale = 2\n")
    of_helper, _ = changes(run_dir, caplog, workflow)
    assert of_helper.startswith(f"code {helper} changed since the run began: begun_helper.py ")


def test_a_loop_that_makes_ever_new_lists_notes_a_few(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lists = [[{"prompt": str(n)}] for n in range(10)]
    assert changes(tmp_path, caplog, *lists, *lists) == []
    noted = json.loads((tmp_path / "begun.json").read_text())
    assert [name for name in noted if name.startswith("dataset")] == [
        f"dataset {n} of rollout" for n in range(4)
    ]
