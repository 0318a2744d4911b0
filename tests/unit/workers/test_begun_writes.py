"""Which calls begin a write of a rank, and which join one: every rank must do the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_sc.workers.begun_writes import BegunWrites
from areal_sc.workers.operations import Kind, Operation, Operations
from areal_sc.workers.rank_methods import Change, Write


class Engine:
    """Writes until it is told that it has."""

    def __init__(self) -> None:
        self.writes: list[Future[None]] = []

    def begin_save_hf(self, folder: Path, *, is_staged: bool = True) -> Future[None]:
        self.writes.append(Future())
        return self.writes[-1]

    begin_snapshot = begin_save_hf

    def load_snapshot(self, folder: Path) -> None: ...


@pytest.mark.parametrize("kind", [Kind.snapshot, Kind.export])
async def test_a_repeat_joins_what_is_written_and_another_call_begins_it_anew(
    tmp_path: Path, kind: Kind
) -> None:
    async def compute(function: Callable[[], Any]) -> Any:
        return function()

    async def bring_back(folder: Path, names: list[str] | None) -> None: ...

    engine = Engine()
    place = SimpleNamespace(
        order=SimpleNamespace(role="train"), run=SimpleNamespace(run_dir=str(tmp_path))
    )
    files = SimpleNamespace(bring_back=bring_back, script_path=str)
    operations = Operations("train/0")
    rank: Any = SimpleNamespace(
        engine=engine, spec=place, files=files, operations=operations, compute=compute, number=0
    )
    writes = BegunWrites(rank)
    operation = Operation(0, 0, kind)
    for call, num_writes in (("a", 1), ("b", 2)):
        await writes.begin(Write(operation, call))
        await writes.begin(Write(operation, call))
        engine.writes[-1].set_result(None)
        await writes.finish(Change(operation))
        await writes.begin(Write(operation, call))  # came late: the other ranks may still write
        assert len(engine.writes) == num_writes
    await writes.begin(Write(operation, "c"))
    await writes.begin(Write(operation, "d"))  # of a start that has taken the rank over
    engine.writes[-1].set_result(None)
    await asyncio.wait_for(writes.finish(Change(operation)), 60)
    await writes.begin(Write(operation, "d"))
    assert len(engine.writes) == 3
