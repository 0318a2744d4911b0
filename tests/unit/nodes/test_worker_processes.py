from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_sc.nodes import worker_processes
from areal_sc.nodes.worker_processes import WorkerProcesses
from areal_sc.run.run_folder import RunFolder
from areal_sc.transport.rpc.newest_term import NewestTerm


async def test_of_very_many_ends_the_newest_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_processes, "_MAX_ENDED", 3)
    fork_server: Any = SimpleNamespace(is_gone=SimpleNamespace(is_set=lambda: False))
    processes = WorkerProcesses(fork_server, RunFolder(tmp_path), NewestTerm(0))
    for number in range(7):
        order = SimpleNamespace(name="rollout/0", incarnation=f"life-{number}")
        worker: Any = SimpleNamespace(order=order, child=SimpleNamespace(how="exit code 1", pid=1))
        processes.living[order.incarnation] = worker
        processes._on_end(worker)

    def since(number: int) -> list[str]:
        return [end.incarnation for end in processes.ended_since(number)]

    assert since(0) == since(2) == ["life-4", "life-5", "life-6"]
    assert since(5) == ["life-5", "life-6"]
    assert since(7) == since(8) == []
